"""Saves and loads whole models and optimizers as plain torch state dicts."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._files import directory, existing, write
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state
from ._one_version import OneVersion, read_one_version
from ._optimizer import ShardedOptimizer
from ._placeholders import placing
from ._sharded_module import ShardedModule
from ._streamed_file import save

_MODEL = "model.pt"
_OPTIMIZER = "optimizer.pt"


def save_group_sharded_model(
    model: nn.Module, output: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Writes ``model.pt`` and, if an optimizer is given, ``optimizer.pt`` to the directory
    ``output``.

    The files contain the whole state, including frozen parameters and buffers, and can be loaded
    without ZeroShard. They are of one version of the model. Every rank may call it; rank 0 writes,
    one tensor after the other, so that it needs memory for the largest one. A file appears only
    when it is complete.
    """
    sharded = _sharded(model)
    folder = directory(output)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; "
            "it must be an optimizer of zeroshard.shard or group_sharded_parallel"
        )
    sharding = sharded._zeroshard.sharding
    if sharding.job.group.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def write_all(version: OneVersion) -> None:
        with placing(sharding, version) as placeholders:
            states = {_MODEL: sharded.state_dict()}
            if optimizer is not None:
                states[_OPTIMIZER] = optimizer.state_dict()
        for name, state in states.items():
            write(folder / name, partial(save, state, values=placeholders.values))

    read_one_version(sharding, write_all)


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


def _sharded(model: nn.Module) -> ShardedModule:
    if not isinstance(model, ShardedModule):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__} that is not sharded; pass a model of "
            "zeroshard.shard, or the one that group_sharded_parallel has returned"
        )
    return model


def _read(path: Path) -> dict[str, Any]:
    # The file is mapped into memory: rank 0 reads it tensor by tensor.
    state: dict[str, Any] = torch.load(
        existing(path), map_location="cpu", weights_only=True, mmap=True
    )
    return state
