"""What every function asks of a mesh and of placements; both are Paddle's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import Partial, Placement, ProcessMesh, Replicate, Shard

from .. import _mesh
from .._rendezvous import place
from ..errors import InvalidArgumentError

__all__ = ["Partial", "Placement", "ProcessMesh", "Replicate", "Shard"]


def check_mesh(mesh: object, name: str) -> Any:
    """A mesh whose ranks there are, ready for collectives; or an error that says what is wrong."""
    if not isinstance(mesh, core.ProcessMesh):
        given = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise InvalidArgumentError(f"{name} is {given}; it must be a ProcessMesh")
    here = place()
    if not all(0 <= rank < here.world for rank in mesh.process_ids):
        raise InvalidArgumentError(
            f"{name} has ranks {mesh.process_ids}; they must be 0 to {here.world - 1}, those there are: start the program by "
            "python -m paddle.distributed.launch, or by paddle.distributed.spawn"
        )
    if here.world > 1 and not dist.is_initialized():
        dist.init_parallel_env()
    return mesh


def check_placements(placements: Any, mesh: Any, ndim: int, what: str) -> list[Any]:
    """One placement a mesh dimension, each of a dimension that the tensor has; negative ones count
    from the end."""
    _mesh.check_placements(placements, Placement, mesh.ndim, what)
    return [_check_placement(placement, ndim, what) for placement in placements]


def _check_placement(placement: Any, ndim: int, what: str) -> Any:
    if not placement.is_shard():
        return placement
    given = placement.get_dim()
    dim = _mesh.tensor_dimension(given, ndim, what)
    return placement if dim == given else Shard(dim)


def dimension(mesh: Any, dim: int | str) -> int:
    """The number of a dimension that is given by number or by name."""
    return _mesh.dimension(dim, mesh.ndim, mesh.dim_names)


def mesh_text(mesh: Any) -> str:
    """A mesh in an error."""
    return (
        f"{np.reshape(mesh.process_ids, mesh.shape).tolist()} with dim_names {list(mesh.dim_names)}"
    )


def has_everybody(mesh: Any) -> bool:
    """Whether all ranks are in it."""
    return sorted(mesh.process_ids) == list(range(place().world))
