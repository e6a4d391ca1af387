"""Ends the sharding of a model, which then is the plain module that it was before."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .._core.sharded_models import forget
from ._assign import allow_assign
from ._compiled import stop_gathering
from ._deferred_load import stop_gathering_loaded
from ._in_place import ShardedInPlace, restore_class
from ._memory import _CopyState
from ._model import GroupSharded
from ._private import state_dict_hooks
from ._reads import stop_reading
from ._sharded_module import ShardedModule


def unshard(model: ShardedModule) -> nn.Module:
    """Returns the module with its current parameters. It can be sharded again; its optimizer can
    not be used any more. Every rank must call it."""
    sharding = model._zeroshard.sharding
    plain: nn.Module = model.module if isinstance(model, GroupSharded) else model
    sharding.changes.follow()
    if sharding.gatherer is not None:
        sharding.gatherer.gather_all()
        for unit in sharding.gatherer.units:
            for parameter in unit.parameters.values():
                parameter.__class__ = DTensor if isinstance(parameter, DTensor) else nn.Parameter
                del parameter._zeroshard_access  # type: ignore[attr-defined]
                del parameter._zeroshard_expose  # type: ignore[attr-defined]
                del parameter._zeroshard_renew  # type: ignore[attr-defined]
        for module in plain.modules():
            stop_gathering(module)
            _remove(state_dict_hooks(module)[1], _CopyState)
    stop_reading(plain)
    for parameter in plain.parameters():
        parameter.grad = None
    allow_assign(plain)
    stop_gathering_loaded(plain)
    forget(sharding)
    if isinstance(model, ShardedInPlace):
        restore_class(model)
    return plain


def _remove(hooks: dict[int, Any], kind: type) -> None:
    for number, hook in list(hooks.items()):
        if isinstance(hook, kind):
            del hooks[number]
