"""Host memory for parameters that come and go.

A block goes round: given back to the system and taken again, each of its pages would be faulted in anew, which takes
longer than filling it; left to the heap, blocks of this size would spread over it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Pool:
    """Blocks of CPU memory by size. Only what nothing else refers to is used again."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that are kept for later."""
        self._limit = limit
        self._kept_bytes = 0
        self._blocks: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A block of ``nbytes`` uninitialised bytes."""
        blocks = self._blocks.get(nbytes)
        if blocks:
            self._kept_bytes -= nbytes
            return blocks.pop()
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, block: Tensor) -> None:
        """Takes a block back, unless a tensor outside still uses it: then that tensor has it from now on."""
        nbytes = block.numel()
        if self._kept_bytes + nbytes <= self._limit and _is_ours_alone(block):
            self._kept_bytes += nbytes
            self._blocks.setdefault(nbytes, []).append(block)


def _is_ours_alone(block: Tensor) -> bool:
    # The block, and the storage object that is asked here.
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata) == 2
