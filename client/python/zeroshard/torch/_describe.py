"""What programs are made from: a module as this rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._core.sharding import Sharding
from .._program import Box, Collective, Description, Module, Variable
from .._rendezvous import place
from ._mesh import local_box


def describe(
    layer: nn.Module, sharding: Sharding[Tensor] | None, ranks: Sequence[int], *, mean_of_losses: bool
) -> Description:
    """A module that trains by ``sharding``, or does not train, on these ranks.

    ``mean_of_losses``: each rank has a loss of its own, and their mean is told.
    """
    here = place()
    large: set[int] = set()
    if sharding is not None and sharding.gatherer is not None:
        large = {id(tensor) for unit in sharding.gatherer.units for tensor in unit.parameters.values()}
    trained = set() if sharding is None else {id(entry.tensor) for entry in sharding.job.trained}
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    variables = tuple(
        _variable(name, parameter, here.rank, ranks, id(parameter) in trained, id(parameter) not in large)
        for name, parameter in layer.named_parameters()
    )
    modules = []
    for name, module in layer.named_modules():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        collectives = _collectives(module, here.rank)
        if own or any(collectives.values()):
            modules.append(Module(name, type(module).__name__, tuple(own), **collectives))
    together = (Collective("all_reduce", tuple(ranks), 4),) if mean_of_losses and len(ranks) > 1 else ()
    level = "os" if sharding is None else sharding.level
    number = ranks.index(here.rank) if here.rank in ranks else 0
    return Description(level, number, len(ranks), tuple(modules), variables, together)


def _variable(
    name: str, parameter: nn.Parameter, rank: int, ranks: Sequence[int], trained: bool, resident: bool
) -> Variable:
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    box, contributes, uploads, note = Box.whole(shape), True, rank == ranks[0], ""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        found = local_box(shape, mesh, placements, rank)
        box = Box(*found) if found is not None else Box((0,) * len(shape), (0,) * len(shape))
        note = ", ".join(map(str, placements))
        coordinate = mesh.get_coordinate()
        first = coordinate is not None and not any(
            index for index, placement in zip(coordinate, placements, strict=True) if isinstance(placement, Replicate)
        )
        contributes = uploads = first and box.numel > 0
    return Variable(
        name,
        shape,
        dtype,
        parameter.element_size(),
        box,
        trained,
        resident,
        contributes=contributes and trained,
        uploads=uploads,
        note=note,
    )


def _collectives(module: nn.Module, rank: int) -> dict[str, Any]:
    """What the ranks do together around a module: as its style says, else as its weight's placement makes them."""
    noted: dict[str, list[Collective]] = dict(getattr(module, "_zeroshard_collectives", {}))
    weight = getattr(module, "weight", None)
    if not noted and isinstance(weight, DTensor) and isinstance(module, (nn.Linear, nn.Embedding)):
        for dim, placement in enumerate(weight.placements):
            group = weight.device_mesh.get_group(dim)
            along = Collective("all_reduce", tuple(get_process_group_ranks(group)))
            # A Linear's weight is outputs by inputs, an Embedding's rows by features.
            sums = Shard(1) if isinstance(module, nn.Linear) else Shard(0)
            if placement == sums:
                noted.setdefault("after_forward", []).append(along)
            elif isinstance(placement, Shard) and isinstance(module, nn.Linear):
                noted.setdefault("after_backward", []).append(along)
    return {moment: tuple(collectives) for moment, collectives in noted.items()}
