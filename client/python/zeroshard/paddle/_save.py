"""Saving and loading: plain Paddle state dicts, whole, that an unwrapped model and optimizer can
load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paddle

from .._files import directory, existing, write
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer

# The names are Paddle's.
_MODEL = "model.pdmodel"
_OPTIMIZER = "model.pdopt"


def save_group_sharded_model(
    model: Any, output: str | os.PathLike[str], optimizer: Any | None = None
) -> None:
    """Writes ``model.pdmodel`` and, with an optimizer, ``model.pdopt`` into the directory
    ``output``.

    Both are whole, frozen parameters and buffers included. Every rank may call it; rank 0 writes. A
    file appears only when it is complete.
    """
    if not isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be the one that group_sharded_parallel returned"
        )
    folder = directory(output)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; it must be the one that group_sharded_parallel returned"
        )
    if model.sharding.job.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(whole_state(model), folder / _MODEL)
    if optimizer is not None:
        _write(optimizer.state_dict(), folder / _OPTIMIZER)


def load_group_sharded_model(
    model: Any, output: str | os.PathLike[str], optimizer: Any | None = None
) -> None:
    """Loads what :func:`save_group_sharded_model` wrote, into wrapped or plain model and optimizer.

    For wrapped ones every rank must call it. Paddle finds an optimizer's state by the names of the
    parameters, which must be as they were: those of a model that is made in the same order in a
    process of its own.
    """
    folder = directory(output)
    model.set_state_dict(parts_of_state(model, _read(folder / _MODEL)))
    if optimizer is not None:
        optimizer.set_state_dict(_read(folder / _OPTIMIZER))


def whole_state(model: GroupSharded) -> dict[str, Any]:
    """The state dict of a wrapped model; what of it is distributed comes whole from the servers."""
    distributed = {
        name: parameter
        for name, parameter in model._layer.named_parameters(remove_duplicate=False)
        if parameter.is_dist()
    }
    found = model.sharding.whole(distributed)
    return dict(model.state_dict()) | {
        name: value.astype(distributed[name].dtype) for name, value in found.items()
    }


def _write(state: dict[str, Any], path: Path) -> None:
    write(path, lambda partial: paddle.save(state, str(partial)))


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = paddle.load(str(existing(path)))
    return state
