"""``shard_tensor`` and ``reshard``: distribute a tensor over a mesh, and change its
distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from .._agreement import agree
from .._mesh import placed_already
from ..errors import InvalidArgumentError
from ._mesh import check_mesh, check_placements, mesh_ranks, mesh_text
from ._redistribute import redistribute


def shard_tensor(
    data: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
    place: torch.device | str | None = None,
    stop_gradient: bool | None = None,
) -> DTensor:
    """Distributes a tensor over a mesh, as a DTensor.

    Every rank of the mesh must call it with a tensor of the same shape. All ranks take the values
    of the mesh's first rank.

    Args:
        data: a tensor, or an argument of ``torch.as_tensor``. A parameter gives a parameter. A
            DTensor on this mesh with these placements is returned as it is.
        mesh: a :class:`ProcessMesh`, or torch's ``DeviceMesh``.
        placements: one per mesh dimension: ``Shard(dim)``, ``Replicate()`` or ``Partial()``.
        dtype, place: the dtype and device to convert the tensor to first.
        stop_gradient: whether the result has ``requires_grad=False``; by default as ``data``.

    Raises:
        InvalidArgumentError: the placements do not match the mesh or the tensor, or ``data`` is not
            a leaf of the autograd graph.
        DisagreementError: another rank has a different mesh, shape, dtype or different placements.
    """
    mesh = check_mesh(mesh, "mesh")
    tensor = _tensor(data, dtype, place)
    placed = check_placements(placements, mesh, tensor.dim(), "the tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh or tensor.placements != placed:
            raise placed_already(tensor.placements, mesh_text(tensor.device_mesh))
        return tensor
    if not tensor.is_leaf:
        raise InvalidArgumentError(
            "the tensor is not a leaf of the autograd graph, and shard_tensor copies the values of "
            "the first rank; detach it, or use make_input_replicate_1d or DTensor.from_local, "
            "which are differentiable"
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
            f"data is a {type(data).__name__}; it must be a tensor or an array ({error})"
        ) from None


def reshard(dist_tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Redistributes a DTensor to other placements, or to another mesh. Differentiable.

    On the same mesh torch redistributes it. Between meshes each rank receives its local tensor in
    parts from ranks that have them; no rank gathers the whole tensor. Every rank of both meshes
    must call it. Partial values are reduced on their own mesh first.

    Raises:
        InvalidArgumentError: ``dist_tensor`` is not a DTensor, the placements do not match it, or
            one of them is ``Partial()``.
    """
    if not isinstance(dist_tensor, DTensor):
        raise InvalidArgumentError(
            f"dist_tensor is a {type(dist_tensor).__name__}; it must be a DTensor, "
            "which shard_tensor creates"
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
    return redistribute(dist_tensor.redistribute(placements=complete), mesh, placed)


def _check_not_partial(placements: tuple[Placement, ...]) -> None:
    if any(placement.is_partial() for placement in placements):
        raise InvalidArgumentError(
            f"placements is {list(placements)}; each placement must be Shard(dim) or Replicate(), "
            "since a tensor cannot be redistributed to Partial()"
        )
