"""The state of a sharded optimizer as the functions of ``torch.distributed.checkpoint.state_dict``
ask for it, and with placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._core.entry import Entry
from .._core.interrupts import is_within_operation
from .._core.sharding import Sharding
from .._core.stored import stored_states
from .._native import Box
from .._rendezvous import distributed
from . import _conversion
from ._dtensor import local
from ._gather_rows import without_memory
from ._placeholders import Placeholders
from ._private import without_torch_function
from ._shards import as_distributed, distribute, own_box
from ._state import StateOnServers, rank_optimizer_of, torch_state
from ._state_request import Request, check_of_one_version
from ._training_mesh import training_mesh


def asked_states(
    optimizer: torch.optim.Optimizer,
    sharding: Sharding[Tensor],
    state: StateOnServers,
    request: Request,
) -> dict[int, Any]:
    """The state of each parameter by the id of the parameter, with what the program has changed
    since the last step. If no parameter has state, that of all trainable ones is 0: torch makes a
    step on zero gradients for such a state, into which it loads another one.

    Raises :class:`~zeroshard.NotInitialisedError` if parts are asked and there is no process group.
    """
    check_of_one_version(sharding)
    # Loading whole states asks for parts to see what there is.
    is_whole = request.full or request.loads and distributed() is None
    mesh = None if is_whole else training_mesh(sharding)
    changed, removed = state.changes()
    found: dict[int, Any] = {}
    if request.is_for_another_rank:
        for entry in _with_state(sharding):
            if id(entry.tensor) not in removed:
                found[id(entry.tensor)] = _dropped(sharding, state, entry.tensor)
    else:
        found = _read(sharding, mesh, removed, request.on_cpu)
    for parameter, own in changed.items():
        found[id(parameter)] = _distributed(own, parameter, mesh)
    if not any(found.values()):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in removed:
                    found[id(parameter)] = _initial(sharding, state, parameter, mesh)
    return found


def _read(
    sharding: Sharding[Tensor],
    mesh: DeviceMesh | None,
    removed: set[int],
    on_cpu: bool,
) -> dict[int, Any]:
    def box(entry: Entry[Tensor], part: str) -> Box:
        return _conversion.state_box(part, own_box(entry.tensor, mesh), entry.shape)

    found = {}
    for entry, held in stored_states(sharding.job, sharding.job.version, box=box):
        if id(entry.tensor) in removed:
            continue
        if rank_optimizer_of(sharding.job, entry.tensor) is not None:
            whole = torch_state(sharding.job, sharding.job.version, entry, held)
            found[id(entry.tensor)] = _distributed(whole, entry.tensor, mesh)
            continue
        parts = _conversion.to_torch(sharding.job.optimizer.kind(entry), held)
        found[id(entry.tensor)] = {
            key: _placed(value, entry.tensor, mesh, on_cpu) for key, value in parts.items()
        }
    return found


def _placed(value: Any, parameter: Tensor, mesh: DeviceMesh | None, on_cpu: bool = False) -> Any:
    """A part of a state tensor as a DTensor. A number, or a small tensor of which every rank has
    the whole, stays plain."""
    part = tuple(own_box(parameter, mesh).size)
    is_part = isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == part
    return as_distributed(value, parameter, mesh, on_cpu) if is_part else value


def _distributed(state: Any, parameter: Tensor, mesh: DeviceMesh | None) -> Any:
    """The state that the program has given a parameter."""
    if not isinstance(state, Mapping):
        return state
    return {
        key: distribute(value.detach(), parameter, mesh) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def placed_states(
    sharding: Sharding[Tensor], state: StateOnServers, placeholders: Placeholders
) -> dict[int, Any]:
    """The state of each parameter by its id, with placeholders for what is on the servers."""
    version = placeholders.version
    is_current = version.number == sharding.job.version
    changed, removed = settled_changes(sharding, state) if is_current else ({}, set())
    found, applied = {}, version.applied
    for entry in sharding.job.trained:
        if not applied[entry.index][0] or id(entry.tensor) in removed:
            continue
        ranks = rank_optimizer_of(sharding.job, entry.tensor)
        if ranks is not None:
            found[id(entry.tensor)] = ranks.read_parts(
                sharding.job, entry.tensor, placeholders.read_slot, placeholders.of_slot
            )
        else:
            names = sharding.job.optimizer.state_names(entry)
            tensors = {part: placeholders.of_state(entry, part) for part in names}
            held = (*applied[entry.index], tensors)
            found[id(entry.tensor)] = _conversion.to_torch(sharding.job.optimizer.kind(entry), held)
    return found | {id(parameter): copied(own) for parameter, own in changed.items()}


def settled_changes(
    sharding: Sharding[Tensor], state: StateOnServers
) -> tuple[dict[Tensor, Any], set[int]]:
    """As :meth:`StateOnServers.changes`; none if the caller cannot tell. The servers receive
    changes in the next forward or step, in which all ranks take part."""
    is_settled = sharding.reads.sees_writes and not is_within_operation()
    return state.changes() if is_settled else ({}, set())


def copied(state: Any) -> Any:
    """A copy of the state of a parameter that the program has set."""
    if not isinstance(state, Mapping):
        return state
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _with_state(sharding: Sharding[Tensor]) -> list[Entry[Tensor]]:
    applied = sharding.job.job.applied_steps(sharding.job.version)
    return [entry for entry in sharding.job.trained if applied[entry.index][0]]


def _dropped(
    sharding: Sharding[Tensor], state: StateOnServers, parameter: Tensor
) -> dict[str, Any]:
    """A state that torch drops."""
    ranks = rank_optimizer_of(sharding.job, parameter)
    if ranks is not None:
        return ranks.example(parameter, without_memory)
    numbers, tensors = state.names(parameter)
    with without_torch_function():
        shape = local(parameter).shape
    return {
        **dict.fromkeys(numbers, torch.tensor(0.0)),
        **dict.fromkeys(tensors, without_memory(shape, torch.float32)),
    }


def _initial(
    sharding: Sharding[Tensor], state: StateOnServers, parameter: Tensor, mesh: DeviceMesh | None
) -> dict[str, Any]:
    """The state of a parameter before its first step."""
    ranks = rank_optimizer_of(sharding.job, parameter)
    if ranks is not None:
        zeros = ranks.example(parameter, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        return dict(_distributed(zeros, parameter, mesh))
    numbers, tensors = state.names(parameter)
    entry = sharding.job.find(parameter)
    applied = sharding.job.job.applied_steps(sharding.job.version)
    scalars = applied[entry.index][1] if entry is not None else ()
    values = dict(zip(numbers, [0.0, *scalars], strict=False))
    whole = own_box(parameter, mesh)
    found: dict[str, Any] = {key: torch.tensor(values.get(key, 1.0)) for key in numbers}
    for key in tensors:
        box = _conversion.state_box(key, whole, list(parameter.shape))
        found[key] = _placed(torch.zeros(tuple(box.size)), parameter, mesh)
    return found
