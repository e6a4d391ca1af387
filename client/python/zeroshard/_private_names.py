"""Private names of other libraries. Each is looked up where it is used, so that a version that does
not have it loses the features that need it, and nothing else.

The file ``_private.py`` of a library lists its names and is the only one that uses them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._versions import BOUNDS, installed, package_of
from .errors import MissingNameError

#: The names of each library, by the name of its module.
REGISTERED: dict[str, list[PrivateName]] = {}


class PrivateName:
    """A private name of a library: where it is, which features need it, and what happens without
    it."""

    def __init__(
        self,
        path: str,
        features: tuple[str, ...],
        without: str,
        *,
        on: Callable[[], Any] | None = None,
        behaves: Callable[[Any], bool] | None = None,
        optional: bool = False,
    ) -> None:
        """
        Args:
            path: its path, such as ``"torch.Tensor._version"``.
            features: the features that need it.
            without: what happens in a version that does not have it, as a sentence.
            on: returns an object that has the name, if neither the module nor the class in its path
                has it.
            behaves: returns whether its value, as :meth:`get` returns it, does what it is used for.
                It is cheap and changes nothing.
            optional: whether every feature works without it, perhaps more slowly.
        """
        self.owner, _, self.attribute = path.rpartition(".")
        self.path = path
        self.library = path.partition(".")[0]
        self.features = () if optional else features
        self.without = without
        self._on = on
        self._behaves = behaves
        self._holder: Any = None
        REGISTERED.setdefault(self.library, []).append(self)

    # ---- uses

    def of(self, owner: Any) -> Any:
        """The attribute of an object that has this name.

        Raises :class:`~zeroshard.MissingNameError` if it has no such attribute.
        """
        try:
            return getattr(owner, self.attribute)
        except AttributeError as error:
            raise self.missing() from error

    def set(self, owner: Any, value: Any) -> None:
        """Sets the attribute of an object that has it."""
        self.of(owner)
        setattr(owner, self.attribute, value)

    def get(self) -> Any:
        """The member of its module or class that has this name.

        Raises :class:`~zeroshard.MissingNameError` if there is none.
        """
        if self._holder is None:
            try:
                self._holder = self._found_holder()
            except (ImportError, AttributeError) as error:
                raise self.missing() from error
        return self.of(self._holder)

    def find(self) -> Any | None:
        """As :meth:`get`. None if there is none."""
        try:
            return self.get()
        except MissingNameError:
            return None

    def replace(self, replaced: Callable[[Any], Any]) -> None:
        """Replaces the member of its module, for the whole process, by what a function makes of
        it."""
        found = self.get()
        setattr(self._holder, self.attribute, replaced(found))

    def missing(self) -> MissingNameError:
        """The error for a library that does not have this name."""
        package = package_of(self.library)
        needs = " and ".join(self.features) or "this call"
        return MissingNameError(
            f"{needs} cannot be used with {package} {installed(self.library)}, which has no "
            f"{self.path}; install {package}{BOUNDS[package]}"
        )

    # ---- the probe

    def is_there(self) -> bool:
        """Returns whether the library has the name, and it behaves as it should."""
        try:
            found = self.get() if self._on is None else self.of(self._on())
            return self._behaves is None or bool(self._behaves(found))
        except Exception:
            # Whatever a probe raises, the name cannot be used.
            return False

    def _found_holder(self) -> Any:
        """The module or class in the path."""
        module, names = self.owner, ""
        while True:
            try:
                found: Any = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, name = module.rpartition(".")
                if not module:
                    raise
                names = f"{name}.{names}" if names else name
        for name in filter(None, names.split(".")):
            found = getattr(found, name)
        return found


class MentionedName(PrivateName):
    """A private name that a library sets or reads on objects that only a script has. The probe
    looks for it in the source of the library, which it does not import."""

    def __init__(self, path: str, features: tuple[str, ...], without: str, *, source: str) -> None:
        """``source``: the file or the folder of the library that has the name."""
        super().__init__(path, features, without)
        self._source = source

    def is_there(self) -> bool:
        found = importlib.util.find_spec(self.library)
        if found is None or found.origin is None:
            return False
        start = Path(found.origin).parent / self._source
        files = [start] if start.is_file() else start.rglob("*.py")
        name = re.compile(rf"\b{self.attribute}\b")
        return any(name.search(file.read_text(encoding="utf-8")) for file in files)
