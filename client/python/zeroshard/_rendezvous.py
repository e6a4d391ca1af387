"""How the processes of one training run find each other: through the store of their framework's
launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from . import _launchers
from ._launchers import Launcher
from .errors import NotInitialisedError, TimeoutError

#: ``torch.distributed``, if the program has initialised it.
distributed = _launchers.torch_distributed

#: Where the processes of a run agree on what is not theirs alone to decide.
_PREFIX = "zeroshard"
#: Seconds between two looks at whether rank 0 has told.
_INTERVAL = 0.01


@dataclass(frozen=True)
class Place:
    """This process among those of its run."""

    rank: int
    world: int


class Store(Protocol):
    """What the processes of a run share; torch's and Paddle's are alike."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, by: int, /) -> int: ...


def _launched() -> tuple[Launcher, Place]:
    """Whose process group there is, or else whose launcher has made the environment; torch's if
    nobody's."""
    for launcher in _launchers.ALL:
        group = launcher.group()
        if group is not None:
            return launcher, Place(*group)
    for launcher in _launchers.ALL:
        rank, world = launcher.variables
        if world not in os.environ:
            continue
        try:
            place = Place(int(os.environ.get(rank, "0")), int(os.environ[world]))
        except ValueError as error:
            raise NotInitialisedError(f"{rank} and {world} must be numbers: {error}") from None
        if place.world > 1:
            return launcher, place
    return _launchers.ALL[0], Place(0, 1)


def place() -> Place:
    """From the process group if there is one, else from the environment that a launcher made, else
    alone."""
    return _launched()[1]


class Rendezvous:
    """Says something on rank 0, and hears it on the others."""

    def __init__(self, place: Place, deadline: float) -> None:
        self._place = place
        self._deadline = deadline
        #: The same object as long as the processes meet in the same place.
        self.store: Store = _launched()[0].store(place.rank, place.world, deadline)

    def tell(self, key: str, value: str) -> None:
        """On one rank."""
        self.store.set(f"{_PREFIX}/{key}", value)
        self.store.add(f"{_PREFIX}/{key}/told", 1)

    def count(self, key: str, by: int) -> int:
        """Adds to a number that all ranks share; what it is then."""
        return int(self.store.add(f"{_PREFIX}/{key}", by))

    def exchange(self, key: str, value: str, ranks: Sequence[int]) -> list[str]:
        """What each of ``ranks`` says under ``key``, in their order; all of them must."""
        self.tell(f"{key}/{self._place.rank}", value)
        own = self._place.rank
        return [
            value
            if rank == own
            else self.hear(f"{key}/{rank}", f"rank {rank} to describe the same model ({key})")
            for rank in ranks
        ]

    def hear(self, key: str, waiting_for: str) -> str:
        """On the other ranks; waits until it was told. ``waiting_for``: what to say where it is
        not."""
        timed_out = f"rank {self._place.rank} waited {self._deadline:g} s for {waiting_for}"
        until = time.monotonic() + self._deadline
        try:
            # Paddle's store has a deadline of its own for what is not there yet, torch's one for
            # each call.
            while not self.count(f"{key}/told", 0):
                if time.monotonic() > until:
                    raise TimeoutError(timed_out)
                time.sleep(_INTERVAL)
            return str(bytes(self.store.get(f"{_PREFIX}/{key}")).decode())
        except TimeoutError:
            raise
        except Exception as error:
            raise TimeoutError(f"{timed_out} ({error})") from None


def reachable_host() -> str:
    """The address at which the other ranks reach what this process serves: loopback if all are on
    this machine."""
    return _launched()[0].reachable_host()
