"""State dicts that do not read the parameters of this rank, but have copies of one version: those
that a signal handler or another thread makes while the model is being changed, and those that
``torch.distributed.checkpoint.state_dict`` asks for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.entry import Entry, modified
from .._core.interrupts import between_operations, find_frame, is_running
from .._core.sharding import Sharding
from ._dtensor import distributed_as, local
from ._gather_rows import without_memory
from ._module_hooks import OfOneModule
from ._one_version import fetch_at
from ._placeholders import Placeholders, placed
from ._shards import distribute, read_parameters
from ._state_request import Request, asked, check_of_one_version
from ._training_mesh import training_mesh
from ._private import spec_of, state_dict_hooks, without_torch_function


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
    for hooks in state_dict_hooks(module):
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
        if call is None:
            return
        copies: Mapping[int, Tensor] = {}
        placeholders = None if sharding is None else placed(sharding)
        request = None if sharding is None else asked()
        if sharding is not None and placeholders is not None:
            copies = _placed(sharding, placeholders)
        elif sharding is not None and request is not None:
            copies = _asked(sharding, request)
        elif sharding is not None and sharding.reads.needs_copies:
            copies = _copies(sharding)
        _reads.running.append((call, copies))


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

    return sharding.reads.read(fetch)


def _asked(sharding: Sharding[Tensor], request: Request) -> dict[int, Tensor]:
    """What ``torch.distributed.checkpoint.state_dict`` gets of the parameters if the servers hold
    some: DTensors, of which this rank has its part, or whole tensors. All are copies, so that the
    state dict is of one version also after the next step."""
    if not sharding.has_units:
        return {}
    check_of_one_version(sharding)
    mesh = None if request.full else training_mesh(sharding)
    device = torch.device("cpu") if request.on_cpu else None
    entries, found = [], {}
    for entry in sharding.job.parameters:
        is_distributed = isinstance(entry.tensor, DTensor)
        if request.is_for_another_rank and not is_distributed:
            found[id(entry.tensor)] = without_memory(entry.shape, entry.tensor.dtype)
        elif not entry.resident:
            entries.append(entry)
        elif not is_distributed:
            found[id(entry.tensor)] = distribute(entry.tensor, entry.tensor, mesh)
    _, written = _written(sharding, entries)
    fetched = [entry for entry in entries if id(entry.tensor) not in written]
    for entry in entries:
        if id(entry.tensor) in written:
            values = written[id(entry.tensor)]
            found[id(entry.tensor)] = distribute(values, entry.tensor, mesh)
    fetch = fetch_at(sharding.job, sharding.job.version)
    return found | read_parameters(sharding.job, fetched, fetch, mesh, device)


def _placed(sharding: Sharding[Tensor], placeholders: Placeholders) -> dict[int, Tensor]:
    """Placeholders of the parameters that are on the servers, of those that are distributed, which
    become whole, and of all that are being changed. What the program has written is copied. The
    values are read later, when steps of the thread that trains may have changed local ones."""
    entries = [
        entry
        for entry in sharding.job.parameters
        if not entry.resident
        or isinstance(entry.tensor, DTensor)
        or (sharding.reads.needs_copies or sharding.reads.is_other_thread)
        and entry.trained
    ]
    plain = [entry for entry in entries if not isinstance(entry.tensor, DTensor)]
    written_at, written = _written(sharding, plain)
    if written_at != placeholders.version.number:
        written = {}  # a step that was made since has sent it
    sharding.reads.check_not_written(
        entry for entry in entries if isinstance(entry.tensor, DTensor)
    )
    stubs = {
        id(entry.tensor): placeholders.of_parameter(entry)
        for entry in entries
        if id(entry.tensor) not in written
    }
    return stubs | written


def _written(
    sharding: Sharding[Tensor], entries: list[Entry[Tensor]]
) -> tuple[int, dict[int, Tensor]]:
    """The version of this worker, and copies of what the program has written to parameters since,
    by their id. Empty if the caller cannot tell."""
    before, version = between_operations(), sharding.job.version
    written = modified(entries) if sharding.reads.sees_writes else []
    copies = {id(entry.tensor): _clone(entry.tensor) for entry in written if _has_values(entry)}
    if sharding.reads.is_other_thread and (before is None or before != between_operations()):
        return version, {}  # the thread that trains may have received values meanwhile
    return version, copies


def _has_values(entry: Entry[Tensor]) -> bool:
    """Returns whether a parameter that differs from what was seen of it has memory, which was not
    freed a moment ago."""
    with without_torch_function():
        tensor = local(entry.tensor)
        return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


@torch.inference_mode(False)
def _clone(parameter: Tensor) -> Tensor:
    with without_torch_function():
        return _distributed(local(parameter).detach().clone(), parameter)


@torch.inference_mode(False)
def _empty_part(parameter: Tensor) -> Tensor:
    with without_torch_function():
        like = local(parameter)
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _distributed(part: Tensor, parameter: Tensor) -> Tensor:
    spec = spec_of(parameter)
    return part if spec is None else distributed_as(part, spec)
