"""Local tensors and layouts of DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._core.layout import local_box
from .._mesh import unsupported_placement
from .._native import Layout
from .._rendezvous import world_group
from ._mesh import native_mesh
from ._private import local_tensor, spec_of


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without a copy. Other tensors are returned as they are."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def layout(tensor: Tensor) -> Layout | None:
    """The layout of a parameter. None if it is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return None
    placements = [_placement(placement, tensor) for placement in tensor.placements]
    return Layout(native_mesh(tensor.device_mesh), placements)


def _placement(placement: Any, tensor: Tensor) -> str:
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Shard:
        return f"shard:{placement.dim % tensor.ndim}"
    raise unsupported_placement(repr(placement))


def aligned_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, redistributed to the parameter's layout if it has another."""
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


def distributed_as(part: Tensor, spec: Any) -> DTensor:
    """The DTensor with this local tensor and the layout of another one, ``spec_of`` it."""
    return DTensor(part, spec, requires_grad=False)


def part(value: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of ``value``, if it were distributed like ``tensor``: the local tensor if it
    is. A DTensor stays one if ``tensor`` is not distributed."""
    if isinstance(value, DTensor):
        if not isinstance(tensor, DTensor):
            return value
        if (value.device_mesh, value.placements) == (tensor.device_mesh, tensor.placements):
            return local(value)
        value = value.full_tensor()
    found = layout(tensor)
    if found is None or value.shape != tensor.shape:
        return value
    box = local_box(found, tensor.shape, world_group().rank)
    for dim, (first, count) in enumerate(zip(box.offset, box.size, strict=True)):
        value = value.narrow(dim, min(first, value.shape[dim]), count)
    return value.contiguous()


def parts_of_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of whole, plain tensors, distributed as the tensors of ``model`` so that it can
    be loaded."""
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
                return distributed_as(part(value, tensor), spec_of(tensor))
        return value

    return {name: fitting(name, value) for name, value in state.items()}
