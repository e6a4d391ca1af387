"""The rendezvous of the processes of a training run, through the store of their launcher."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from . import _launchers
from ._launchers import Launcher
from .errors import NotInitialisedError, TimeoutError

#: ``torch.distributed``, if the program has initialised it.
distributed = _launchers.torch_distributed

#: Prefix of all keys in the store, which the user's program may use too.
_PREFIX = "zeroshard"
#: The interval in seconds at which a key is checked until it is set.
_INTERVAL = 0.01


@dataclass(frozen=True)
class ProcessGroup:
    """A group of ranks: the rank of this process in the group, and their ranks in the world."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


class Store(Protocol):
    """A key-value store that all processes of a run share. torch's and Paddle's both fit."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, by: int, /) -> int: ...


def _launched() -> tuple[Launcher, ProcessGroup]:
    """The launcher of this process, and the group of all processes.

    The launcher is that of the framework that has a process group, otherwise that of the framework
    whose environment variables are set. Without either, the group is a single process.
    """
    for launcher in _launchers.ALL:
        group = launcher.group()
        if group is not None:
            return launcher, _world(*group)
    for launcher in _launchers.ALL:
        rank, world = launcher.variables
        if world not in os.environ:
            continue
        try:
            group = int(os.environ.get(rank, "0")), int(os.environ[world])
        except ValueError as error:
            raise NotInitialisedError(f"{rank} and {world} must be numbers: {error}") from None
        if group[1] > 1:
            return launcher, _world(*group)
    return _launchers.ALL[0], _world(0, 1)


def _world(rank: int, size: int) -> ProcessGroup:
    return ProcessGroup(rank, tuple(range(size)))


def world_group() -> ProcessGroup:
    """The group of all processes of this run."""
    return _launched()[1]


#: All rendezvous that exist.
_open: weakref.WeakSet[Rendezvous] = weakref.WeakSet()


class Rendezvous:
    """Exchanges values between the ranks of a run."""

    def __init__(self, world: ProcessGroup, timeout: float) -> None:
        self._rank = world.rank
        self._timeout = timeout
        #: By the ranks of an exchange: the key of this rank in the last one.
        self._exchanged: dict[tuple[int, ...], str] = {}
        #: One object per store: a new object means a new process group.
        self.store: Store = _launched()[0].store(world.rank, world.size, timeout)
        _open.add(self)

    def publish(self, key: str, value: str) -> None:
        """Sets a value. Called by one rank."""
        self.store.set(f"{_PREFIX}/{key}", value)
        # A counter, which `set` writes without waiting for an answer. Paddle's takes 40 ms.
        self.store.set(f"{_PREFIX}/{key}/set", "1")

    def count(self, key: str, by: int) -> int:
        """Adds to a counter that all ranks share, and returns its new value."""
        return int(self.store.add(f"{_PREFIX}/{key}", by))

    def exchange(self, key: str, value: str, ranks: Sequence[int]) -> list[str]:
        """Returns the value that each of ``ranks`` has passed for ``key``, in their order. All of
        them must call it."""
        own, members = f"{key}/{self._rank}", tuple(ranks)
        self.publish(own, value)
        values = [
            value
            if rank == self._rank
            else self.receive(f"{key}/{rank}", f"rank {rank} to reach the same call ({key})")
            for rank in ranks
        ]
        # The others have ended the exchange before this one, and do not read its values any more.
        if members in self._exchanged:
            self.withdraw(self._exchanged[members])
        self._exchanged[members] = own
        return values

    def withdraw(self, key: str) -> None:
        """Frees a value of this rank that no other rank reads any more. Paddle's store cannot
        delete keys, and keeps an empty value."""
        delete = getattr(self.store, "delete_key", None)
        with contextlib.suppress(Exception):  # it only saves memory
            if delete is None:
                self.store.set(f"{_PREFIX}/{key}", "")
            else:
                delete(f"{_PREFIX}/{key}")
                delete(f"{_PREFIX}/{key}/set")

    def receive(self, key: str, waiting_for: str) -> str:
        """Waits for a value that another rank sets. ``waiting_for`` describes the value in the
        error message."""
        timed_out = f"rank {self._rank} waited {self._timeout:g} s for {waiting_for}"
        until = time.monotonic() + self._timeout
        try:
            # `get` is not used for waiting: Paddle's store has its own timeout, torch's has one per
            # call.
            while not self.count(f"{key}/set", 0):
                if time.monotonic() > until:
                    raise TimeoutError(timed_out)
                time.sleep(_INTERVAL)
            return str(bytes(self.store.get(f"{_PREFIX}/{key}")).decode())
        except TimeoutError:
            raise
        except Exception as error:
            raise TimeoutError(f"{timed_out} ({error})") from None


@atexit.register
def _release_stores() -> None:
    # The interpreter does not destroy all objects when it exits. If Paddle's store is left, the
    # thread of rank 0 that serves it continues while the libraries are finalized, and the process
    # aborts when another rank disconnects.
    for rendezvous in list(_open):
        del rendezvous.store


def reachable_host() -> str:
    """The address at which the other ranks reach this process: loopback if all ranks are on one
    machine."""
    return _launched()[0].reachable_host()
