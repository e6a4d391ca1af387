"""From one mesh to another: each rank gets the pieces of its part from ranks that have them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ._mesh import local_box, mesh_ranks

#: Offset and size.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor are: on which ranks which box. Without partial sums."""

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def boxes(self) -> dict[int, Box]:
        """By rank."""
        found = {
            rank: local_box(self.shape, self.mesh, self.placements, rank)
            for rank in mesh_ranks(self.mesh)
        }
        return {rank: box for rank, box in found.items() if box is not None}


@dataclass(frozen=True)
class Piece:
    """A box that one rank sends to another, or to itself."""

    source: int
    target: int
    box: Box


def pieces(source: Layout, target: Layout) -> Iterator[Piece]:
    """The fewest, largest pieces: one for each part of the source that a rank's part of the target
    overlaps.

    Of the ranks that have it the target itself sends it if it is one of them; the others take
    turns.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in source.boxes().items():
        holders.setdefault(box, []).append(rank)
    for number, (rank, wanted) in enumerate(target.boxes().items()):
        for box, ranks in holders.items():
            common = _intersection(box, wanted)
            if common is not None:
                yield Piece(rank if rank in ranks else ranks[number % len(ranks)], rank, common)


def move(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor without partial sums, on another mesh. Every rank of both must call it."""
    source = Layout(tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    target = Layout(tuple(tensor.shape), mesh, placements)
    part = tensor.to_local()
    if dist.get_rank() not in mesh_ranks(source.mesh):
        # It has nothing, but what it receives has gradients, which it must send back.
        part = torch.empty_like(part, requires_grad=tensor.requires_grad)
    local: Tensor = _Move.apply(part, source, target)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride
    )


class _Move(torch.autograd.Function):
    """Moves parts; gradients move back, each rank's from one that has it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Layout, target: Layout) -> Tensor:
        ctx.layouts, ctx.shape = (source, target), local.shape
        return _exchanged(local, source, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        source, target = ctx.layouts
        gradient = _exchanged(gradients[0], target, source)
        return gradient.reshape(ctx.shape), None, None


def _exchanged(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """This rank's part of the target."""
    me = dist.get_rank()
    mine, wanted = source.boxes().get(me), target.boxes().get(me)
    made = local.new_empty(wanted[1] if wanted is not None else (0,) * len(source.shape))
    operations, arriving = [], []
    for piece in pieces(source, target):
        if piece.source == me and mine is not None:
            sent = _part(local, mine, piece.box)
            if piece.target == me and wanted is not None:
                _part(made, wanted, piece.box).copy_(sent)
            else:
                operations.append(dist.P2POp(dist.isend, sent.contiguous(), piece.target))
        elif piece.target == me:
            buffer = local.new_empty(piece.box[1])
            operations.append(dist.P2POp(dist.irecv, buffer, piece.source))
            arriving.append((piece.box, buffer))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    for box, buffer in arriving:
        assert wanted is not None  # something arrives only for a part
        _part(made, wanted, box).copy_(buffer)
    return made


def _part(local: Tensor, box: Box, inner: Box) -> Tensor:
    """A view of what ``inner`` is of a rank's box."""
    for dim, (first, begin, size) in enumerate(zip(box[0], *inner, strict=True)):
        local = local.narrow(dim, begin - first, size)
    return local


def _intersection(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    offset = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = zip(one[0], one[1], other[0], other[1], strict=True)
    size = tuple(
        min(a + n, b + m) - first for first, (a, n, b, m) in zip(offset, ends, strict=True)
    )
    return (offset, size) if math.prod(max(0, each) for each in size) > 0 else None
