"""Turns a model, an optimizer and a gradient scaler into sharded ones, without another object.

The object gets a class of the same name that is derived from its own, as with torch's
``fully_shard``. Hooks of the instance would not do: the end of a forward that has raised an error,
``load_state_dict``, copies and pickles call none.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._core.sharding import Sharding
from ..errors import InvalidArgumentError, InvalidTypeError
from ._foreign import check_hook, wrapped_later
from ._joined import Together
from ._optimizer import ShardedOptimizer
from ._pretrained import METHOD as SAVE_PRETRAINED
from ._pretrained import save_streaming
from ._private import (
    READ_BY_DDP,
    RefusesDDP,
    counts_steps,
    has_original,
    mark_counting,
    note_step,
)
from ._scaler import GradScaler
from ._sharded_module import Shared, ShardedModule, prepare

#: The attribute of a model that makes it a sharded one.
_SHARED = "_zeroshard"
#: The scalers of torch that differ only in the device that they assume.
_SCALERS = (
    torch.amp.GradScaler,
    torch.cuda.amp.GradScaler,
    torch.cpu.amp.grad_scaler.GradScaler,
)


class ShardedInPlace(RefusesDDP, ShardedModule):
    """A model that was changed by :func:`zeroshard.shard`: a class of each model is derived from
    this one and from the model's own."""

    #: The model's own class, which its copies have.
    _plain: ClassVar[type[nn.Module]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(super().__call__, args, kwargs)

    def _enter(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls the model, or its ``forward``, as ``call``."""
        shared = self._zeroshard
        if shared.is_running:  # the model calls itself
            return call(*args, **kwargs)
        shared.is_running = True
        try:
            return self._call_sharded(self, call, args, kwargs)
        finally:
            shared.is_running = False

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        check_hook(hook)
        return super().register_forward_pre_hook(hook, **options)

    def __dir__(self) -> list[str]:
        # torch.jit.trace reads everything that is listed.
        listed: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in listed if name not in (_SHARED, READ_BY_DDP)]

    def _zeroshard_wrapped_later(self, other: str) -> Exception:
        return wrapped_later(other)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """A plain copy of the whole model, which is not sharded."""
        # One for each copy: a module in it may refer to the model.
        twin = memo.setdefault((_SHARED, id(self)), _plain_twin(self))
        return copy.deepcopy(twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickled model is whole, and not sharded."""
        # Later protocols check that an object is read with the class that it has now.
        return _plain_twin(self).__reduce_ex__(1)


def _plain_twin(model: ShardedInPlace) -> nn.Module:
    """A module of the model's own class with the same attributes."""
    twin: nn.Module = object.__new__(model._plain)
    twin.__dict__.update(model.__dict__)
    del twin.__dict__[_SHARED]
    return twin


def check_model(model: nn.Module) -> None:
    """Raises an error if a model cannot be sharded in place."""
    kind: type = type(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidTypeError(
            f"model is a {kind.__name__}, whose class cannot be changed; use "
            "zeroshard.torch.group_sharded_parallel, which wraps it"
        )
    if has_original(model):
        raise InvalidTypeError(
            f"model is a {kind.__name__}, the result of torch.compile; pass the module that was "
            "compiled, and call torch.compile afterwards, or compile its blocks with "
            "block.compile()"
        )
    for name in ("no_sync", "summon_full_params", _SHARED):
        if hasattr(model, name):
            raise InvalidArgumentError(
                f"model has an attribute {name!r}, which is a name of ZeroShard; rename it, or use "
                "zeroshard.torch.group_sharded_parallel, which wraps the model"
            )
    try:
        _class_of_model(kind)
    except Exception as error:
        raise InvalidTypeError(
            f"no class can be derived from {kind.__name__}, the model's ({error}); use "
            "zeroshard.torch.group_sharded_parallel, which wraps the model"
        ) from error


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises an error if an optimizer cannot be sharded in place."""
    step = vars(optimizer).get("step")
    if step is not None and not counts_steps(step):
        raise InvalidArgumentError(
            "the script has replaced optimizer.step; call zeroshard.shard first, and replace it "
            "afterwards"
        )


def check_scaler(scaler: torch.amp.GradScaler) -> None:
    """Raises an error if a scaler cannot be sharded in place."""
    if type(scaler) not in (*_SCALERS, GradScaler):
        raise InvalidTypeError(
            f"scaler is a {type(scaler).__name__}; pass a torch.amp.GradScaler: the servers check "
            "and unscale the gradients"
        )


def shard_model(
    model: nn.Module, sharding: Sharding[Tensor], scaler: torch.amp.GradScaler | None
) -> None:
    """Makes a model a sharded one. ``scaler``: one that :func:`shard_scaler` has changed."""
    assert scaler is None or isinstance(scaler, GradScaler)
    kind: type = type(model)
    vars(model)[_SHARED] = Shared(sharding, scaler)
    object.__setattr__(model, "__class__", _class_of_model(kind))
    prepare(model, sharding)


def restore_class(model: ShardedInPlace) -> None:
    """Makes a sharded model one of its own class again, after its sharding has ended."""
    del vars(model)[_SHARED]
    object.__setattr__(model, "__class__", model._plain)


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class that shares groups, state and hooks. The servers train for it
    after the original object has become a sharded optimizer."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)  # that of a scheduler, which refers to the original object
    return twin


def shard_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    plain: Sequence[torch.optim.Optimizer],
    sharding: Sharding[Tensor],
) -> None:
    """Makes the optimizers of one model sharded ones. ``plain``: the :func:`plain_optimizer` of
    each."""
    sharded = [shard_optimizer(*each, sharding) for each in zip(optimizers, plain, strict=True)]
    if len(sharded) > 1:
        together = Together(len(sharded), sharding)
        for optimizer in sharded:
            optimizer.join(sharded, together)


def shard_optimizer(
    optimizer: torch.optim.Optimizer, plain: torch.optim.Optimizer, sharding: Sharding[Tensor]
) -> ShardedOptimizer:
    """Makes an optimizer a sharded one, and returns it. ``plain``: its :func:`plain_optimizer`."""
    kind: type = type(optimizer)
    attributes = vars(optimizer)
    counted = attributes.pop("step", None) is not None
    for name in ("state", "param_groups"):  # properties of the new class
        attributes.pop(name, None)
    object.__setattr__(optimizer, "__class__", _class_of_optimizer(kind))
    assert isinstance(optimizer, ShardedOptimizer)
    ShardedOptimizer.__init__(optimizer, plain, sharding)
    plain.state.clear()
    if counted:
        attributes["step"] = _counted_step(optimizer)
    return optimizer


def shard_scaler(scaler: torch.amp.GradScaler) -> None:
    """Makes a scaler one that supports sharded optimizers."""
    object.__setattr__(scaler, "__class__", GradScaler)


def _counted_step(optimizer: ShardedOptimizer) -> Callable[..., Any]:
    """The step of an optimizer whose scheduler was created before it was sharded. The scheduler
    warns unless the step records that it was called, as torch's does."""
    step = type(optimizer).step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        note_step(optimizer)
        return step(optimizer, *args, **kwargs)

    mark_counting(counted)
    return counted


@functools.cache
def _class_of_model(plain: type) -> type[ShardedInPlace]:
    derived: type[ShardedInPlace] = _derived(ShardedInPlace, plain)
    derived._plain = plain
    forward = getattr(plain, "forward")
    if isinstance(forward, FunctionType):
        setattr(derived, "forward", _entering(forward))
    save = getattr(plain, SAVE_PRETRAINED, None)
    if isinstance(save, FunctionType):
        setattr(derived, SAVE_PRETRAINED, _streaming(save))
    return derived


def _streaming(save: Callable[..., Any]) -> Callable[..., Any]:
    """The ``save_pretrained`` of a class of transformers."""

    @functools.wraps(save)
    def save_pretrained(self: ShardedInPlace, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(save, self)
        return save_streaming(self, self._zeroshard.sharding, call, args, kwargs)

    return save_pretrained


def _entering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a class, which a script may call itself."""

    @functools.wraps(forward)
    def entering(self: ShardedInPlace, *args: Any, **kwargs: Any) -> Any:
        return self._enter(functools.partial(forward, self), args, kwargs)

    return entering


@functools.cache
def _class_of_optimizer(plain: type) -> type[ShardedOptimizer]:
    derived: type[ShardedOptimizer] = _derived(ShardedOptimizer, plain)
    return derived


def _derived(kind: type, plain: type) -> Any:
    """A class that is derived from both and has the name of the second, which libraries look up.
    Objects of the second can become objects of it."""
    members = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    derived = type(plain)(plain.__name__, (kind, plain), members)
    try:
        object.__setattr__(object.__new__(plain), "__class__", derived)
    except TypeError:
        # Python compares only the first bases. They differ if that of `plain` has no attributes of
        # its own, as `abc.ABC` and `typing.Generic`.
        order = type("order", (type(plain),), {"mro": lambda cls: [cls, *derived.__mro__[1:]]})
        derived = order(plain.__name__, (plain, kind), members)
    return derived
