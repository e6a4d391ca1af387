"""The versions of other libraries that the package is tested with. The extras of the package have
the same bounds, which a test compares."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from .errors import UnsupportedVersionError

#: If it is 1, versions outside of the bounds are a warning and not an error.
ALLOW_UNTESTED = "ZEROSHARD_ALLOW_UNTESTED_VERSIONS"


@dataclass(frozen=True)
class Bounds:
    """The versions of a library from ``lowest``, which is tested, to before ``below``, which is the
    next one after the newest that is tested."""

    lowest: str
    below: str

    def __str__(self) -> str:
        return f">={self.lowest},<{self.below}"

    def include(self, version: str) -> bool:
        """Returns whether a version is within the bounds. What follows its numbers, such as
        ``+cpu`` or ``rc1``, does not count."""
        return _numbers(self.lowest) <= _numbers(version) < _numbers(self.below)


#: By the name of the extra.
EXTRAS: dict[str, dict[str, Bounds]] = {
    "torch": {"torch": Bounds("2.7", "2.16")},
    "paddle": {"paddlepaddle": Bounds("3.2.2", "3.4")},
    "transformers": {"transformers": Bounds("5.23", "6")},
    "accelerate": {"accelerate": Bounds("1.12", "2")},
    "lightning": {"lightning": Bounds("2.5.6", "2.7")},
}

#: By the name of the package.
BOUNDS: dict[str, Bounds] = {name: of for extra in EXTRAS.values() for name, of in extra.items()}

#: The packages that provide a module, of which one is installed: Paddle for GPUs has another name.
_PACKAGES = {"paddle": ("paddlepaddle", "paddlepaddle-gpu")}


def package_of(module: str) -> str:
    """The package of a module in :data:`BOUNDS`."""
    return _PACKAGES.get(module, (module,))[0]


def installed(module: str) -> str | None:
    """The version of the package that provides a module. None if it is not installed."""
    for package in _PACKAGES.get(module, (module,)):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found = getattr(sys.modules.get(module), "__version__", None)
    return None if found is None else str(found)


def check_versions(modules: Iterable[str]) -> None:
    """Checks the versions of those of these modules that the script has imported.

    Raises:
        UnsupportedVersionError: a version is outside of the bounds.
    """
    for module in modules:
        if module not in sys.modules:
            continue
        version, bounds = installed(module), BOUNDS[package_of(module)]
        if version is None or bounds.include(version):
            continue
        found = f"{package_of(module)} {version} is installed, which ZeroShard is not tested with"
        if os.environ.get(ALLOW_UNTESTED) == "1":
            warnings.warn(found, stacklevel=3)
            continue
        raise UnsupportedVersionError(
            f"{found}; install {package_of(module)}{bounds}, or set {ALLOW_UNTESTED}=1 to use it "
            "all the same"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 15, 0) of "2.15.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    return tuple([*numbers, 0, 0, 0][: max(3, len(numbers))])
