"""The module that ``group_sharded_parallel`` returns."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .._core.gather import Gatherer
from .._core.interrupts import encloses_operations
from .._core.sharding import Sharding
from ._assign import refuse_assign
from ._compiled import gather_compiled, warn_not_compiled
from ._dtensor import parts_of_state
from ._foreign import check_not_wrapped_later
from ._memory import outside_graphs
from ._reads import read_consistently
from ._scaler import GradScaler
from ._transforms import is_tracing, not_recorded, outside_transforms
from ._wrapper import ModuleWrapper


class GroupSharded(ModuleWrapper):
    """A model whose optimizer state, and depending on the level its gradients and parameters, are
    on the shard servers.

    Attributes that this class does not have are those of the model, and ``state_dict`` has the keys
    of the model.
    """

    #: The state shared with the optimizer.
    sharding: Sharding[Tensor]
    #: The gradient scaler that was passed together with the model.
    _scaler: GradScaler | None

    def __init__(
        self, module: nn.Module, sharding: Sharding[Tensor], scaler: GradScaler | None = None
    ) -> None:
        super().__init__(module)
        self._keep(sharding=sharding, _scaler=scaler, forward=_Forward(self))
        read_consistently(module, sharding)
        refuse_assign(module)
        if sharding.gatherer is not None:
            gather_compiled(module, sharding.gatherer)

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return self.sharding.level

    @encloses_operations
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_not_wrapped_later(self.module)
        gatherer = self.sharding.gatherer
        if is_tracing() or torch.compiler.is_exporting():
            if self.sharding.has_units:
                raise not_recorded()
            return self.module(*args, **kwargs)
        _before_forward(self.sharding, torch.is_grad_enabled(), self.training)
        if gatherer is None:
            return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():
            warn_not_compiled()
        try:
            return _call_gathering(self.module, gatherer, args, kwargs)
        except BaseException:
            self.sharding.unwind()
            raise

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by ``torch.jit.script``."""
        raise not_recorded()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose forwards have backward passes that are not the last of their step: the
        gradients are accumulated on this rank."""
        return self.sharding.no_sync()

    def summon_full_params(self) -> AbstractContextManager[None]:
        """A context in which all parameters are on this worker. Values that the program writes to
        them, which must be the same on all ranks, become part of the next step."""
        return self.sharding.gathered()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the state of the model. Every rank must call it; all ranks take the values of rank
        0.

        Tensors may be whole if the model's are distributed. ``assign=True`` is an error.
        """
        state = parts_of_state(self.module, state_dict)
        result = self.module.load_state_dict(state, strict=strict, assign=assign)
        self.sharding.take_values()
        return result

    def _fqn_modifiers(self) -> dict[str, str]:
        """Read by ``torch.distributed.checkpoint.state_dict``: the name of the child that is not in
        the keys of ``state_dict``."""
        return {"": "module"}

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain copy of the whole model, which is not sharded."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickled model is whole, and not sharded."""
        return _itself, (self.module,)

    def share_memory(self) -> GroupSharded:
        """As torch's; not at ``p_g_os``, where parameters have no memory of their own."""
        self.sharding.check_movable("shared with other processes")
        super().share_memory()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        if self.sharding.has_units and all(_is_unchanged(fn, tensor) for tensor in tensors):
            return self
        self.sharding.check_movable("moved or cast")
        return super()._apply(fn, recurse)


class _Forward:
    """The forward of a sharded model. It has the signature of the model's own, which libraries
    look up."""

    def __init__(self, model: GroupSharded) -> None:
        self._model = model
        functools.update_wrapper(self, model.module.forward)
        # Read by torch.export.
        self.__code__ = getattr(model.module.forward, "__code__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model._forward(args, kwargs)


def _itself(module: nn.Module) -> nn.Module:
    return module


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
    gatherer: Gatherer[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    gather_compiled(module, gatherer)
    return module(*args, **kwargs)
