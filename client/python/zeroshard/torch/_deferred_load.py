"""Loads a state dict into a sharded model without gathering the parameters that are on the servers:
their new values go there one after the other.

torch's ``load_state_dict`` runs as usual, with the script's hooks and its errors. Where it would
copy the values of a parameter that is on the servers, they are recorded instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.sharding import Sharding
from ._dtensor import part
from ._gather_rows import gathered
from ._module_hooks import OfOneModule, is_copied
from ._private import buffers_of, hooks_after_load, load_hooks, load_method, parameters_of

#: The classes of torch whose modules load their own state in the usual way. The norms differ only
#: for state dicts of old versions of torch.
_USUAL = (nn.Module, nn.BatchNorm1d, nn.InstanceNorm1d)

#: The parameters of a model, by id, and the values that were copied to them, in order.
Values = dict[int, tuple[Tensor, Tensor]]


class _Deferring(threading.local):
    """The load of this thread that defers copies, if there is one: the parameters of which it does,
    by id, and the values so far."""

    def __init__(self) -> None:
        self.parameters: Mapping[int, Tensor] | None = None
        self.values: Values = {}


_deferring = _Deferring()


def defers(parameter: Any, value: Any) -> bool:
    """Records a copy of ``value`` to a parameter, and returns ``True``, if it is to be deferred."""
    parameters = _deferring.parameters
    if parameters is None or id(parameter) not in parameters or not isinstance(value, Tensor):
        return False
    if value is parameter:
        return True
    # A gathered parameter is on the servers, which will have new values.
    if value.shape != parameter.shape or hasattr(value, "_zeroshard_access"):
        return False
    _deferring.values[id(parameter)] = (parameter, value)
    return True


@contextlib.contextmanager
def deferring(sharding: Sharding[Tensor]) -> Iterator[Values]:
    """A context in which the copies to parameters that are on the servers are recorded."""
    entries = [entry for entry in sharding.job.parameters if not entry.resident]
    _deferring.parameters = {id(entry.tensor): entry.tensor for entry in entries}
    values: Values = {}
    _deferring.values = values
    try:
        yield values
    finally:
        _deferring.parameters, _deferring.values = None, {}


def may_defer(model: nn.Module, sharding: Sharding[Tensor]) -> bool:
    """Returns whether loaded values can go to the servers at once: they do not become part of a
    step whose gradients are there, and no module reads them while it loads its state."""
    is_possible = sharding.has_units and not sharding.gradients.any_sent
    return is_possible and all(map(copies_only, model.modules()))


def copies_only(module: nn.Module) -> bool:
    """Returns whether a module loads its state by copying tensors. (A hook may have changed the
    state dict before.)"""
    kind: Any = type(module)
    return (
        not hooks_after_load(module)
        and load_method(kind) in map(load_method, _USUAL)
        and kind.set_extra_state is nn.Module.set_extra_state
    )


def send(sharding: Sharding[Tensor], values: Values) -> None:
    """All ranks take the recorded values of rank 0, and its values of all other parameters. Every
    rank must call it."""
    sharding.changes.load(_outgoing(sharding, values))


@torch.no_grad()
def _outgoing(sharding: Sharding[Tensor], values: Values) -> Iterator[tuple[Tensor, Tensor]]:
    for parameter, value in values.values():
        own = gathered(part(value, parameter), sharding.job.group.ranks[0])
        entry = sharding.job.entry(parameter)
        if sharding.job.job.uploads(entry.index):
            yield parameter, own.detach().to(entry.tensor.dtype)
        del own


class _Gather(OfOneModule):
    """A hook that torch calls before a module loads its state: gathers the DTensors that are to be
    copied to plain tensors, except where the copy is deferred. The module may be a part of one that
    knows nothing of this."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        deferred = _deferring.parameters or {}
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            value = state.get(prefix + name)
            if isinstance(value, DTensor) and tensor is not None and id(tensor) not in deferred:
                if not isinstance(tensor, DTensor):
                    state[prefix + name] = value.full_tensor()


def gather_loaded(model: nn.Module) -> None:
    """Lets a model, and all its modules, load DTensors."""
    gather = _Gather()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # has no such hooks
        if not any(map(is_gathering, load_hooks(module).values())):
            module.register_load_state_dict_pre_hook(gather)


def stop_gathering_loaded(model: nn.Module) -> None:
    """Undoes :func:`gather_loaded`."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        hooks = load_hooks(module)
        for number, hook in list(hooks.items()):
            if is_gathering(hook):
                del hooks[number]


def is_gathering(hook: Any) -> bool:
    """Returns whether a hook before a module loads its state is that of :func:`gather_loaded`, or
    a copy of it."""
    called = getattr(hook, "hook", None)
    return isinstance(called, _Gather) or is_copied(called)
