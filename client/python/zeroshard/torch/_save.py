"""Saves and loads whole models and optimizers as plain torch state dicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._files import directory, existing, write
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer

_MODEL = "model.pt"
_OPTIMIZER = "optimizer.pt"


def save_group_sharded_model(
    model: nn.Module, output: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Writes ``model.pt`` and, if an optimizer is given, ``optimizer.pt`` to the directory
    ``output``.

    The files contain the whole state, including frozen parameters and buffers, and can be loaded
    without ZeroShard. Every rank may call it; rank 0 writes. A file appears only when it is
    complete.
    """
    wrapped = _wrapped(model)
    folder = directory(output)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; "
            "it must be an optimizer returned by group_sharded_parallel"
        )
    if wrapped.sharding.job.group.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(_whole_state(wrapped), folder / _MODEL)
    if optimizer is not None:
        _write(optimizer.state_dict(), folder / _OPTIMIZER)


def load_group_sharded_model(
    model: nn.Module, output: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Loads the files of :func:`save_group_sharded_model` into a sharded or plain model and
    optimizer.

    Every rank must call it if they are sharded.
    """
    folder = directory(output)
    model.load_state_dict(parts_of_state(model, _read(folder / _MODEL)))
    if optimizer is not None:
        optimizer.load_state_dict(_read(folder / _OPTIMIZER))


def _whole_state(wrapped: GroupSharded) -> dict[str, Any]:
    """The model's state dict. Distributed parameters are fetched whole from the servers."""
    distributed = {
        name: parameter
        for name, parameter in wrapped.module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }
    whole = wrapped.sharding.whole(distributed)
    state = wrapped.state_dict()
    return {
        name: whole[name].to(value.dtype) if name in whole else value
        for name, value in state.items()
    }


def _wrapped(model: nn.Module) -> GroupSharded:
    if not isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be a model returned by "
            "group_sharded_parallel"
        )
    return model


def _write(state: dict[str, Any], path: Path) -> None:
    write(path, lambda partial: torch.save(state, partial))


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(existing(path), map_location="cpu", weights_only=True)
    return state
