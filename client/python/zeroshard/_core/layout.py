"""Where a job's tensors lie: which box of each a rank has, and what it contributes to the gradient.

A framework says how a tensor lies on a mesh of ranks. The ranks of a job may have several such
meshes beside each other, one for each replica of the model: together they are the job's mesh, with
a dimension more, along which gradients are averaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._native import Mesh
from ..errors import InvalidArgumentError


@dataclass(frozen=True)
class RankMesh:
    """Ranks in an array with named dimensions."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    #: Row-major, of the world.
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{name} {size}" for name, size in zip(self.names, self.shape, strict=True)
        )
        return f"({sizes}) of ranks {list(self.ranks)}"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh; placements as :class:`zeroshard._native.Mesh` has them."""

    mesh: RankMesh
    placements: tuple[str, ...]

    def area(self, shape: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
        """The box of a tensor of ``shape`` that a rank has: first index, and number of indices, of
        each dimension."""
        mesh = Mesh(self.mesh.shape, self.mesh.ranks, self.mesh.names)
        area = mesh.local_box(shape, self.placements, rank)
        if area is None:
            raise InvalidArgumentError(
                f"rank {rank} is not in the mesh {self.mesh}; it must be, to have a part of the tensor"
            )
        return area


#: A tensor's layout on the servers: the job's mesh, by number, and a placement for each of its
#: dimensions.
JobLayout = tuple[int, list[str]]


@dataclass(frozen=True)
class JobLayouts:
    """The meshes of a job, and each tensor's layout by its name; None: every rank has all of it."""

    meshes: list[Mesh]
    layouts: dict[str, JobLayout | None]


def agree(
    layouts: Mapping[str, Layout | None],
    trained: Callable[[str], bool],
    ranks: Sequence[int],
    exchange: Callable[[str], Sequence[str]],
) -> JobLayouts:
    """The layouts of a job of ``ranks``, of what each of them says of its tensors.

    Args:
        layouts: of every tensor, by its name.
        trained: whether a tensor has a gradient.
        ranks: the job's, as ranks of the world.
        exchange: tells something to all of them, and hears what they say, in their order.

    Raises:
        InvalidArgumentError: ranks disagree, or their meshes do not lie beside each other.
    """
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts.values() if layout is not None))
    said = {
        "meshes": [asdict(mesh) for mesh in meshes],
        "layouts": {name: _text(layout, meshes) for name, layout in layouts.items()},
    }
    heard = [json.loads(text) for text in exchange(json.dumps(said))]
    _check(heard, ranks)
    beside = [
        _beside([_mesh(other["meshes"][number]) for other in heard], ranks)
        for number in range(len(meshes))
    ]

    def on_job(name: str, layout: Layout | None) -> JobLayout | None:
        if layout is not None:
            number = meshes.index(layout.mesh)
            _, replicas = beside[number]
            return number, ["avg" if trained(name) else "replicate"] * replicas + list(
                layout.placements
            )
        # Beside tensors that lie on a mesh, a plain one is the same on all of its ranks. Which
        # dimensions of a mesh of all ranks are for data nobody has said: the mean over all of them
        # is right whatever they are.
        if not meshes or not trained(name) or (not beside[0][1] and len(meshes[0].shape) > 1):
            return None
        return 0, ["avg"] * beside[0][1] + ["replicate"] * len(meshes[0].shape)

    return JobLayouts(
        [mesh for mesh, _ in beside],
        {name: on_job(name, layout) for name, layout in layouts.items()},
    )


def _text(layout: Layout | None, meshes: list[RankMesh]) -> str:
    return (
        ""
        if layout is None
        else f"{', '.join(layout.placements)} on mesh {meshes.index(layout.mesh)}"
    )


def _mesh(said: Mapping[str, Any]) -> RankMesh:
    return RankMesh(tuple(said["shape"]), tuple(said["names"]), tuple(said["ranks"]))


def _check(heard: list[Any], ranks: Sequence[int]) -> None:
    """Whether all say the same, but for the ranks of their meshes."""
    first = heard[0]
    for rank, other in zip(ranks, heard, strict=True):
        for name in {**first["layouts"], **other["layouts"]}:
            ours, theirs = (said["layouts"].get(name) for said in (first, other))
            if ours != theirs:
                raise InvalidArgumentError(
                    f"tensor {name!r} is {_said(theirs)} on rank {rank} and {_said(ours)} on rank {ranks[0]}; all ranks must "
                    "make the same model with the same plan"
                )
        shapes = [
            [(mesh["shape"], mesh["names"]) for mesh in said["meshes"]] for said in (first, other)
        ]
        if shapes[0] != shapes[1]:
            raise InvalidArgumentError(
                f"the meshes are {shapes[1]} on rank {rank} and {shapes[0]} on rank {ranks[0]}; all ranks must make the same"
            )


def _said(layout: str | None) -> str:
    return "not there" if layout is None else layout or "on no mesh"


def _beside(meshes: list[RankMesh], ranks: Sequence[int]) -> tuple[Mesh, int]:
    """The job's mesh out of its ranks' meshes, and how many dimensions it has more (1, or 0 if all
    have the same)."""
    distinct = sorted(set(meshes), key=lambda mesh: min(mesh.ranks))
    together = [rank for mesh in distinct for rank in mesh.ranks]
    if sorted(together) != sorted(ranks):
        raise InvalidArgumentError(
            f"the meshes {' and '.join(map(str, distinct))} do not make the group's ranks {list(ranks)}: each rank must be "
            "in exactly one; give the group that they make together, or one mesh of all ranks and slices of it"
        )
    own = [ranks.index(rank) for rank in together]
    shape, names = distinct[0].shape, distinct[0].names
    if len(distinct) == 1:
        return Mesh(shape, own, names), 0
    replica = "replica" if "replica" not in names else "replica of the job"
    return Mesh((len(distinct), *shape), own, (replica, *names)), 1
