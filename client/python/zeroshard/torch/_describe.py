"""What programs are made from: a module as this rank sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._core.sharding import Sharding
from .._program import Box, Collective, Description, Module, Variable
from .._rendezvous import place
from ._mesh import local_box, mesh_ranks
from ._recorder import Moment


def describe(
    layer: nn.Module,
    sharding: Sharding[Tensor] | None,
    mesh: DeviceMesh | None,
    ranks: Sequence[int],
    *,
    mean_of_losses: bool,
    seen: Mapping[Moment, list[Collective]] | None,
) -> Description:
    """A module, on a mesh or none, that trains by ``sharding``, or does not train, on these ranks.

    ``mean_of_losses``: each rank has a loss of its own, and their mean is told. ``seen``: the
    collectives that a call has shown; None before the first, when only those that styles announce
    are known.
    """
    here = place()
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    variables = tuple(
        _variable(name, parameter, sharding, mesh, ranks)
        for name, parameter in layer.named_parameters()
    )
    modules = []
    for name, module in working_modules(layer).items():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        modules.append(
            Module(name, type(module).__name__, tuple(own), **_collectives(module, name, seen))
        )
    together = (
        (Collective("all_reduce", tuple(ranks), 4),) if mean_of_losses and len(ranks) > 1 else ()
    )
    level = "os" if sharding is None else sharding.level
    number = ranks.index(here.rank) if here.rank in ranks else 0
    moments = ("before_loss", "after_loss", "after_backward")
    overall = {moment: tuple((seen or {}).get((moment, ""), ())) for moment in moments}
    overall["after_loss"] = together + overall["after_loss"]
    return Description(level, number, len(ranks), tuple(modules), variables, **overall)


def working_modules(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules that programs speak of: those with parameters of their own, or whose ranks do
    something together."""
    return {
        name: module
        for name, module in layer.named_modules()
        if "_zeroshard_collectives" in vars(module)
        or any(True for _ in module.parameters(recurse=False))
    }


def _variable(
    name: str,
    parameter: nn.Parameter,
    sharding: Sharding[Tensor] | None,
    mesh: DeviceMesh | None,
    ranks: Sequence[int],
) -> Variable:
    shape, rank, note = tuple(parameter.shape), place().rank, ""
    box = Box.whole(shape)
    if isinstance(parameter, DTensor):
        found = local_box(shape, parameter.device_mesh, parameter.placements, rank)
        box = Box(*found) if found is not None else Box((0,) * len(shape), (0,) * len(shape))
        note = ", ".join(map(str, parameter.placements))
    entry = None if sharding is None else sharding.job.entry(parameter)
    coordinate = None if mesh is None else mesh.get_coordinate()
    contributes, uploads = True, rank == ranks[0]
    if (
        entry is not None
        and entry.layout is not None
        and mesh is not None
        and coordinate is not None
    ):
        # The job's mesh has a dimension before the model's, if there are several replicas of it.
        along = list(zip(coordinate, entry.layout[1][-mesh.ndim :], strict=True))
        contributes = box.numel > 0 and not any(
            index for index, word in along if word == "replicate"
        )
        cut = [word.startswith("shard") for _, word in along]
        uploads = box.numel > 0 and ranks[0] in mesh_ranks(mesh)
        uploads = uploads and not any(
            index for (index, _), sharded in zip(along, cut, strict=True) if not sharded
        )
    trained = entry is not None and entry.trained
    return Variable(
        name,
        shape,
        str(parameter.dtype).removeprefix("torch."),
        parameter.element_size(),
        box,
        trained,
        resident=sharding is None or not sharding.fetches(parameter),
        contributes=contributes and trained,
        uploads=uploads,
        note=note,
    )


def _collectives(
    module: nn.Module, name: str, seen: Mapping[Moment, list[Collective]] | None
) -> dict[str, Any]:
    """What the ranks do together around a module."""
    if seen is not None:
        return {moment: tuple(seen.get((moment, name), ())) for moment in _MOMENTS}
    announced: dict[str, list[Collective]] = getattr(module, "_zeroshard_collectives", {})
    return {moment: tuple(collectives) for moment, collectives in announced.items()}


_MOMENTS = ("before_forward", "after_forward", "before_backward", "after_backward")
