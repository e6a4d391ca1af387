"""What of a distributed tensor is here, and how it lies on its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from .._core.layout import Layout, RankMesh
from .._rendezvous import place
from ..errors import InvalidArgumentError


def local(tensor: Any) -> Any:
    """What this rank has of a tensor, without a copy: the tensor itself, unless it is
    distributed."""
    return Tensor._local_value(tensor) if tensor.is_dist() else tensor


def layout(tensor: Any) -> Layout | None:
    """How a parameter lies on its mesh; None: all of it is here."""
    if not tensor.is_dist():
        return None
    mesh = tensor.process_mesh
    ranks = RankMesh(tuple(mesh.shape), tuple(mesh.dim_names), tuple(mesh.process_ids))
    return Layout(ranks, tuple(_word(placement, tensor) for placement in tensor.placements))


def _word(placement: Any, tensor: Any) -> str:
    if placement.is_replicated():
        return "replicate"
    if placement.is_shard():
        return f"shard:{placement.get_dim() % tensor.ndim}"
    raise InvalidArgumentError(
        f"a parameter lies as {placement} on its mesh; it must be Shard or Replicate"
    )


def redistributed(tensor: Any, placements: Sequence[Any]) -> Any:
    """The tensor with other placements on its mesh."""
    mesh = tensor.process_mesh
    # On a CPU Paddle has neither reduce-scatter nor all-to-all: first all of it, and then its part.
    complete = [
        dist.Replicate() if now.is_shard() and was != now else was
        for was, now in zip(tensor.placements, placements, strict=True)
    ]
    if complete != tensor.placements:
        tensor = dist.reshard(tensor, mesh, complete)
    return dist.reshard(tensor, mesh, list(placements))


def whole(tensor: Any) -> Any:
    """All of a tensor, on every rank of its mesh, as a plain one."""
    if not tensor.is_dist():
        return tensor
    found = local(redistributed(tensor, [dist.Replicate()] * tensor.process_mesh.ndim))
    # What reduces a scalar makes an array of it.
    return found if list(found.shape) == list(tensor.shape) else found.reshape(tensor.shape)


def aligned_gradient(parameter: Any) -> Any | None:
    """A parameter's gradient, which lies as the parameter does from now on."""
    gradient = parameter.grad
    if gradient is None or not parameter.is_dist() or gradient.placements == parameter.placements:
        return gradient
    with paddle.no_grad():
        gradient = redistributed(gradient, parameter.placements)
    parameter.clear_gradient(False)
    parameter.grad = gradient
    return parameter.grad


def like(here: Any, tensor: Any) -> Any:
    """A distributed tensor of what is here of it, that lies as another does."""
    return assembled(here, tensor.shape, tensor.process_mesh, tensor.placements)


def assembled(here: Any, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """A distributed tensor of a shape, of what is here of it."""
    return Tensor(
        here, dims=list(shape), process_mesh=mesh, placements=list(placements), place=here.place
    )


def part(value: Any, tensor: Any) -> Any:
    """What this rank has of a plain, whole ``value``, if it lies as ``tensor`` does; of a
    distributed one, what is here."""
    if value.is_dist():
        return local(value)
    lies = layout(tensor)
    if lies is None or list(value.shape) != list(tensor.shape):
        return value
    offset, size = lies.area(tensor.shape, place().rank)
    cut = tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))
    return value[cut].contiguous() if cut else value


def parts_of_state(
    model: Any, state: Mapping[str, Any], use_structured_name: bool = True
) -> dict[str, Any]:
    """A state dict of plain, whole tensors as ``model`` can load it: what is distributed there lies
    as there."""
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
