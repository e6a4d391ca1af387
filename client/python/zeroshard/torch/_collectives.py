"""Transfers between the ranks of a group by ``torch.distributed``."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._core.collectives import Collectives
from ..errors import InvalidArgumentError


class TorchCollectives(Collectives[Tensor]):
    """Collective operations among some ranks over gloo, because gradients are pushed from host
    memory. They have a process group of their own, so the program can use its groups meanwhile."""

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        """Every one of the ranks must call it. ``timeout``: of an operation, in seconds."""
        if not dist.is_initialized():
            raise InvalidArgumentError(
                "group_size needs a process group for exchanges between ranks; call "
                "torch.distributed.init_process_group before zeroshard.init"
            )
        super().__init__(ranks)
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any = dist.new_group(
            list(ranks), timeout=limit, backend="gloo", use_local_synchronization=True
        )

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in self.ranks]
        self.run(lambda: dist.all_gather(found, own, group=self._group))
        return [tuple(of.tolist()) for of in found]

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        received = list(parts.chunk(len(self.ranks)))
        self.run(lambda: dist.all_gather(received, part, group=self._group))

    def all_to_all(
        self,
        sent: Tensor,
        sent_words: Sequence[int],
        received: Tensor,
        received_words: Sequence[int],
    ) -> None:
        self.run(
            lambda: dist.all_to_all_single(
                received, sent, list(received_words), list(sent_words), group=self._group
            )
        )
