"""Describes a layer on this rank, for its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.layout import local_box
from .._core.sharding import Sharding
from .._native import Box
from .._program import Collective, Description, Module, Variable
from .._rendezvous import world_group
from ._dtensor import layout, native_mesh
from ._private import parameters_of


def describe(
    layer: Any, sharding: Sharding[Any] | None, ranks: Sequence[int], *, mean_of_losses: bool
) -> Description:
    """Describes a layer that is trained by ``sharding``, or not trained, on these ranks.

    With ``mean_of_losses`` each rank computes a separate loss, and calls return the mean. The
    collectives of Paddle's operators on distributed tensors are not included, because they cannot
    be observed.
    """
    named = list(layer.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    variables = tuple(_variable(name, parameter, sharding, ranks) for name, parameter in named)
    modules = tuple(
        Module(
            name,
            type(inner).__name__,
            tuple(names[id(p)] for p in parameters_of(inner).values() if p is not None),
        )
        for name, inner in layer.named_sublayers(include_self=True)
        if any(parameter is not None for parameter in parameters_of(inner).values())
    )
    together = (Collective("all_reduce", tuple(ranks), 4),) if mean_of_losses else ()
    level = "os" if sharding is None else sharding.level
    rank = world_group().rank
    return Description(
        level,
        ranks.index(rank) if rank in ranks else 0,
        len(ranks),
        modules,
        variables,
        after_loss=together,
    )


def _variable(
    name: str, parameter: Any, sharding: Sharding[Any] | None, ranks: Sequence[int]
) -> Variable:
    shape, rank = tuple(parameter.shape), world_group().rank
    placed = layout(parameter)
    box = Box.whole(shape) if placed is None else local_box(placed, shape, rank)
    entry = None if sharding is None else sharding.job.entry(parameter)
    uploads, contributes = rank == ranks[0], True
    if entry is not None and sharding is not None:
        uploads = sharding.job.job.uploads(entry.index)
        contributes = box.numel > 0 and (
            placed is None or entry.layout is None or _contributes(parameter, entry.layout[1])
        )
    trained = entry is not None and entry.trained
    return Variable(
        name,
        shape,
        str(parameter.dtype).removeprefix("paddle."),
        parameter.element_size(),
        box,
        trained,
        resident=sharding is None or not sharding.fetches(parameter),
        contributes=contributes and trained,
        uploads=uploads,
        note="" if placed is None else ", ".join(map(str, parameter.placements)),
    )


def _contributes(parameter: Any, placements: Sequence[str]) -> bool:
    """Returns whether this rank is the first of the ranks that have the same gradient."""
    mesh = parameter.process_mesh
    coordinate = native_mesh(mesh).coordinate(world_group().rank) or []
    # With several replicas of the model, the job's mesh has an additional first dimension.
    along = zip(coordinate, placements[-mesh.ndim :], strict=True)
    return not any(index for index, placement in along if placement == "replicate")
