"""torch tensors as the memory that transfers read and write."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._native import Array
from .._rendezvous import distributed, place
from ..errors import InvalidArgument

#: What parameters and gradients may be made of.
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def dtype_name(what: str, tensor: Tensor) -> str:
    """``"f32"``, ``"bf16"`` or ``"f16"``."""
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        raise InvalidArgument(
            f"dtype of {what} is {tensor.dtype}; it must be float32, bfloat16 or float16"
        ) from None


def array(tensor: Tensor) -> Array:
    """The memory of a contiguous CPU tensor."""
    return Array(tensor.data_ptr(), tensor.numel(), dtype_name("a tensor", tensor), tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be read and written as it is."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()


def _host_copy(tensor: Tensor) -> Tensor:
    """A contiguous tensor in host memory like this one; pinned, where that makes copies from a device fast."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def outgoing(tensor: Tensor) -> Array:
    """The values of ``tensor``, to be sent: its own memory, or a copy if that is elsewhere or has gaps.

    A copy from a device waits for the current stream, so that what is sent is what was computed.
    """
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if not _is_plain(tensor):
        host = _host_copy(tensor)
        host.copy_(tensor)
        tensor = host
    return array(tensor)


class Incoming:
    """Where the values of ``tensor`` are received: its own memory, or a copy that :meth:`finish` moves there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._host = self._tensor if _is_plain(self._tensor) else _host_copy(self._tensor)
        self.array = array(self._host)

    def finish(self) -> None:
        """Call it when the transfer is over."""
        if self._host is not self._tensor:
            # The host copy is kept until the stream has read it: pinned memory is given back in stream order.
            self._tensor.copy_(self._host, non_blocking=True)


def words(tensor: Tensor) -> int:
    """How many 4-byte words :func:`to_words` makes."""
    return math.ceil(tensor.numel() * tensor.element_size() / 4)


def to_words(tensor: Tensor) -> Tensor:
    """Any dtype's raw memory as f32 words: what travels when nothing computes with it."""
    source = tensor.detach().cpu().contiguous().reshape(-1)
    padded = torch.zeros(words(tensor), dtype=torch.float32)
    padded.view(torch.uint8)[: source.numel() * source.element_size()] = source.view(torch.uint8)
    return padded


def from_words(received: Tensor, tensor: Tensor) -> None:
    """Writes what :func:`to_words` made into ``tensor``."""
    size = tensor.numel() * tensor.element_size()
    values = received.view(torch.uint8)[:size].view(tensor.dtype).reshape(tensor.shape)
    with torch.no_grad():
        tensor.copy_(values)


def group_place(group: Any | None) -> tuple[int, int, tuple[int, ...]]:
    """Rank, world and the global ranks of a process group; of all processes if None."""
    if group is None:
        here = place()
        return here.rank, here.world, tuple(range(here.world))
    dist = distributed()
    if dist is None:
        raise InvalidArgument("group is given, but torch.distributed is not initialised; it must be, or group None")
    ranks = tuple(dist.get_process_group_ranks(group))
    return dist.get_rank(group), len(ranks), ranks
