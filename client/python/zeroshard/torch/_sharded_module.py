"""The members that every sharded model has: the one that ``group_sharded_parallel`` wraps, and the
one that ``zeroshard.shard`` changes in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.gather import Gatherer
from .._core.interrupts import encloses_operations
from .._core.sharding import Sharding
from ._assign import refuse_assign
from ._broadcast_load import buffers_for_broadcast, is_broadcast, parameters_for_broadcast
from ._compiled import gather_compiled, warn_not_compiled
from ._deferred_load import deferring, gather_loaded, may_defer, send
from ._dtensor import parts_of_state
from ._foreign import check_not_wrapped_later
from ._private import Applied, outside_graphs
from ._reads import read_consistently
from ._scaler import GradScaler
from ._transforms import is_tracing, not_recorded, outside_transforms


@dataclass
class Shared:
    """The attributes of a sharded model, in one object: the model's own names stay free."""

    #: The state shared with the optimizer.
    sharding: Sharding[Tensor]
    #: The gradient scaler that was passed together with the model.
    scaler: GradScaler | None
    #: ``True`` while the forward of a model that was sharded in place runs.
    is_running: bool = False


def prepare(module: nn.Module, sharding: Sharding[Tensor]) -> None:
    """Gives the modules of a sharded model their hooks."""
    read_consistently(module, sharding)
    refuse_assign(module)
    gather_loaded(module)
    if sharding.gatherer is not None:
        gather_compiled(module, sharding.gatherer)


class ShardedModule(Applied):
    """Precedes the class of the model, or of its wrapper, among the base classes: the methods act
    through ``super()``."""

    _zeroshard: Shared

    @encloses_operations
    def _call_sharded(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Calls the model, as ``call``. ``module``: the model."""
        check_not_wrapped_later(module)
        sharding = self._zeroshard.sharding
        if is_tracing() or torch.compiler.is_exporting():
            if sharding.has_units:
                raise not_recorded()
            return call(*args, **kwargs)
        _before_forward(sharding, torch.is_grad_enabled(), self.training)
        if sharding.gatherer is None:
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            warn_not_compiled()
        try:
            return _call_gathering(module, call, sharding.gatherer, args, kwargs)
        except BaseException:
            sharding.unwind()
            raise

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by ``torch.jit.script``."""
        raise not_recorded()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose forwards have backward passes that are not the last of their step: the
        gradients are accumulated on this rank."""
        return self._zeroshard.sharding.no_sync()

    def summon_full_params(self) -> AbstractContextManager[None]:
        """A context in which all parameters are on this worker. Values that the program writes to
        them, which must be the same on all ranks, become part of the next step."""
        return self._zeroshard.sharding.gathered()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        if is_broadcast(self, self._zeroshard.sharding):
            return iter(())
        return super().named_children()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        sharding = self._zeroshard.sharding
        if not recurse and is_broadcast(self, sharding):
            return parameters_for_broadcast(self, sharding)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        if not recurse and is_broadcast(self, self._zeroshard.sharding):
            return buffers_for_broadcast(self)
        return super().named_buffers(prefix, recurse, remove_duplicate)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the state of the model. Every rank must call it; all ranks take the values of rank
        0.

        Tensors may be whole, or DTensors of which each rank has a part, whatever those of the model
        are. The values of parameters that are on the servers go there one after the other.
        ``assign=True`` is an error.
        """
        sharding = self._zeroshard.sharding
        state = parts_of_state(self, state_dict)
        if not may_defer(self, sharding):
            result = super().load_state_dict(state, strict=strict, assign=assign)
            sharding.changes.take_values()
            return result
        with deferring(sharding) as values:
            result = super().load_state_dict(state, strict=strict, assign=assign)
        send(sharding, values)
        return result

    def share_memory(self) -> Any:
        """As torch's; not at ``p_g_os``, where parameters have no memory of their own."""
        self._zeroshard.sharding.check_movable("shared with other processes")
        return super().share_memory()

    def _zeroshard_moves(self, fn: Callable[[Tensor], Tensor]) -> bool:
        sharding = self._zeroshard.sharding
        tensors = itertools.chain(self.parameters(), self.buffers())
        if sharding.has_units and all(_is_unchanged(fn, tensor) for tensor in tensors):
            return False
        sharding.check_movable("moved or cast")
        return True


def _is_unchanged(fn: Any, tensor: Tensor) -> bool:
    """Returns whether a function that moves or casts tensors leaves the device and dtype of this
    one."""
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    moved = fn(probe)
    return bool(moved.dtype == probe.dtype and moved.device == probe.device)


@outside_graphs
def _before_forward(sharding: Sharding[Tensor], records: bool, training: bool) -> None:
    with outside_transforms():
        if records:
            sharding.before_forward()
        sharding.share_buffers(records and training)


@outside_graphs
def _call_gathering(
    module: nn.Module,
    call: Callable[..., Any],
    gatherer: Gatherer[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    gather_compiled(module, gatherer)
    return call(*args, **kwargs)
