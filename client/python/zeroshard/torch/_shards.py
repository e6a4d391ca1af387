"""Tensors on the servers as DTensors, of which each rank reads its part, and as whole tensors.

The parts are those of FSDP2: rows, as ``torch.chunk`` divides them. A parameter that the script has
distributed over a mesh itself keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from .._core.entry import Entry
from .._core.job import ModelJob
from .._core.layout import local_box
from .._native import Box
from .._rendezvous import world_group
from ._dtensor import distributed_as, layout, local
from ._gather_rows import rows_of
from ._one_version import Fetch
from ._private import spec_of, without_torch_function

#: Bytes of values that are fetched at a time: enough that waiting for answers takes no time.
_BATCH = 1 << 26


def own_box(tensor: Tensor, mesh: DeviceMesh | None) -> Box:
    """The box of this rank in a tensor, which is the whole tensor without a mesh, or if it has no
    rows."""
    shape = list(tensor.shape)
    distributed = layout(tensor)
    if distributed is not None:
        return local_box(distributed, shape, world_group().rank)
    if mesh is None or not shape:
        return Box.whole(shape)
    first, count = rows_of(shape[0], mesh.size(), mesh.get_local_rank())
    return Box([first, *[0] * (len(shape) - 1)], [count, *shape[1:]])


def as_distributed(
    part: Tensor, tensor: Tensor, mesh: DeviceMesh | None, stays: bool = False
) -> Tensor:
    """The values of :func:`own_box` as a tensor with the shape of ``tensor``: a DTensor, unless
    they are all of them. ``stays``: whether the values stay where they are, if the mesh has another
    device."""
    shape, strides = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    placements: Sequence[Placement] = [Shard(0)]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
    elif mesh is None or not shape:
        return part
    # DTensor.from_local would move them, but for the meta device.
    made = torch.empty_like(part, device="meta") if stays else part
    found = DTensor.from_local(made, mesh, placements, run_check=False, shape=shape, stride=strides)
    return distributed_as(part, spec_of(found)) if stays else found


def distribute(values: Tensor, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Whole values, which every rank has, as :func:`as_distributed`. They are copied."""
    if isinstance(values, DTensor) or values.shape != tensor.shape:
        return values
    box, values = own_box(tensor, mesh), values.detach()
    for dim, (first, count) in enumerate(zip(box.offset, box.size, strict=True)):
        values = values.narrow(dim, first, count)
    return as_distributed(values.clone(), tensor, mesh)


@torch.inference_mode(False)
@torch.no_grad()
def read_parameters(
    job: ModelJob[Tensor],
    entries: Iterable[Entry[Tensor]],
    fetch: Fetch,
    mesh: DeviceMesh | None,
    device: torch.device | None,
) -> dict[int, Tensor]:
    """Parameters of one version, by their id: whole without a mesh, otherwise this rank's parts.
    ``device``: where they are; None: where each parameter is."""
    found: dict[int, Tensor] = {}
    plain: list[tuple[Entry[Tensor], Tensor, Box]] = []
    for entry in entries:
        with without_torch_function():
            like = local(entry.tensor)
            place, dtype = device or like.device, like.dtype
        box = own_box(entry.tensor, mesh)
        if entry.raw:
            whole = torch.empty(entry.local_shape, dtype=dtype, device="cpu")
            incoming = job.framework.incoming_words(whole)
            fetch([(entry.index, incoming.array)], None)
            incoming.finish()
            is_part = not isinstance(entry.tensor, DTensor)
            values = distribute(whole, entry.tensor, mesh) if is_part else whole
            part = local(values).to(place)
        else:
            part = torch.empty(box.size, dtype=dtype, device=place)
            plain.append((entry, part, box))
        stays = device is not None
        found[id(entry.tensor)] = as_distributed(part, entry.tensor, mesh, stays)
    rounded = [one for one in plain if job.job.rounds(one[0].index)]
    exact = [one for one in plain if not job.job.rounds(one[0].index)]
    _fetch(job, exact, fetch, None)
    _fetch(job, rounded, fetch, "")
    return found


def _fetch(
    job: ModelJob[Tensor],
    wanted: Sequence[tuple[Entry[Tensor], Tensor, Box]],
    fetch: Fetch,
    part: str | None,
) -> None:
    """Fetches boxes of tensors. With a ``part``, exact values as f32."""
    batch: list[tuple[Entry[Tensor], Tensor, Tensor, Box]] = []
    size = 0
    for number, (entry, target, box) in enumerate(wanted):
        if target.numel():
            dtype = target.dtype if part is None else torch.float32
            is_direct = target.device.type == "cpu" and target.dtype == dtype
            host = target if is_direct else torch.empty(target.shape, dtype=dtype, device="cpu")
            batch.append((entry, target, host, box))
            size += host.nbytes
        if size >= _BATCH or number == len(wanted) - 1 and batch:
            arrays = [
                (entry.index, job.framework.array(host, box)) for entry, _, host, box in batch
            ]
            fetch(arrays, part)
            for _, target, host, _ in batch:
                if host is not target:
                    target.copy_(host)
            batch, size = [], 0
