"""The programs that a release installs beside the package."""

from __future__ import annotations

import shutil
import sysconfig

from .errors import UnavailableError


def program(name: str) -> str:
    """Returns the path of a program: the one that was installed with this package, otherwise the
    first one on ``PATH``.

    Raises:
        UnavailableError: there is none.
    """
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise UnavailableError(
            f"{name} is not installed; install the wheel of a release, which contains it, or build "
            f"it with `cargo build --release --bin {name}` and add its directory to PATH"
        )
    return path
