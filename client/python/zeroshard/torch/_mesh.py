"""``ProcessMesh``, and the validation of meshes and placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .. import _mesh
from .._agreement import agree
from .._native import Layout, Mesh
from .._rendezvous import distributed
from ..errors import InvalidArgumentError, NotInitialisedError
from . import _private


class ProcessMesh(DeviceMesh):
    """A ``DeviceMesh`` of torch: ranks in an n-dimensional array with named dimensions.

        mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
        mesh["tp"]  # the slice along one dimension that contains this rank

    Every rank of the process group must create it with the same array, including ranks that are not
    in the array.

    Args:
        array: the ranks, each at most once: nested lists, or any argument of ``torch.tensor``.
        dim_names: one name per dimension; ``d0``, ``d1``, ... by default.
        device_type: the device of the shards, ``"cpu"`` or ``"cuda"``; by default that of the
            process group's backend.

    Raises:
        InvalidArgumentError: the array contains a rank twice or a rank that does not exist, or the
            names do not match its dimensions.
        NotInitialisedError: no process group is initialised.
        DisagreementError: another rank has a different array or different names.
    """

    def __init__(
        self, array: Any, dim_names: Sequence[str] | None = None, device_type: str | None = None
    ) -> None:
        dist = distributed()
        if dist is None:
            raise NotInitialisedError(
                "a ProcessMesh needs a process group; call torch.distributed.init_process_group "
                "first"
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
                f"dim_names is {list(names)}; it must have {ranks.dim()} distinct names, "
                "one per dimension"
            )
        agree(
            "ProcessMesh",
            {"the mesh": f"{ranks.tolist()} with dim_names {list(names)}"},
            range(dist.get_world_size()),
        )
        if device_type is None:
            device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        # By default, torch sorts the ranks of a mesh's groups.
        ascending = all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))
        options: dict[str, Any] = {} if ascending else {"preserve_rank_order": True}
        super().__init__(device_type, ranks, mesh_dim_names=names, **options)

    @property
    def dim_names(self) -> list[str]:
        """The names of the dimensions."""
        return list(self.mesh_dim_names or ())

    @property
    def process_ids(self) -> list[int]:
        """The ranks, in row-major order."""
        return [int(rank) for rank in self.mesh.flatten().tolist()]

    def get_dim_size(self, dim_name: str) -> int:
        """The number of ranks along a dimension."""
        return self.size(dimension(self, dim_name))


def _ranks(array: Any, world: int) -> Tensor:
    try:
        ranks = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"the array of a mesh is {array!r}; it must be nested lists of ranks ({error})"
        ) from None
    if (
        ranks.dim() == 0
        or ranks.numel() == 0
        or ranks.is_floating_point()
        or ranks.dtype == torch.bool
    ):
        raise InvalidArgumentError(
            f"the array of a mesh is {array!r}; "
            "it must be a non-empty array of integers with at least one dimension"
        )
    flat = ranks.flatten().tolist()
    if len(set(flat)) != len(flat):
        raise InvalidArgumentError(
            f"the array of a mesh is {ranks.tolist()}; it must not contain a rank twice"
        )
    if min(flat) < 0 or max(flat) >= world:
        raise InvalidArgumentError(
            f"the array of a mesh is {ranks.tolist()}; its ranks must be in 0 to {world - 1}"
        )
    return ranks


def check_mesh(mesh: object, name: str) -> DeviceMesh:
    """Returns the mesh, or raises an error if it is not one."""
    if not isinstance(mesh, DeviceMesh):
        given = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise InvalidArgumentError(
            f"{name} is {given}; it must be a ProcessMesh or a torch DeviceMesh"
        )
    return mesh


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``."""
    found: DeviceMesh | None = _private.current_mesh()
    if found is None:
        raise InvalidArgumentError(
            "device_mesh is None, and no mesh surrounds the call; pass a mesh, or call it inside "
            "`with mesh:`"
        )
    return found


def check_1d(mesh: object, name: str) -> DeviceMesh:
    """Returns the mesh, or raises an error if it does not have one dimension."""
    found = check_mesh(mesh, name)
    if found.ndim != 1:
        names = found.mesh_dim_names or ()
        called = f" ({', '.join(names)})" if names else ""
        example = f"{name}[{names[-1]!r}]" if names else "a mesh with one dimension"
        raise InvalidArgumentError(
            f"{name} has {found.ndim} dimensions{called}; it must have 1; pass {example}"
        )
    return found


def dimension(mesh: DeviceMesh, dim: int | str) -> int:
    """The index of a dimension that is given by index or by name."""
    return _mesh.dimension(dim, mesh.ndim, mesh.mesh_dim_names or ())


def sub_mesh(mesh: DeviceMesh, dim: int | str) -> DeviceMesh:
    """The slice along a dimension of a mesh that contains this rank."""
    number = dimension(mesh, dim)
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[number]]
    return DeviceMesh.from_group(mesh.get_group(number), mesh.device_type)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of, or itself."""
    root: DeviceMesh = _private.root_mesh(mesh)
    return root


def mesh_ranks(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, in row-major order."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def mesh_text(mesh: DeviceMesh) -> str:
    """The text of a mesh in errors."""
    names = f" with dim_names {list(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else ""
    return f"{mesh.mesh.tolist()}{names}"


def check_placements(
    placements: Any, mesh: DeviceMesh, ndim: int, what: str
) -> tuple[Placement, ...]:
    """Returns the placements with non-negative dimensions, or raises an error if they do not match
    the mesh or the tensor."""
    _mesh.check_placements(placements, Placement, mesh.ndim, what)
    return tuple(check_placement(placement, ndim, what) for placement in placements)


def check_placement(placement: Placement, ndim: int, what: str) -> Placement:
    """Returns the placement with a non-negative dimension."""
    return (
        Shard(_mesh.tensor_dimension(placement.dim, ndim, what))
        if isinstance(placement, Shard)
        else placement
    )


def native_mesh(mesh: DeviceMesh) -> Mesh:
    """A mesh of torch as the extension module's."""
    names = mesh.mesh_dim_names or [f"d{dim}" for dim in range(mesh.ndim)]
    return Mesh(mesh.shape, mesh_ranks(mesh), names)


def layout_on(mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """The layout of a tensor without partial placements.

    Tensors are split as by ``torch.chunk``: the last parts may be shorter, or empty. If several
    mesh dimensions split the same dimension of the tensor, the outer one is applied first.
    """
    names = [
        f"shard:{placement.dim}" if isinstance(placement, Shard) else "replicate"
        for placement in placements
    ]
    return Layout(native_mesh(mesh), names)


__all__ = ["Partial", "Placement", "ProcessMesh", "Replicate", "Shard"]
