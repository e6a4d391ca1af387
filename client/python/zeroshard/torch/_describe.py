"""Describes a module on this rank, for its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._core.sharding import Sharding
from .._native import Box
from .._program import Collective, Description, Module, Variable
from .._rendezvous import world_group
from ._mesh import layout_on, mesh_ranks
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
    """Describes a module that is trained by ``sharding``, or not trained, on these ranks.

    ``mesh`` is the mesh of its parameters, if they are distributed. With ``mean_of_losses`` each
    rank computes a separate loss, and calls return the mean. ``seen`` has the collectives recorded
    in a call; None before the first call, when only those of the parallel styles are known.
    """
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
    rank = world_group().rank
    number = ranks.index(rank) if rank in ranks else 0
    moments = ("before_loss", "after_loss", "after_backward")
    overall = {moment: tuple((seen or {}).get((moment, ""), ())) for moment in moments}
    overall["after_loss"] = together + overall["after_loss"]
    return Description(level, number, len(ranks), tuple(modules), variables, **overall)


def working_modules(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules that appear in programs: those that have parameters (not only their children), or
    collectives."""
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
    shape, rank, note = tuple(parameter.shape), world_group().rank, ""
    box = Box.whole(shape)
    if isinstance(parameter, DTensor):
        found = layout_on(parameter.device_mesh, parameter.placements).local_box(shape, rank)
        box = Box([0] * len(shape), [0] * len(shape)) if found is None else found
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
        # With several replicas of the model, the job's mesh has an additional first dimension.
        along = list(zip(coordinate, entry.layout[1][-mesh.ndim :], strict=True))
        contributes = box.numel > 0 and not any(
            index for index, placement in along if placement == "replicate"
        )
        sharded = [placement.startswith("shard") for _, placement in along]
        uploads = box.numel > 0 and ranks[0] in mesh_ranks(mesh)
        uploads = uploads and not any(
            index for (index, _), is_sharded in zip(along, sharded, strict=True) if not is_sharded
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
    """The collectives before and after the forward and backward of a module."""
    if seen is not None:
        return {moment: tuple(seen.get((moment, name), ())) for moment in _MOMENTS}
    announced: dict[str, list[Collective]] = getattr(module, "_zeroshard_collectives", {})
    return {moment: tuple(collectives) for moment, collectives in announced.items()}


_MOMENTS = ("before_forward", "after_forward", "before_backward", "after_backward")
