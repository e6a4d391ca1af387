"""Saving and loading: plain Paddle state dicts, whole, that an unwrapped model and optimizer can load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paddle

from ..errors import InvalidArgument
from ._dtensor import parts_of_state
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer

# The names are Paddle's.
_MODEL = "model.pdmodel"
_OPTIMIZER = "model.pdopt"


def save_group_sharded_model(model: Any, output: str | os.PathLike[str], optimizer: Any | None = None) -> None:
    """Writes ``model.pdmodel`` and, with an optimizer, ``model.pdopt`` into the directory ``output``.

    Both are whole, frozen parameters and buffers included. Every rank may call it; rank 0 writes. A file appears only
    when it is complete.
    """
    if not isinstance(model, GroupSharded):
        raise InvalidArgument(
            f"model is a {type(model).__name__}; it must be the one that group_sharded_parallel returned"
        )
    directory = _directory(output)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}; it must be the one that group_sharded_parallel returned"
        )
    if model.sharding.job.rank != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _write(whole_state(model), directory / _MODEL)
    if optimizer is not None:
        _write(optimizer.state_dict(), directory / _OPTIMIZER)


def load_group_sharded_model(model: Any, output: str | os.PathLike[str], optimizer: Any | None = None) -> None:
    """Loads what :func:`save_group_sharded_model` wrote, into wrapped or plain model and optimizer.

    For wrapped ones every rank must call it. Paddle finds an optimizer's state by the names of the parameters, which
    must be as they were: those of a model that is made in the same order in a process of its own.
    """
    directory = _directory(output)
    model.set_state_dict(parts_of_state(model, _read(directory / _MODEL)))
    if optimizer is not None:
        optimizer.set_state_dict(_read(directory / _OPTIMIZER))


def whole_state(model: GroupSharded) -> dict[str, Any]:
    """The state dict of a wrapped model; what of it is distributed comes whole from the servers."""
    job, state = model.sharding.job, dict(model.state_dict())
    distributed = {
        name: job.entry(parameter)
        for name, parameter in model._layer.named_parameters(remove_duplicate=False)
        if parameter.is_dist()
    }
    for entry in distributed.values():
        if entry.modified:
            raise InvalidArgument(
                f"parameter {entry.name!r} was written to and the servers do not know it yet; it must be saved after the next "
                "forward or step"
            )
    found = job.whole({entry.name: entry for entry in distributed.values()}.values())
    return state | {name: found[entry.name].astype(entry.tensor.dtype) for name, entry in distributed.items()}


def _directory(output: str | os.PathLike[str]) -> Path:
    directory = Path(output)
    if directory.exists() and not directory.is_dir():
        raise InvalidArgument(f"output is {os.fspath(output)!r}, a file; it must be a directory")
    return directory


def _write(state: dict[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    paddle.save(state, str(partial))
    partial.replace(path)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidArgument(f"{str(path)!r} is not there; it must be a file that save_group_sharded_model wrote")
    state: dict[str, Any] = paddle.load(str(path))
    return state
