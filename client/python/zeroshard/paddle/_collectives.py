"""Transfers between the ranks of a group by ``paddle.distributed``."""

from __future__ import annotations

import functools
import json
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from .._core.collectives import Collectives
from .._rendezvous import Rendezvous, reachable_host, world_group
from ._private import gloo_group, tcp_store

#: Until the first rank has answered another one, in seconds.
_SECONDS = 60

#: The number of process groups that were created for the same ranks.
_created: Counter[tuple[int, ...]] = Counter()


class PaddleCollectives(Collectives[Tensor]):
    """Collective operations among some ranks over gloo, because gradients are pushed from host
    memory. They have a process group of their own, so the program can use its groups meanwhile."""

    errors = (RuntimeError, OSError, ValueError)

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        """Every one of the ranks must call it. ``timeout``: until all of them do, in seconds."""
        super().__init__(ranks)
        world = world_group()
        rank = self.ranks.index(world.rank)
        number, store = _store(Rendezvous(world, timeout), self.ranks, is_first=rank == 0)
        process_group = gloo_group(store, rank, len(self.ranks), number)
        self._group = Group(rank, number, list(self.ranks), process_group)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        own = paddle.to_tensor(np.array(numbers, np.int64), place=paddle.CPUPlace())
        found: list[Tensor] = []
        self.run(lambda: dist.all_gather(found, own, group=self._group))
        return [tuple(of.tolist()) for of in found]

    def all_gather(self, part: Tensor, parts: Tensor) -> None:
        found: list[Tensor] = []
        self.run(lambda: dist.all_gather(found, part, group=self._group))
        words = part.shape[0]
        for number, of in enumerate(found):
            parts[number * words : (number + 1) * words] = of

    def all_to_all(
        self,
        sent: Tensor,
        sent_words: Sequence[int],
        received: Tensor,
        received_words: Sequence[int],
    ) -> None:
        # Paddle's gloo has no all_to_all. Its scatter has parts of one size, that of the largest
        # part of the sender. Paddle cannot assign empty slices.
        widths = [width for (width,) in self.all_gather_numbers([max(sent_words)])]
        own = paddle.zeros([len(self.ranks), max(sent_words)], dtype="float32")
        begin = 0
        for rank, words in enumerate(sent_words):
            if words > 0:
                own[rank, :words] = sent[begin : begin + words]
            begin += words
        outgoing = list(own)
        begin = 0
        for source, width, words in zip(self.ranks, widths, received_words, strict=True):
            if width == 0:
                continue
            part = paddle.empty([width], dtype="float32")
            parts = outgoing if source == self.ranks[self._group.rank] else None
            self.run(functools.partial(dist.scatter, part, parts, source, self._group))
            if words > 0:
                received[begin : begin + words] = part[:words]
            begin += words


def _store(rendezvous: Rendezvous, ranks: tuple[int, ...], is_first: bool) -> tuple[int, Any]:
    """A number for a process group of some ranks, and a store for it, which the first of them
    serves.

    Gloo groups of Paddle write the addresses of their ranks under the same names, so with a store
    that they share, a group finds addresses of another one.
    """
    key = f"group/{ranks}/{_created[ranks]}"
    _created[ranks] += 1
    if is_first:
        # Groups that Paddle numbers have small numbers.
        number = 2**30 + secrets.randbelow(2**30)
        host, port = reachable_host(), _free_port()
        store = tcp_store(host, port, True, 0, _SECONDS)
        rendezvous.publish(key, json.dumps([number, host, port]))
    else:
        found = rendezvous.receive(key, f"rank {ranks[0]} to reach the same call")
        number, host, port = json.loads(found)
        store = tcp_store(host, port, False, 0, _SECONDS)
    return number, store


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
