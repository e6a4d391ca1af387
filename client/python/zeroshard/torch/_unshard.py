"""Ends the sharding of a model, which then is the plain module that it was before."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .._core.sharding import forget
from ._assign import allow_assign
from ._compiled import stop_gathering
from ._memory import _CopyState
from ._model import GroupSharded
from ._reads import stop_reading


def unshard(model: GroupSharded) -> nn.Module:
    """Returns the module with its current parameters. It can be sharded again; its optimizer can
    not be used any more. Every rank must call it."""
    sharding = model.sharding
    sharding.follow_changes()
    if sharding.gatherer is not None:
        sharding.gatherer.gather_all()
        for unit in sharding.gatherer.units:
            for parameter in unit.parameters.values():
                plain = DTensor if isinstance(parameter, DTensor) else nn.Parameter
                parameter.__class__ = plain
                del parameter._zeroshard_access  # type: ignore[attr-defined]
                del parameter._zeroshard_expose  # type: ignore[attr-defined]
                del parameter._zeroshard_renew  # type: ignore[attr-defined]
        for module in model.module.modules():
            stop_gathering(module)
            _remove(module._state_dict_hooks, _CopyState)
    stop_reading(model.module)
    for parameter in model.module.parameters():
        parameter.grad = None
    allow_assign(model.module)
    forget(sharding)
    return model.module


def _remove(hooks: dict[int, Any], kind: type) -> None:
    for number, hook in list(hooks.items()):
        if isinstance(hook, kind):
            del hooks[number]
