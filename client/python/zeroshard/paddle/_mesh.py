"""Validation of meshes and placements, which are Paddle's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.distributed import Partial, Placement, ProcessMesh, Replicate, Shard

from .. import _mesh
from .._rendezvous import world_group
from ..errors import InvalidArgumentError
from ._private import mesh_class

__all__ = ["Partial", "Placement", "ProcessMesh", "Replicate", "Shard"]


def check_mesh(mesh: object, name: str) -> Any:
    """Returns the mesh, ready for collectives, or raises an error if it is not one or has unknown
    ranks."""
    if not isinstance(mesh, mesh_class()):
        given = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise InvalidArgumentError(f"{name} is {given}; it must be a ProcessMesh")
    world = world_group().size
    if not all(0 <= rank < world for rank in mesh.process_ids):
        raise InvalidArgumentError(
            f"{name} has the ranks {mesh.process_ids}; they must be in 0 to {world - 1}; start the "
            "program with python -m paddle.distributed.launch or paddle.distributed.spawn"
        )
    if world > 1 and not dist.is_initialized():
        dist.init_parallel_env()
    return mesh


def check_placements(placements: Any, mesh: Any, ndim: int, what: str) -> list[Any]:
    """Returns the placements with non-negative dimensions, or raises an error if they do not match
    the mesh or the tensor."""
    _mesh.check_placements(placements, Placement, mesh.ndim, what)
    return [_check_placement(placement, ndim, what) for placement in placements]


def _check_placement(placement: Any, ndim: int, what: str) -> Any:
    if not placement.is_shard():
        return placement
    given = placement.get_dim()
    dim = _mesh.tensor_dimension(given, ndim, what)
    return placement if dim == given else Shard(dim)


def dimension(mesh: Any, dim: int | str) -> int:
    """The index of a dimension that is given by index or by name."""
    return _mesh.dimension(dim, mesh.ndim, mesh.dim_names)


def mesh_text(mesh: Any) -> str:
    """The text of a mesh in errors."""
    return (
        f"{np.reshape(mesh.process_ids, mesh.shape).tolist()} with dim_names {list(mesh.dim_names)}"
    )


def covers_world(mesh: Any) -> bool:
    """Returns whether the mesh contains all ranks."""
    return sorted(mesh.process_ids) == list(world_group().ranks)
