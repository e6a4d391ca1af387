"""What ZeroShard can do with the installed versions of Python, torch, Paddle and the libraries of
the integrations."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from dataclasses import dataclass, field

from ._native import __version__
from ._private_names import REGISTERED
from ._versions import BOUNDS, Bounds, installed, package_of

#: The modules that have private names, by the file that lists them.
_DOORS = {
    "zeroshard.torch._private": ("torch",),
    "zeroshard.paddle._private": ("paddle",),
    "zeroshard.integrations._private": ("transformers", "accelerate", "lightning"),
}


@dataclass(frozen=True)
class Library:
    """A library that ZeroShard uses."""

    #: The name of the package.
    name: str
    #: The installed version; None if it is not installed.
    version: str | None
    #: The versions that ZeroShard is tested with.
    bounds: Bounds
    #: Why it cannot be imported; None if it can be, or is not installed.
    error: str | None = None

    @property
    def ok(self) -> bool:
        """``True`` if the library is not installed, or can be used."""
        if self.error is not None:
            return False
        return self.version is None or self.bounds.include(self.version)

    def __str__(self) -> str:
        if self.version is None:
            return f"{self.name}: not installed"
        tested = "tested" if self.ok else "NOT TESTED"
        shown = f"{self.name} {self.version}: {tested} with {self.bounds}"
        return shown if self.error is None else f"{self.name} {self.version}: {self.error}"


@dataclass(frozen=True)
class MissingName:
    """A private name that the installed version of a library does not have."""

    #: Its path, such as ``"torch.Tensor._version"``.
    name: str
    #: The features that are lost. Empty if ZeroShard does without the name.
    features: tuple[str, ...]
    #: What happens instead.
    without: str

    def __str__(self) -> str:
        lost = f"lost: {', '.join(self.features)}" if self.features else "nothing is lost"
        return f"{self.name} is missing; {lost}. {self.without}"


@dataclass(frozen=True)
class Environment:
    """The result of :func:`check`. ``print`` it, or read the fields."""

    #: The version of ZeroShard.
    version: str
    #: The version of Python.
    python: str
    #: The libraries that ZeroShard can use.
    libraries: tuple[Library, ...]
    #: The private names that the installed versions do not have.
    missing: tuple[MissingName, ...]
    #: The number of private names that were looked for.
    looked_for: int = field(default=0)

    @property
    def lost(self) -> tuple[str, ...]:
        """The features that cannot be used, sorted."""
        return tuple(sorted({feature for name in self.missing for feature in name.features}))

    @property
    def ok(self) -> bool:
        """``True`` if all installed versions are tested ones and no feature is lost."""
        return not self.lost and all(library.ok for library in self.libraries)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"zeroshard {self.version}, Python {self.python}",
                *map(str, self.libraries),
                f"private names: {self.looked_for - len(self.missing)} of {self.looked_for} found",
                *map(str, self.missing),
                "lost features: " + (", ".join(self.lost) or "none"),
            ]
        )


def check() -> Environment:
    """Looks at what ZeroShard can do in this environment, without a cluster.

        print(zeroshard.check())  # or, in a shell: zeroshard check

    Compares the installed versions of torch, Paddle, Transformers, Accelerate and Lightning with
    those that ZeroShard is tested with, and looks for each private name of theirs that ZeroShard
    uses. Imports torch and Paddle if they are installed and the script has imported neither of
    them, and otherwise only what the script has imported.

    Returns:
        An object with the fields ``python``, ``libraries`` (with ``name``, ``version``, ``bounds``
        and ``ok``), ``missing`` (with ``name``, ``features`` and ``without``) and ``lost``, the
        features that cannot be used. ``ok`` is True if all versions are tested ones and nothing is
        lost. ``str`` of it is readable.
    """
    frameworks = [name for name in ("torch", "paddle") if name in sys.modules] or [
        "torch",
        "paddle",
    ]
    errors: dict[str, str] = {}
    names = []
    for door, modules in _DOORS.items():
        present = [name for name in modules if importlib.util.find_spec(name) is not None]
        if not present or present[0] in ("torch", "paddle") and present[0] not in frameworks:
            continue
        try:
            importlib.import_module(door)
        except ImportError as error:
            errors |= {name: f"cannot be imported: {error}" for name in present}
            continue
        names += [name for module in present for name in REGISTERED[module]]
    libraries = tuple(
        Library(package, installed(module), BOUNDS[package], errors.get(module))
        for modules in _DOORS.values()
        for module in modules
        for package in (package_of(module),)
    )
    missing = tuple(
        MissingName(name.path, name.features, name.without) for name in names if not name.is_there()
    )
    return Environment(
        __version__, platform.python_version(), libraries, missing, looked_for=len(names)
    )
