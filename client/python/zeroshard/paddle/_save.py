"""Saves and loads whole models and optimizers as plain Paddle state dicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paddle

from .._files import directory, existing, write
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state
from ._memory import is_guarded
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._private import before_jit_save

# Paddle's file names.
_MODEL = "model.pdmodel"
_OPTIMIZER = "model.pdopt"


def save_group_sharded_model(
    model: Any, output: str | os.PathLike[str], optimizer: Any | None = None
) -> None:
    """Writes ``model.pdmodel`` and, if an optimizer is given, ``model.pdopt`` to the directory
    ``output``.

    The files contain the whole state, including frozen parameters and buffers, and can be loaded
    without ZeroShard. Every rank may call it; rank 0 writes. A file appears only when it is
    complete.
    """
    if not isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be a model returned by "
            "group_sharded_parallel"
        )
    folder = directory(output)
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; "
            "it must be an optimizer returned by group_sharded_parallel"
        )
    if model.sharding.job.group.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(whole_state(model), folder / _MODEL)
    if optimizer is not None:
        _write(optimizer.state_dict(), folder / _OPTIMIZER)


def load_group_sharded_model(
    model: Any, output: str | os.PathLike[str], optimizer: Any | None = None
) -> None:
    """Loads the files of :func:`save_group_sharded_model` into a sharded or plain model and
    optimizer.

    Every rank must call it if they are sharded. Paddle finds an optimizer's state by the names of
    the parameters. They are equal if the model is created in the same order in a new process.
    """
    folder = directory(output)
    model.set_state_dict(parts_of_state(model, _read(folder / _MODEL)))
    if optimizer is not None:
        optimizer.set_state_dict(_read(folder / _OPTIMIZER))


def whole_state(model: GroupSharded) -> dict[str, Any]:
    """The state dict of a sharded model. Distributed parameters are fetched whole from the
    servers."""
    distributed = {
        name: parameter
        for name, parameter in model._layer.named_parameters(remove_duplicate=False)
        if parameter.is_dist()
    }
    found = model.sharding.reads.whole(distributed)
    return dict(model.state_dict()) | {
        name: value.astype(distributed[name].dtype) for name, value in found.items()
    }


def _write(state: dict[str, Any], path: Path) -> None:
    write(path, lambda partial: paddle.save(state, str(partial)))


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = paddle.load(str(existing(path)))
    return state


def refuse_jit_save() -> None:
    """Makes ``paddle.jit.save`` refuse layers whose parameters are on the servers."""
    before_jit_save(_check_not_on_servers)


def _check_not_on_servers(layer: Any, *_: Any) -> None:
    if isinstance(layer, paddle.nn.Layer) and any(
        map(is_guarded, layer.sublayers(include_self=True))
    ):
        raise InvalidArgumentError(
            "the layer is sharded at level p_g_os, whose parameters a static graph cannot contain; "
            "create the layer anew, load its state_dict() into it, and pass that to paddle.jit.save"
        )
