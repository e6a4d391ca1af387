"""What programs are made from: a layer as this rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.sharding import Sharding
from .._native import Mesh
from .._program import Box, Collective, Description, Module, Variable
from .._rendezvous import place
from ._dtensor import layout


def describe(
    layer: Any, sharding: Sharding[Any] | None, ranks: Sequence[int], *, mean_of_losses: bool
) -> Description:
    """A layer that trains by ``sharding``, or does not train, on these ranks.

    ``mean_of_losses``: each rank has a loss of its own, and their mean is told. What Paddle's
    operators on distributed tensors send to each other by themselves is not in it: nobody can see
    it from here.
    """
    named = list(layer.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    variables = tuple(_variable(name, parameter, sharding, ranks) for name, parameter in named)
    modules = tuple(
        Module(
            name,
            type(inner).__name__,
            tuple(names[id(p)] for p in inner._parameters.values() if p is not None),
        )
        for name, inner in layer.named_sublayers(include_self=True)
        if any(parameter is not None for parameter in inner._parameters.values())
    )
    together = (Collective("all_reduce", tuple(ranks), 4),) if mean_of_losses else ()
    level = "os" if sharding is None else sharding.level
    rank = place().rank
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
    shape, rank = tuple(parameter.shape), place().rank
    lies = layout(parameter)
    box = Box.whole(shape)
    if lies is not None:
        offset, size = lies.area(shape, rank)
        box = Box(tuple(offset), tuple(size))
    entry = None if sharding is None else sharding.job.entry(parameter)
    uploads, contributes = rank == ranks[0], True
    if entry is not None and sharding is not None:
        uploads = sharding.job.job.uploads(entry.index)
        contributes = box.numel > 0 and (
            lies is None or entry.layout is None or _contributes(parameter, entry.layout[1])
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
        note="" if lies is None else ", ".join(map(str, parameter.placements)),
    )


def _contributes(parameter: Any, words: Sequence[str]) -> bool:
    """Whether this rank's gradient is the one that counts: the first along every dimension that has
    replicas."""
    mesh = parameter.process_mesh
    coordinate = Mesh(mesh.shape, mesh.process_ids, mesh.dim_names).coordinate(place().rank) or []
    # The job's mesh has a dimension before the model's, if there are several replicas of it.
    along = zip(coordinate, words[-mesh.ndim :], strict=True)
    return not any(index for index, word in along if word == "replicate")
