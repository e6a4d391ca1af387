"""What ``torch.distributed.checkpoint.state_dict`` sees of a sharded model while it broadcasts the
whole tensors of rank 0 to load them.

torch keeps each tensor that it has received on every rank, unless the model has a DTensor there:
then it keeps the rows of that. So the parameters that are on the servers appear as DTensors, whose
values go to the servers afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._core.sharding import Sharding
from ._dtensor import local
from ._private import buffers_of, unsaved_buffers, without_torch_function
from ._shards import as_distributed, own_box
from ._state_request import asked
from ._training_mesh import training_mesh


def is_broadcast(module: nn.Module, sharding: Sharding[Tensor]) -> bool:
    """Returns whether torch looks for the tensors of a model to broadcast values to them."""
    if torch.compiler.is_compiling() or not sharding.has_units:
        return False
    request = asked()
    if request is None or not request.broadcasts:
        return False
    # torch also looks for the extra state of each module.
    usual = nn.Module.get_extra_state
    return all(type(one).get_extra_state is usual for one in module.modules())


def parameters_for_broadcast(
    module: nn.Module, sharding: Sharding[Tensor]
) -> Iterator[tuple[str, Any]]:
    """All parameters of a model by name, as if they were its own, not those of its modules."""
    mesh = training_mesh(sharding)
    targets: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        entry = sharding.job.find(parameter)
        if entry is None or entry.resident or isinstance(parameter, DTensor):
            yield name, parameter
        else:
            if id(parameter) not in targets:
                targets[id(parameter)] = _target(parameter, mesh)
            yield name, targets[id(parameter)]


def buffers_for_broadcast(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All buffers of a model that its state dict has, by name."""
    for prefix, one in module.named_modules():
        for name, buffer in buffers_of(one).items():
            if buffer is not None and name not in unsaved_buffers(one):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _target(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor that receives this rank's rows of a parameter."""
    with without_torch_function():
        like = local(parameter)
    rows = torch.empty(own_box(parameter, mesh).size, dtype=like.dtype, device=like.device)
    return as_distributed(rows, parameter, mesh)
