"""How the processes of one training run find each other: through the store of ``torch.distributed``."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import NotInitialised, Timeout

#: Where the processes of a run agree on what is not theirs alone to decide.
_PREFIX = "zeroshard"


@dataclass(frozen=True)
class Place:
    """This process among those of its run."""

    rank: int
    world: int


def distributed() -> Any | None:
    """``torch.distributed``, if the program has initialised it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def place() -> Place:
    """From the process group if there is one, else from the environment that a launcher made, else alone."""
    group = distributed()
    if group is not None:
        return Place(group.get_rank(), group.get_world_size())
    try:
        return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise NotInitialised(f"RANK and WORLD_SIZE must be numbers: {error}") from None


class Rendezvous:
    """Says something on rank 0, and hears it on the others."""

    def __init__(self, place: Place, deadline: float) -> None:
        self._place = place
        self._deadline = timedelta(seconds=deadline)
        self._store = self._open()

    def _open(self) -> Any:
        group = distributed()
        if group is not None:
            return group.distributed_c10d._get_default_store()
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if address is None or port is None:
            raise NotInitialised(
                f"WORLD_SIZE is {self._place.world}, but the ranks cannot find each other: call "
                "torch.distributed.init_process_group before zeroshard.init, or start the program by torchrun"
            )
        try:
            from torch._C._distributed_c10d import TCPStore
        except ImportError:
            raise NotInitialised(
                "several ranks find each other through torch's store, and torch cannot be imported"
            ) from None
        # torchrun's agent serves the store itself; else rank 0 does, and shares it with a later init_process_group.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            return TCPStore(
                address,
                int(port),
                self._place.world,
                is_master=self._place.rank == 0 and not agent,
                timeout=self._deadline,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except Exception as error:
            raise Timeout(f"rank {self._place.rank} cannot reach the store at {address}:{port}: {error}") from None

    def tell(self, key: str, value: str) -> None:
        """On one rank."""
        self._store.set(f"{_PREFIX}/{key}", value)

    def count(self, key: str, by: int) -> int:
        """Adds to a number that all ranks share; what it is then."""
        return int(self._store.add(f"{_PREFIX}/{key}", by))

    def hear(self, key: str) -> str:
        """On the other ranks; waits until rank 0 has told."""
        return self._hear(key, "rank 0 to start the cluster: does every rank call zeroshard.init?")

    def exchange(self, key: str, value: str, ranks: Sequence[int]) -> list[str]:
        """What each of ``ranks`` says under ``key``, in their order; all of them must."""
        self.tell(f"{key}/{self._place.rank}", value)
        return [self._hear(f"{key}/{rank}", f"rank {rank} to describe the same model ({key})") for rank in ranks]

    def _hear(self, key: str, waiting_for: str) -> str:
        key = f"{_PREFIX}/{key}"
        try:
            self._store.wait([key], self._deadline)
        except Exception as error:
            seconds = self._deadline.total_seconds()
            raise Timeout(f"rank {self._place.rank} waited {seconds:g} s for {waiting_for} ({error})") from None
        return str(self._store.get(key).decode())


def reachable_host() -> str:
    """The address at which the other ranks reach what this process serves: loopback if all are on this machine."""
    world = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", world) == world:
        return "127.0.0.1"
    try:
        return socket.gethostbyname(os.environ.get("MASTER_ADDR", "localhost"))
    except OSError as error:
        raise NotInitialised(f"MASTER_ADDR cannot be resolved: {error}") from None
