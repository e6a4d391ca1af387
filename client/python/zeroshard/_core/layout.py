"""Layouts of a job's tensors, combined from the layouts on every rank.

A framework reports how each tensor is distributed over a mesh of ranks. A job may have several such
meshes, one for each replica of the model. They are combined into one mesh with an additional
dimension, over which gradients are averaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .._agreement import exchange_equal
from .._native import Box, Layout, Mesh
from ..errors import InvalidArgumentError

#: A tensor's layout in a job: the index of one of the job's meshes, and a placement for each of its
#: dimensions.
JobLayout = tuple[int, list[str]]


@dataclass(frozen=True)
class JobLayouts:
    """The meshes of a job, and the layout of each tensor by name. None: each rank has the whole
    tensor."""

    meshes: list[Mesh]
    layouts: dict[str, JobLayout | None]


def local_box(layout: Layout, shape: Sequence[int], rank: int) -> Box:
    """The rank's box of a tensor of ``shape``."""
    box = layout.local_box(shape, rank)
    if box is None:
        raise InvalidArgumentError(f"rank {rank} is not in the mesh {layout.mesh}")
    return box


def job_layouts(
    layouts: Mapping[str, Layout | None],
    trained: Callable[[str], bool],
    ranks: Sequence[int],
    exchange: Callable[[str, str], Sequence[str]],
    alike: Mapping[str, str],
) -> JobLayouts:
    """Combines the layouts of all ranks into the layouts of their job.

    Args:
        layouts: the layout of every tensor on this rank, by name.
        trained: whether a tensor has a gradient.
        ranks: the job's ranks, as ranks of the world.
        exchange: sends a value to all of these ranks, under a name, and returns their values, in
            rank order.
        alike: the text of everything else that must be equal on all ranks, by its name.

    Raises:
        DisagreementError: the ranks have different tensors or layouts, or differ in ``alike``.
        InvalidArgumentError: the meshes of the ranks overlap, or do not cover the job's ranks.
    """
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts.values() if layout is not None))
    texts = {
        "the shape of the meshes": str([(mesh.shape, mesh.names) for mesh in meshes]),
        **{
            f"the layout of tensor {name!r}": _text(layout, meshes)
            for name, layout in layouts.items()
        },
        **alike,
    }
    own = json.dumps([mesh.ranks for mesh in meshes])
    members = [json.loads(text) for text in exchange_equal(exchange, texts, ranks, own)]
    combined = [
        _combine([Mesh(mesh.shape, other[number], mesh.names) for other in members], ranks)
        for number, mesh in enumerate(meshes)
    ]

    def in_job(name: str, layout: Layout | None) -> JobLayout | None:
        if layout is not None:
            number = meshes.index(layout.mesh)
            _, replicas = combined[number]
            reduction = "avg" if trained(name) else "replicate"
            return number, [reduction] * replicas + layout.placements
        # A plain tensor beside distributed ones is equal on all ranks of the mesh. On a mesh of all
        # ranks it is not known which dimensions are data-parallel: the mean over all ranks is
        # correct in every case.
        if not meshes or not trained(name) or (not combined[0][1] and len(meshes[0].shape) > 1):
            return None
        return 0, ["avg"] * combined[0][1] + ["replicate"] * len(meshes[0].shape)

    return JobLayouts(
        [mesh for mesh, _ in combined],
        {name: in_job(name, layout) for name, layout in layouts.items()},
    )


def _text(layout: Layout | None, meshes: list[Mesh]) -> str:
    if layout is None:
        return "no mesh"
    return f"{', '.join(layout.placements)} on mesh {meshes.index(layout.mesh)}"


def _combine(meshes: list[Mesh], ranks: Sequence[int]) -> tuple[Mesh, int]:
    """The job's mesh, combined from the mesh of each rank, and the number of dimensions that it has
    in addition: 1, or 0 if all ranks have the same mesh."""
    distinct = sorted(set(meshes), key=lambda mesh: min(mesh.ranks))
    together = [rank for mesh in distinct for rank in mesh.ranks]
    if sorted(together) != sorted(ranks):
        raise InvalidArgumentError(
            f"each of the group's ranks {list(ranks)} must be in exactly one of the meshes "
            f"{' and '.join(map(str, distinct))}; pass the group of all their ranks, or use one "
            "mesh of all ranks and slices of it"
        )
    indices = [ranks.index(rank) for rank in together]
    shape, names = distinct[0].shape, distinct[0].names
    if len(distinct) == 1:
        return Mesh(shape, indices, names), 0
    replica = "replica" if "replica" not in names else "replica of the job"
    return Mesh([len(distinct), *shape], indices, [replica, *names]), 1
