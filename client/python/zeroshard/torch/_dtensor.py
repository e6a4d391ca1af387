"""What of a DTensor is here, and how it lies on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._core.layout import Layout, RankMesh
from .._rendezvous import place
from ..errors import InvalidArgumentError


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, without a copy: the tensor itself, unless it is
    distributed."""
    if not isinstance(tensor, DTensor):
        return tensor
    here: Tensor = tensor._local_tensor
    return here.wait() if isinstance(here, AsyncCollectiveTensor) else here


def layout(tensor: Tensor) -> Layout | None:
    """How a parameter lies on its mesh; None: all of it is here."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim {dim}" for dim in range(mesh.ndim))
    ranks = RankMesh(
        tuple(mesh.shape), tuple(names), tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    )
    return Layout(ranks, tuple(_placement(placement, tensor) for placement in tensor.placements))


def _placement(placement: Any, tensor: Tensor) -> str:
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Shard:
        return f"shard:{placement.dim % tensor.ndim}"
    raise InvalidArgumentError(
        f"a parameter lies as {placement!r} on its mesh; it must be Shard or Replicate"
    )


def aligned_gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, which lies as the parameter does from now on."""
    gradient = parameter.grad
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        with torch.no_grad():
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
    return gradient


def distributed_as(here: Tensor, spec: Any) -> DTensor:
    """The DTensor of which this is here, and that lies as ``spec``, another's ``_spec``, says."""
    return DTensor(here, spec, requires_grad=False)


def part(value: Tensor, tensor: Tensor) -> Tensor:
    """What this rank has of a plain, whole ``value``, if it lies as ``tensor`` does; of a DTensor,
    what is here."""
    if isinstance(value, DTensor):
        return local(value)
    lies = layout(tensor)
    if lies is None or value.shape != tensor.shape:
        return value
    offset, size = lies.area(tensor.shape, place().rank)
    for dim, (first, count) in enumerate(zip(offset, size, strict=True)):
        value = value.narrow(dim, min(first, value.shape[dim]), count)
    return value.contiguous()


def parts_of_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of plain, whole tensors as ``model`` can load it: its DTensors lie as they do
    there."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }

    def fitting(name: str, value: Any) -> Any:
        tensor = own.get(name)
        if (
            isinstance(tensor, DTensor)
            and isinstance(value, Tensor)
            and not isinstance(value, DTensor)
        ):
            if value.shape == tensor.shape:
                return distributed_as(part(value, tensor), tensor._spec)
        return value

    return {name: fitting(name, value) for name, value in state.items()}
