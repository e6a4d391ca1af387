"""State dicts that are made while the model is being changed, by a signal handler or another
thread: they have the values of one version, and do not touch the parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .._core.entry import Entry, modified
from .._core.interrupts import between_operations, find_frame, is_running
from .._core.sharding import Sharding
from ._dtensor import distributed_as, local
from ._module_hooks import OfOneModule


class _Reads(threading.local):
    """The state dicts that this thread is making: the call, and copies by the id of the parameter.
    No copies: the parameters are read themselves."""

    def __init__(self) -> None:
        self.running: list[tuple[FrameType, Mapping[int, Tensor]]] = []


_reads = _Reads()
_STATE_DICT = {nn.Module.state_dict.__code__}


def copy_of(parameter: Tensor) -> Tensor | None:
    """The copy that the state dict gets instead of a parameter, if it is to get one."""
    while _reads.running:
        call, copies = _reads.running[-1]
        if is_running(call):
            return copies.get(id(parameter))
        _reads.running.pop()  # it has raised an error
    return None


def read_consistently(module: nn.Module, sharding: Sharding[Tensor]) -> None:
    """Makes the state dicts of a module consistent at any time."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # has no such hooks
    module.register_state_dict_pre_hook(_Begin(sharding))
    module.register_state_dict_post_hook(_End())


def stop_reading(module: nn.Module) -> None:
    """Removes the hooks of :func:`read_consistently`."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    for hooks in (module._state_dict_pre_hooks, module._state_dict_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, _Begin | _End):
                del hooks[number]


class _End(OfOneModule):
    """Puts the copies into the state dict."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            copy = copy_of(parameter)
            if copy is not None and prefix + name in state:
                state[prefix + name] = copy
        if _reads.running:
            _reads.running.pop()


class _Begin(OfOneModule):
    """Makes the copies that a state dict needs."""

    def __init__(self, sharding: Sharding[Tensor]) -> None:
        self._sharding = weakref.ref(sharding)

    def __call__(self, *_: Any) -> None:
        sharding = self._sharding()
        call = find_frame(_STATE_DICT)
        if call is not None:
            needed = sharding is not None and sharding.needs_copies
            _reads.running.append((call, _copies(sharding) if sharding and needed else {}))


def _copies(sharding: Sharding[Tensor]) -> dict[int, Tensor]:
    """The values of all parameters that a step changes, or that are on the servers, of one
    version."""
    entries = [entry for entry in sharding.job.parameters if entry.trained or not entry.resident]
    written_at, written = _written(sharding, entries)

    def fetch(version: int) -> dict[int, Tensor]:
        # A step that was made since has sent what was written.
        own = written if version == written_at else {}
        fetched = [entry for entry in entries if id(entry.tensor) not in own]
        if not fetched:
            return own
        parts = [_empty_part(entry.tensor) for entry in fetched]
        incoming = [
            entry.framework.incoming_words(part) if entry.raw else entry.framework.incoming(part)
            for entry, part in zip(fetched, parts, strict=True)
        ]
        arrays = [(entry.index, one.array) for entry, one in zip(fetched, incoming, strict=True)]
        sharding.job.fetch(arrays, version=version)
        for one in incoming:
            one.finish()
        return own | {
            id(entry.tensor): _distributed(part, entry.tensor)
            for entry, part in zip(fetched, parts, strict=True)
        }

    return sharding.read(fetch)


def _written(
    sharding: Sharding[Tensor], entries: list[Entry[Tensor]]
) -> tuple[int, dict[int, Tensor]]:
    """The version of this worker, and copies of what the program has written to parameters since,
    by their id. Empty if the caller cannot tell."""
    before, version = between_operations(), sharding.job.version
    written = modified(entries) if sharding.sees_writes else []
    copies = {id(entry.tensor): _clone(entry.tensor) for entry in written if _has_values(entry)}
    if sharding.is_other_thread and (before is None or before != between_operations()):
        return version, {}  # the thread that trains may have received values meanwhile
    return version, copies


def _has_values(entry: Entry[Tensor]) -> bool:
    """Returns whether a parameter that differs from what was seen of it has memory, which was not
    freed a moment ago."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = local(entry.tensor)
        return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


@torch.inference_mode(False)
def _clone(parameter: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return _distributed(local(parameter).detach().clone(), parameter)


@torch.inference_mode(False)
def _empty_part(parameter: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        like = local(parameter)
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _distributed(part: Tensor, parameter: Tensor) -> Tensor:
    spec = getattr(parameter, "_spec", None)
    return part if spec is None else distributed_as(part, spec)
