"""``shard_tensor`` and ``reshard``: a tensor onto a mesh, and from one placement to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from .._agreement import agree
from ..errors import InvalidArgumentError
from ._dtensor import redistributed
from ._mesh import check_mesh, check_placements, has_everybody, mesh_text


def shard_tensor(
    data: Any,
    mesh: Any,
    placements: Sequence[Any],
    dtype: Any | None = None,
    place: Any | None = None,
    stop_gradient: bool | None = None,
) -> Any:
    """A tensor of which each rank of a mesh has its part: Paddle's ``shard_tensor``, for ranks that
    agree.

    Every rank of the mesh calls it with a tensor of the same shape. On a mesh of all ranks the
    values of its first rank count; else each rank's own, which must be the same.

    Args:
        data: a tensor, or what ``paddle.to_tensor`` takes. A parameter gives a parameter. A
            distributed tensor comes back as it is, if it is on this mesh and has these placements.
        mesh: a ``ProcessMesh``.
        placements: one for each dimension of the mesh: ``Shard(dim)``, ``Replicate()`` or
            ``Partial()``.
        dtype, place: cast to a dtype, taken from a device, before.
        stop_gradient: of the result; as ``data``'s by default.

    Raises:
        InvalidArgumentError: the placements do not fit the mesh or the tensor.
        DisagreementError: another rank has another mesh, shape, dtype or other placements.
    """
    mesh = check_mesh(mesh, "mesh")
    tensor = (
        data
        if isinstance(data, paddle.Tensor)
        else paddle.to_tensor(data, dtype=dtype, place=place)
    )
    placed = check_placements(placements, mesh, tensor.ndim, "the tensor")
    if tensor.is_dist():
        if tensor.process_mesh != mesh or tensor.placements != placed:
            raise InvalidArgumentError(
                f"the tensor is {tensor.placements} on {mesh_text(tensor.process_mesh)} already; reshard gives it other "
                "placements, or another mesh"
            )
        return tensor
    said = {
        "the mesh": mesh_text(mesh),
        "the tensor": f"shape {list(tensor.shape)}, {tensor.dtype}",
        "the placements": str(placed),
    }
    agree("shard_tensor", said, mesh.process_ids)
    share(tensor, mesh)
    return dist.shard_tensor(
        tensor, mesh, placed, dtype=dtype, place=place, stop_gradient=stop_gradient
    )


def share(tensor: Any, mesh: Any) -> None:
    """Gives a plain tensor the values of the mesh's first rank, where all ranks are in the mesh."""
    if len(mesh.process_ids) > 1 and has_everybody(mesh) and tensor.size > 0:
        with paddle.no_grad():
            # In the tensor's own memory: nothing that is computed with it is new.
            dist.broadcast(tensor.detach(), src=mesh.process_ids[0])


def reshard(dist_tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """The same tensor with other placements, or on another mesh. Gradients come back through it.

    Raises:
        InvalidArgumentError: ``dist_tensor`` is not distributed, or the placements do not fit.
    """
    if not isinstance(dist_tensor, paddle.Tensor) or not dist_tensor.is_dist():
        raise InvalidArgumentError(
            f"dist_tensor is a {'plain tensor' if isinstance(dist_tensor, paddle.Tensor) else type(dist_tensor).__name__}; it "
            "must be distributed: shard_tensor makes one"
        )
    mesh = check_mesh(mesh, "mesh")
    placed = check_placements(placements, mesh, dist_tensor.ndim, "the tensor")
    if mesh == dist_tensor.process_mesh:
        return (
            dist_tensor if placed == dist_tensor.placements else redistributed(dist_tensor, placed)
        )
    return dist.reshard(dist_tensor, mesh, placed)
