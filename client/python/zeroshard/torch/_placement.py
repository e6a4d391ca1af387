"""``shard_tensor`` and ``reshard``: a tensor onto a mesh, and from one mesh or placement to
another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from .._agreement import agree
from ..errors import InvalidArgumentError
from ._mesh import check_mesh, check_placements, mesh_ranks, mesh_text
from ._moves import move


def shard_tensor(
    data: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
    place: torch.device | str | None = None,
    stop_gradient: bool | None = None,
) -> DTensor:
    """A tensor of which each rank of a mesh has its part.

    Every rank of the mesh calls it with a tensor of the same shape; the values of the mesh's first
    rank count.

    Args:
        data: a tensor, or what ``torch.as_tensor`` takes. A parameter gives a parameter. A DTensor
            comes back as it is, if it is on this mesh and has these placements.
        mesh: a :class:`ProcessMesh`, or a ``DeviceMesh`` of torch.
        placements: one for each dimension of the mesh: ``Shard(dim)``, ``Replicate()`` or
            ``Partial()``.
        dtype, place: cast to a dtype, taken from a device, before.
        stop_gradient: whether the result has ``requires_grad=False``; as ``data`` by default.

    Raises:
        InvalidArgumentError: the placements do not fit the mesh or the tensor, or ``data`` was
            computed with gradients.
        DisagreementError: another rank has another mesh, shape, dtype or other placements.
    """
    mesh = check_mesh(mesh, "mesh")
    tensor = _tensor(data, dtype, place)
    placed = check_placements(placements, mesh, tensor.dim(), "the tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh or tensor.placements != placed:
            raise InvalidArgumentError(
                f"the tensor is {list(tensor.placements)} on {mesh_text(tensor.device_mesh)} already; reshard gives it "
                "other placements, or another mesh"
            )
        return tensor
    if not tensor.is_leaf:
        raise InvalidArgumentError(
            "the tensor was computed with gradients, and shard_tensor takes the first rank's values; it must be "
            "detached, or become a DTensor by make_input_replicate_1d or DTensor.from_local, through which gradients come "
            "back"
        )
    agree(
        "shard_tensor",
        {
            "the mesh": mesh_text(mesh),
            "the tensor": f"shape {list(tensor.shape)}, {tensor.dtype}",
            "the placements": str(list(placed)),
        },
        mesh_ranks(mesh),
    )
    requires_grad = tensor.requires_grad if stop_gradient is None else not stop_gradient
    made = distribute_tensor(tensor.detach(), mesh, placed)
    if isinstance(tensor, nn.Parameter):
        parameter: Any = nn.Parameter(made, requires_grad=requires_grad)
        if getattr(tensor, "need_clip", True) is False:
            parameter.need_clip = False
        found: DTensor = parameter
        return found
    made.requires_grad_(requires_grad)
    return made


def _tensor(data: Any, dtype: torch.dtype | None, place: torch.device | str | None) -> Tensor:
    if isinstance(data, Tensor):
        if (dtype is None or data.dtype == dtype) and (
            place is None or data.device == torch.device(place)
        ):
            return data
        return data.detach().to(device=place, dtype=dtype).requires_grad_(data.requires_grad)
    try:
        return torch.as_tensor(data, dtype=dtype, device=place)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"data is a {type(data).__name__}; it must be a tensor, or an array ({error})"
        ) from None


def reshard(dist_tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The same tensor with other placements, or on another mesh. Gradients come back through it.

    On one mesh torch redistributes it; between meshes each rank gets its part from ranks that have
    it, piece by piece, and nobody the whole. Every rank of both meshes calls it. Partial sums are
    reduced on their own mesh before.

    Raises:
        InvalidArgumentError: ``dist_tensor`` is no DTensor, the placements do not fit, or one of
            them is ``Partial()``, which only a computation makes.
    """
    if not isinstance(dist_tensor, DTensor):
        raise InvalidArgumentError(
            f"dist_tensor is a {type(dist_tensor).__name__}; it must be a DTensor: shard_tensor makes one"
        )
    mesh = check_mesh(mesh, "mesh")
    placed = check_placements(placements, mesh, dist_tensor.dim(), "the tensor")
    if mesh == dist_tensor.device_mesh:
        if placed == dist_tensor.placements:
            return dist_tensor
        _check_not_partial(placed)
        return dist_tensor.redistribute(placements=placed)
    _check_not_partial(placed)
    complete = [
        Replicate() if isinstance(each, Partial) else each for each in dist_tensor.placements
    ]
    return move(dist_tensor.redistribute(placements=complete), mesh, placed)


def _check_not_partial(placements: tuple[Placement, ...]) -> None:
    if any(placement.is_partial() for placement in placements):
        raise InvalidArgumentError(
            f"placements are {list(placements)}; they must be Shard(dim) or Replicate(): only a computation makes "
            "partial sums"
        )
