"""Gathers a DTensor on one rank. torch's ``full_tensor`` gathers it on every rank, with a further
copy there if the backend is gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ._dtensor import local


def rows_of(length: int, parts: int, part: int) -> tuple[int, int]:
    """The first row and the number of rows of a part, as ``torch.chunk`` divides them."""
    rows = -(-length // parts)
    first = min(length, rows * part)
    return first, min(rows, length - first)


def without_memory(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose elements share one element of memory."""
    return torch.zeros((), dtype=dtype, device="cpu").expand(tuple(shape))


@torch.no_grad()
def gathered(value: Tensor, rank: int) -> Tensor:
    """The whole tensor on a rank of the world. On all others a tensor without memory, if each rank
    has rows of it. Every rank of its mesh must call it. A plain tensor is returned as it is."""
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or value.placements != (Shard(0),) or rank not in ranks:
        return value.full_tensor()
    group, own = mesh.get_group(), local(value).detach()
    # The backend may not transfer what is in host memory.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else mesh.device_type
    if dist.get_rank() != rank:
        if own.numel():
            dist.send(own.to(device).contiguous(), dst=rank, group=group)
        return without_memory(value.shape, value.dtype)
    whole = torch.empty(value.shape, dtype=value.dtype, device=device)
    for part, source in enumerate(ranks):
        first, count = rows_of(value.shape[0], len(ranks), part)
        rows = whole[first : first + count]
        if source == rank:
            rows.copy_(own)
        elif rows.numel():
            dist.recv(rows, src=source, group=group)
    return whole
