"""Local tensors and layouts of distributed tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from .._core.layout import local_box
from .._mesh import unsupported_placement
from .._native import Layout, Mesh
from .._rendezvous import world_group
from ._mean_gradient import own_gradient
from ._private import local_value


def local(tensor: Any) -> Any:
    """The local tensor of a distributed tensor, without a copy. Other tensors are returned as they
    are."""
    return local_value(tensor) if tensor.is_dist() else tensor


def layout(tensor: Any) -> Layout | None:
    """The layout of a parameter. None if it is not distributed."""
    if not tensor.is_dist():
        return None
    placements = [_placement(placement, tensor) for placement in tensor.placements]
    return Layout(native_mesh(tensor.process_mesh), placements)


def native_mesh(mesh: Any) -> Mesh:
    """A mesh of Paddle as the extension module's."""
    return Mesh(mesh.shape, mesh.process_ids, mesh.dim_names)


def _placement(placement: Any, tensor: Any) -> str:
    if placement.is_replicated():
        return "replicate"
    if placement.is_shard():
        return f"shard:{placement.get_dim() % tensor.ndim}"
    raise unsupported_placement(str(placement))


def redistributed(tensor: Any, placements: Sequence[Any]) -> Any:
    """The tensor with other placements on its mesh."""
    mesh = tensor.process_mesh
    # On a CPU Paddle supports neither reduce-scatter nor all-to-all: replicate first, then split.
    complete = [
        dist.Replicate() if now.is_shard() and was != now else was
        for was, now in zip(tensor.placements, placements, strict=True)
    ]
    if complete != tensor.placements:
        tensor = dist.reshard(tensor, mesh, complete)
    return dist.reshard(tensor, mesh, list(placements))


def whole(tensor: Any) -> Any:
    """The whole tensor as a plain one, on every rank of its mesh."""
    if not tensor.is_dist():
        return tensor
    found = local(redistributed(tensor, [dist.Replicate()] * tensor.process_mesh.ndim))
    # Paddle's reduction turns a scalar into an array of one element.
    return found if list(found.shape) == list(tensor.shape) else found.reshape(tensor.shape)


def aligned_gradient(parameter: Any) -> Any | None:
    """The gradient of a parameter, redistributed to the parameter's layout if it has another."""
    gradient = own_gradient(parameter)
    if gradient is None or not parameter.is_dist() or gradient.placements == parameter.placements:
        return gradient
    with paddle.no_grad():
        gradient = redistributed(gradient, parameter.placements)
    # Not the parameter's own methods, which would end showing the mean over the ranks.
    Tensor.clear_gradient(parameter, False)
    Tensor.grad.__set__(parameter, gradient)
    return own_gradient(parameter)


def like(part: Any, tensor: Any) -> Any:
    """The distributed tensor with this local tensor and the layout of another tensor."""
    return assembled(part, tensor.shape, tensor.process_mesh, tensor.placements)


def assembled(part: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """The distributed tensor of a shape with this local tensor."""
    return Tensor(
        part, dims=list(shape), process_mesh=mesh, placements=list(placements), place=part.place
    )


def part(value: Any, tensor: Any) -> Any:
    """This rank's part of a plain ``value``, if it were distributed like ``tensor``. The local
    tensor if ``value`` is distributed."""
    if value.is_dist():
        return local(value)
    found = layout(tensor)
    if found is None or list(value.shape) != list(tensor.shape):
        return value
    box = local_box(found, tensor.shape, world_group().rank)
    slices = tuple(
        slice(first, first + count) for first, count in zip(box.offset, box.size, strict=True)
    )
    return value[slices].contiguous() if slices else value


def parts_of_state(
    model: Any, state: Mapping[str, Any], use_structured_name: bool = True
) -> dict[str, Any]:
    """A state dict of whole, plain tensors, distributed as the tensors of ``model`` so that it can
    be loaded."""
    own = {
        (name if use_structured_name else value.name): value
        for name, value in model.state_dict().items()
    }

    def fitting(name: str, value: Any) -> Any:
        tensor = own.get(name)
        if tensor is None or not tensor.is_dist():
            return value
        value = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        if value.is_dist() or list(value.shape) != list(tensor.shape):
            return value
        return like(part(value.astype(tensor.dtype), tensor), tensor)

    return {name: fitting(name, value) for name, value in state.items()}
