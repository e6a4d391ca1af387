"""``shard_tensor`` and ``reshard``: distribute a tensor over a mesh, and change its
distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from .._agreement import agree
from .._mesh import placed_already
from ..errors import InvalidArgumentError
from ._dtensor import redistributed
from ._mesh import check_mesh, check_placements, covers_world, mesh_text


def shard_tensor(
    data: Any,
    mesh: Any,
    placements: Sequence[Any],
    dtype: Any | None = None,
    place: Any | None = None,
    stop_gradient: bool | None = None,
) -> Any:
    """Distributes a tensor over a mesh with Paddle's ``shard_tensor``, after comparing the ranks'
    arguments.

    Every rank of the mesh must call it with a tensor of the same shape. On a mesh of all ranks, all
    take the values of its first rank. On a smaller mesh each rank uses its own values, which must
    be equal.

    Args:
        data: a tensor, or an argument of ``paddle.to_tensor``. A parameter gives a parameter. A
            distributed tensor on this mesh with these placements is returned as it is.
        mesh: a ``ProcessMesh``.
        placements: one per mesh dimension: ``Shard(dim)``, ``Replicate()`` or ``Partial()``.
        dtype, place: the dtype and device to convert the tensor to first.
        stop_gradient: of the result; by default as ``data``.

    Raises:
        InvalidArgumentError: the placements do not match the mesh or the tensor.
        DisagreementError: another rank has a different mesh, shape, dtype or different placements.
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
            raise placed_already(tensor.placements, mesh_text(tensor.process_mesh))
        return tensor
    arguments = {
        "the mesh": mesh_text(mesh),
        "the tensor": f"shape {list(tensor.shape)}, {tensor.dtype}",
        "the placements": str(placed),
    }
    agree("shard_tensor", arguments, mesh.process_ids)
    broadcast(tensor, mesh)
    return dist.shard_tensor(
        tensor, mesh, placed, dtype=dtype, place=place, stop_gradient=stop_gradient
    )


def broadcast(tensor: Any, mesh: Any) -> None:
    """Broadcasts the values of the mesh's first rank to a plain tensor, if the mesh contains all
    ranks."""
    if len(mesh.process_ids) > 1 and covers_world(mesh) and tensor.size > 0:
        with paddle.no_grad():
            # Into the tensor's own memory, without autograd.
            dist.broadcast(tensor.detach(), src=mesh.process_ids[0])


def reshard(dist_tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """Redistributes a tensor to other placements, or to another mesh. Differentiable.

    Raises:
        InvalidArgumentError: ``dist_tensor`` is not distributed, or the placements do not match it.
    """
    if not isinstance(dist_tensor, paddle.Tensor) or not dist_tensor.is_dist():
        plain = isinstance(dist_tensor, paddle.Tensor)
        given = "plain tensor" if plain else type(dist_tensor).__name__
        raise InvalidArgumentError(
            f"dist_tensor is a {given}; it must be a distributed tensor, which shard_tensor creates"
        )
    mesh = check_mesh(mesh, "mesh")
    placed = check_placements(placements, mesh, dist_tensor.ndim, "the tensor")
    if mesh == dist_tensor.process_mesh:
        return (
            dist_tensor if placed == dist_tensor.placements else redistributed(dist_tensor, placed)
        )
    return dist.reshard(dist_tensor, mesh, placed)
