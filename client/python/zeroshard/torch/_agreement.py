"""Ranks that are about to do something together say what, and hear at once of anybody who wants something else.

Collectives between ranks that disagree hang or mix data up. Before the first of them the ranks compare what they were
asked for, through the store of ``torch.distributed``: no collective, and a deadline.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from .._rendezvous import distributed
from ..errors import Disagreement, Timeout

#: Seconds that a rank waits for another to come to the same point: building a large model takes time.
PATIENCE = 600.0
_PREFIX = "zeroshard/agree"


class _Ledger:
    """How often this rank has compared notes with each other one, through one store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.counts: Counter[int] = Counter()


_ledger: _Ledger | None = None


def agree(what: str, said: Mapping[str, str], ranks: Sequence[int]) -> None:
    """Returns once all ``ranks`` have called this with the same.

    ``what`` is the function that they are in, ``said`` each thing that must be equal, as text. One process, or a rank
    that is not among them, returns at once.

    Raises :class:`~zeroshard.Disagreement`, which names both ranks and what each has, or :class:`~zeroshard.Timeout`.
    """
    dist = distributed()
    if dist is None or len(ranks) < 2 or dist.get_rank() not in ranks:
        return
    ledger = _ledger_of(dist.distributed_c10d._get_default_store())
    store, me = ledger.store, dist.get_rank()
    text = json.dumps({"the call": what, **said})
    digest = hashlib.sha256(text.encode()).hexdigest()
    others = [rank for rank in ranks if rank != me]
    # The text first: who sees the digest can read it.
    store.set(f"{_PREFIX}/text/{digest}", text)
    numbers = {other: ledger.counts[other] for other in others}
    ledger.counts.update(others)
    for other, number in numbers.items():
        store.set(f"{_PREFIX}/{me}>{other}/{number}", digest)
    until = time.monotonic() + PATIENCE
    for other, number in numbers.items():
        key = f"{_PREFIX}/{other}>{me}/{number}"
        try:
            store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.001)))
        except Exception as error:
            raise Timeout(
                f"rank {me} waited {PATIENCE:g} s in {what} for rank {other}: does it call {what} too? ({error})"
            ) from None
        theirs = store.get(key).decode()
        if theirs != digest:
            told = store.get(f"{_PREFIX}/text/{theirs}").decode()
            _refuse({me: json.loads(text), other: json.loads(told)})


def _refuse(said: dict[int, dict[str, str]]) -> None:
    """Says in what two ranks differ."""
    (first, mine), (second, theirs) = sorted(said.items())
    about = next(each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each))
    raise Disagreement(
        f"rank {first} and rank {second} disagree about {about}: rank {first} has {mine.get(about)}, rank {second} has "
        f"{theirs.get(about)}; it must be the same on every rank"
    )


def _ledger_of(store: Any) -> _Ledger:
    global _ledger
    if _ledger is None or _ledger.store is not store:
        _ledger = _Ledger(store)  # the process group is a new one, and its store empty
    return _ledger
