"""``ProcessMesh``, and what every function asks of a mesh and of placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .. import _mesh
from .._agreement import agree
from .._native import Mesh
from .._rendezvous import distributed
from ..errors import InvalidArgumentError, NotInitialisedError


class ProcessMesh(DeviceMesh):
    """Ranks in an n-dimensional arrangement whose dimensions have names: a ``DeviceMesh`` of torch.

        mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
        mesh["tp"]  # this rank's part of one dimension

    Every rank of the process group must make it, with the same array, also those that are not in
    it.

    Args:
        array: the ranks, each at most once: nested lists, or anything that ``torch.tensor`` takes.
        dim_names: one name a dimension; ``d0``, ``d1``, ... by default.
        device_type: where the shards are, ``"cpu"`` or ``"cuda"``; as the process group's backend
            says by default.

    Raises:
        InvalidArgumentError: a rank stands in the array twice or is none of the process group's, or
            the names do not fit.
        NotInitialisedError: there is no process group.
        DisagreementError: another rank has another array or other names.
    """

    def __init__(
        self, array: Any, dim_names: Sequence[str] | None = None, device_type: str | None = None
    ) -> None:
        dist = distributed()
        if dist is None:
            raise NotInitialisedError(
                "a ProcessMesh is made of the ranks of a process group, and there is none: call "
                "torch.distributed.init_process_group first"
            )
        ranks = _ranks(array, dist.get_world_size())
        names = (
            tuple(f"d{dim}" for dim in range(ranks.dim()))
            if dim_names is None
            else tuple(dim_names)
        )
        if (
            len(names) != ranks.dim()
            or len(set(names)) != len(names)
            or not all(isinstance(n, str) for n in names)
        ):
            raise InvalidArgumentError(
                f"dim_names is {list(names)}; it must have a different name for each of the {ranks.dim()} dimensions"
            )
        agree(
            "ProcessMesh",
            {"the mesh": f"{ranks.tolist()} with dim_names {list(names)}"},
            range(dist.get_world_size()),
        )
        if device_type is None:
            device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        # torch orders the groups of a mesh by rank, unless it is told otherwise.
        ascending = all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))
        options: dict[str, Any] = {} if ascending else {"preserve_rank_order": True}
        super().__init__(device_type, ranks, mesh_dim_names=names, **options)

    @property
    def dim_names(self) -> list[str]:
        """The dimensions' names."""
        return list(self.mesh_dim_names or ())

    @property
    def process_ids(self) -> list[int]:
        """The ranks, row by row."""
        return [int(rank) for rank in self.mesh.flatten().tolist()]

    def get_dim_size(self, dim_name: str) -> int:
        """How many ranks there are along a dimension."""
        return self.size(dimension(self, dim_name))


def _ranks(array: Any, world: int) -> Tensor:
    try:
        ranks = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"the array of a mesh is {array!r}; it must be ranks in nested lists ({error})"
        ) from None
    if (
        ranks.dim() == 0
        or ranks.numel() == 0
        or ranks.is_floating_point()
        or ranks.dtype == torch.bool
    ):
        raise InvalidArgumentError(
            f"the array of a mesh is {array!r}; it must have a dimension, and ranks in it"
        )
    flat = ranks.flatten().tolist()
    if len(set(flat)) != len(flat):
        raise InvalidArgumentError(
            f"the array of a mesh is {ranks.tolist()}; it must have every rank once"
        )
    if min(flat) < 0 or max(flat) >= world:
        raise InvalidArgumentError(
            f"the array of a mesh is {ranks.tolist()}; its ranks must be those that there are, 0 to {world - 1}"
        )
    return ranks


def check_mesh(mesh: object, name: str) -> DeviceMesh:
    """A mesh, or an error that says so."""
    if not isinstance(mesh, DeviceMesh):
        given = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise InvalidArgumentError(
            f"{name} is {given}; it must be a ProcessMesh, or a DeviceMesh of torch"
        )
    return mesh


def check_1d(mesh: object, name: str) -> DeviceMesh:
    """A mesh of one dimension, or an error that says so."""
    found = check_mesh(mesh, name)
    if found.ndim != 1:
        names = found.mesh_dim_names or ()
        called = f" ({', '.join(names)})" if names else ""
        example = f"{name}[{names[-1]!r}]" if names else "a mesh of one dimension"
        raise InvalidArgumentError(
            f"{name} has {found.ndim} dimensions{called}; it must have 1: give {example}"
        )
    return found


def dimension(mesh: DeviceMesh, dim: int | str) -> int:
    """The number of a dimension that is given by number or by name."""
    return _mesh.dimension(dim, mesh.ndim, mesh.mesh_dim_names or ())


def sub_mesh(mesh: DeviceMesh, dim: int | str) -> DeviceMesh:
    """This rank's part of one dimension of a mesh."""
    number = dimension(mesh, dim)
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[number]]
    return DeviceMesh.from_group(mesh.get_group(number), mesh.device_type)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that one is a slice of; itself, if of none."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def mesh_ranks(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, row by row."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def mesh_text(mesh: DeviceMesh) -> str:
    """A mesh in an error."""
    names = f" with dim_names {list(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else ""
    return f"{mesh.mesh.tolist()}{names}"


def check_placements(
    placements: Any, mesh: DeviceMesh, ndim: int, what: str
) -> tuple[Placement, ...]:
    """One placement a mesh dimension, each of a dimension that the tensor has; negative ones count
    from the end."""
    _mesh.check_placements(placements, Placement, mesh.ndim, what)
    return tuple(check_placement(placement, ndim, what) for placement in placements)


def check_placement(placement: Placement, ndim: int, what: str) -> Placement:
    """The placement, its dimension counted from the front."""
    return (
        Shard(_mesh.tensor_dimension(placement.dim, ndim, what))
        if isinstance(placement, Shard)
        else placement
    )


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and size of what a rank has of a tensor; None if it is not in the mesh.

    As ``torch.chunk`` cuts: the last parts may be short, or empty. Where several dimensions of the
    mesh cut one of the tensor, the outer one cuts first.
    """
    names = mesh.mesh_dim_names or [f"d{dim}" for dim in range(mesh.ndim)]
    words = [
        f"shard:{placement.dim}" if isinstance(placement, Shard) else "replicate"
        for placement in placements
    ]
    found = Mesh(list(mesh.shape), mesh_ranks(mesh), names).local_box(shape, words, rank)
    return None if found is None else (tuple(found[0]), tuple(found[1]))


__all__ = ["Partial", "Placement", "ProcessMesh", "Replicate", "Shard"]
