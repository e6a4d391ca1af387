"""What every function asks of a mesh and of placements; both are Paddle's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import Partial, Placement, ProcessMesh, Replicate, Shard

from .._rendezvous import place
from ..errors import InvalidArgument

__all__ = ["Partial", "Placement", "ProcessMesh", "Replicate", "Shard"]


def check_mesh(mesh: object, name: str) -> Any:
    """A mesh whose ranks there are, ready for collectives; or an error that says what is wrong."""
    if not isinstance(mesh, core.ProcessMesh):
        given = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise InvalidArgument(f"{name} is {given}; it must be a ProcessMesh")
    here = place()
    if not all(0 <= rank < here.world for rank in mesh.process_ids):
        raise InvalidArgument(
            f"{name} has ranks {mesh.process_ids}; they must be 0 to {here.world - 1}, those there are: start the program by "
            "python -m paddle.distributed.launch, or by paddle.distributed.spawn"
        )
    if here.world > 1 and not dist.is_initialized():
        dist.init_parallel_env()
    return mesh


def check_placements(placements: object, mesh: Any, ndim: int, what: str) -> list[Any]:
    """One placement a mesh dimension, each of a dimension that the tensor has; negative ones count from the end."""
    if not isinstance(placements, Sequence) or not all(isinstance(each, Placement) for each in placements):
        raise InvalidArgument(
            f"placements of {what} is {placements!r}; it must be a list of Shard(dim), Replicate() or Partial()"
        )
    if len(placements) != mesh.ndim:
        raise InvalidArgument(
            f"placements of {what} has {len(placements)}; it must have one for each of the {mesh.ndim} dimensions of the mesh"
        )
    return [_check_placement(placement, ndim, what) for placement in placements]


def _check_placement(placement: Any, ndim: int, what: str) -> Any:
    if not placement.is_shard():
        return placement
    dim = placement.get_dim()
    if not -ndim <= dim < ndim:
        raise InvalidArgument(
            f"{what} is to be sharded on dimension {dim}, and has {ndim} dimension{'s' if ndim != 1 else ''}; it must be one "
            f"of {list(range(ndim))}"
        )
    return placement if dim >= 0 else Shard(dim % ndim)


def dimension(mesh: Any, dim: int | str) -> int:
    """The number of a dimension that is given by number or by name."""
    if isinstance(dim, str) and dim in mesh.dim_names:
        return int(mesh.dim_names.index(dim))
    if isinstance(dim, int) and not isinstance(dim, bool) and -mesh.ndim <= dim < mesh.ndim:
        return dim % int(mesh.ndim)
    known = ", ".join(map(repr, mesh.dim_names))
    raise InvalidArgument(f"the mesh has no dimension {dim!r}; it has {mesh.ndim} ({known})")


def mesh_text(mesh: Any) -> str:
    """A mesh in an error."""
    return f"{np.reshape(mesh.process_ids, mesh.shape).tolist()} with dim_names {list(mesh.dim_names)}"


def has_everybody(mesh: Any) -> bool:
    """Whether all ranks are in it."""
    return sorted(mesh.process_ids) == list(range(place().world))
