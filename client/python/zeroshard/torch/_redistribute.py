"""Redistribution between meshes: each rank receives its box of the tensor from ranks that have
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._native import Box, Layout, redistribution
from ._mesh import layout_on, mesh_ranks


def redistribute(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor without partial placements, on another mesh. Every rank of both meshes must call
    it."""
    shape = tuple(tensor.shape)
    source = layout_on(tensor.device_mesh, tensor.placements)
    target = layout_on(mesh, placements)
    local = tensor.to_local()
    if dist.get_rank() not in mesh_ranks(tensor.device_mesh):
        # This rank has no part of the source, but it must send back the gradient of its target.
        local = torch.empty_like(local, requires_grad=tensor.requires_grad)
    moved: Tensor = _Redistribute.apply(local, shape, source, target)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        moved, mesh, placements, run_check=False, shape=tensor.shape, stride=stride
    )


class _Redistribute(torch.autograd.Function):
    """Moves local tensors. Backward moves each rank's gradient back, from one replica of it."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shape: tuple[int, ...], source: Layout, target: Layout
    ) -> Tensor:
        ctx.global_shape, ctx.layouts, ctx.shape = shape, (source, target), local.shape
        return _exchanged(local, shape, source, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.layouts
        gradient = _exchanged(gradients[0], ctx.global_shape, target, source)
        return gradient.reshape(ctx.shape), None, None, None


def _exchanged(local: Tensor, shape: Sequence[int], source: Layout, target: Layout) -> Tensor:
    """This rank's local tensor of the target layout."""
    rank = dist.get_rank()
    held, wanted = source.local_box(shape, rank), target.local_box(shape, rank)
    result = local.new_empty(wanted.size if wanted is not None else [0] * len(shape))
    operations, received = [], []
    for sender, receiver, box in redistribution(shape, source, target):
        if sender == rank and held is not None:
            sent = _view(local, held, box)
            if receiver == rank and wanted is not None:
                _view(result, wanted, box).copy_(sent)
            else:
                operations.append(dist.P2POp(dist.isend, sent.contiguous(), receiver))
        elif receiver == rank:
            buffer = local.new_empty(box.size)
            operations.append(dist.P2POp(dist.irecv, buffer, sender))
            received.append((box, buffer))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    for box, buffer in received:
        assert wanted is not None, "a rank receives only boxes of its own"
        _view(result, wanted, box).copy_(buffer)
    return result


def _view(local: Tensor, box: Box, inner: Box) -> Tensor:
    """The view of ``inner`` in the tensor of ``box``."""
    for dim, (start, first, size) in enumerate(
        zip(box.offset, inner.offset, inner.size, strict=True)
    ):
        local = local.narrow(dim, first - start, size)
    return local
