"""Files of a saved model, which appear in their directory only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .errors import InvalidArgumentError


def directory(output: str | os.PathLike[str]) -> Path:
    """The directory in which a model is saved. It need not exist."""
    found = Path(output)
    if found.exists() and not found.is_dir():
        raise InvalidArgumentError(
            f"output is {os.fspath(output)!r}, which is a file; it must be a directory"
        )
    return found


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Calls ``save`` with a temporary path, then renames the file to ``path``."""
    partial = path.with_name(path.name + ".partial")
    save(partial)
    partial.replace(path)


def existing(path: Path) -> Path:
    """Returns the path of a file to load, or raises an error if it does not exist."""
    if not path.is_file():
        raise InvalidArgumentError(
            f"{str(path)!r} does not exist; it must be a file written by save_group_sharded_model"
        )
    return path
