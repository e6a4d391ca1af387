"""Files of a saved model: a directory, and files in it that appear only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .errors import InvalidArgumentError


def directory(output: str | os.PathLike[str]) -> Path:
    """Where a model is saved, or has been: a directory, or nothing as yet."""
    found = Path(output)
    if found.exists() and not found.is_dir():
        raise InvalidArgumentError(
            f"output is {os.fspath(output)!r}, a file; it must be a directory"
        )
    return found


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Has ``save`` write to a file beside the path, which takes its place."""
    partial = path.with_name(path.name + ".partial")
    save(partial)
    partial.replace(path)


def existing(path: Path) -> Path:
    """A file that is there to be loaded."""
    if not path.is_file():
        raise InvalidArgumentError(
            f"{str(path)!r} is not there; it must be a file that save_group_sharded_model wrote"
        )
    return path
