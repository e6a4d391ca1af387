"""Runs a function in several ranks of torch at once.

The processes are forked from a server that has imported torch and nothing else has happened in
(multiprocessing's "forkserver"): each is as fresh as a new interpreter, without the seconds that
importing torch takes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import processes
from environment import LONG
from processes import LOOPBACK, TIMEOUT, RankFailed, free_port, run_all

__all__ = ["LOOPBACK", "TIMEOUT", "RankFailed", "Team", "free_port", "run"]

#: What a rank does not inherit, whatever the process that runs the tests has.
FORGOTTEN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ZEROSHARD_ADDRESS",
    "ZEROSHARD_TOKEN",
)

_context = multiprocessing.get_context("forkserver")
# The first optimizer that is made imports torch._dynamo.
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "pytest")
_context.set_forkserver_preload(list(_PRELOADED))


def preload(*modules: str) -> None:
    """Further modules that the server imports. Called before the first :func:`run`."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    init: str | None = "gloo",
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Calls ``function(rank, *args)`` in ``world`` new processes. Returns the results by rank.

    ``init``: with ``"gloo"`` a process group is initialised before the call; with ``"env"`` the
    processes have ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; with ``None``
    neither. ``env`` is added to the environment. For timeouts and errors see
    :func:`processes.run_all`.
    """
    environment = {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    port = 0
    if init == "gloo":
        store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        port = store.port
    elif init == "env":
        environment |= {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
        }
    arguments = []
    for rank in range(world):
        own = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if init == "env" else {})
        arguments.append((rank, world, port, own, timeout, function, args))
    return run_all(_context, _rank, arguments, timeout)


def _rank(
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    _begin(rank, world, port, environment, timeout)
    result = function(rank, *args)
    if dist.is_initialized():
        # Rank 0 may host the cluster that the others still use.
        dist.barrier()
    return result


def _begin(rank: int, world: int, port: int, environment: dict[str, str], timeout: float) -> None:
    """Begins a rank. With ``port``, that of a store, a process group is initialised."""
    for name in FORGOTTEN:
        os.environ.pop(name, None)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if port:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _turn(
    rank: int, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.manual_seed(0)
    store = dist.distributed_c10d._get_default_store
    with processes.turn(function, environment, dist.barrier, store):
        return function(rank, *args)


class Team(processes.Team):
    """Ranks with a process group."""

    context = _context
    turn = staticmethod(_turn)
    #: The ranks use it as long as they live.
    _store: Any = None

    def beginnings(self) -> Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]:
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        options = self.world, self._store.port, {"GLOO_SOCKET_IFNAME": "lo"}, LONG
        return [(_begin, (rank, *options)) for rank in range(self.world)]
