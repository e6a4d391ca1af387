"""Runs a function in several processes at once, one a rank: real processes, with an end to every wait.

The processes are forked from a server that has imported torch and nothing else has happened in (multiprocessing's
"forkserver"): each is as fresh as a new interpreter, without the seconds that importing torch takes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

#: What a function may take, in seconds, unless it says otherwise.
TIMEOUT = 120.0
#: How long the other ranks may go on, in seconds, once one has failed: their errors may tell more.
GRACE = 3.0
LOOPBACK = "127.0.0.1"
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
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest"])


class RankFailed(AssertionError):
    """A rank raised an error, died or did not end; the message holds every rank's traceback."""


@dataclass
class Failure:
    """What went wrong in a rank."""

    text: str


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    init: str | None = "gloo",
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Calls ``function(rank, *args)`` in ``world`` processes; what it returned, by rank.

    ``init``: with ``"gloo"`` the processes are a process group before the function begins; with ``"env"`` they have
    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; with ``None`` neither. ``env`` is added to the
    environment. The function stands at the top of its module; results come back pickled. If a rank fails, or after
    ``timeout`` seconds, all are killed, and :class:`RankFailed` says what each had to say.
    """
    with contextlib.ExitStack() as stack:
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
        connections: dict[Any, int] = {}
        for rank in range(world):
            ours, theirs = _context.Pipe()
            own = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if init == "env" else {})
            process = _context.Process(
                target=_rank, args=(theirs, rank, world, port, own, timeout, function, args)
            )
            process.start()
            stack.callback(_end, process)
            theirs.close()
            connections[ours] = rank
        return _collect(connections, timeout)


def _end(process: Any) -> None:
    """Ends a process that may have ended."""
    process.join(0.5)
    if process.is_alive():
        process.kill()
    process.join()


def _collect(connections: dict[Any, int], timeout: float) -> list[Any]:
    """Every rank's result, or an error that holds every rank's failure."""
    began = time.monotonic()
    end = began + timeout
    waiting = dict(connections)
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting and (left := end - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(connection)
            try:
                result = pickle.loads(connection.recv_bytes())
            except EOFError:
                result = Failure("ended without a word")
            if isinstance(result, Failure):
                failures[rank] = result.text
                end = min(end, time.monotonic() + GRACE)
            else:
                results[rank] = result
    if failures or waiting:
        for rank in waiting.values():
            failures.setdefault(rank, f"had not ended {time.monotonic() - began:.0f} s after the start")
        raise RankFailed("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(connections))]


def _rank(
    connection: Connection,
    rank: int,
    world: int,
    port: int,
    environment: dict[str, str],
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of one rank's process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in FORGOTTEN:
            os.environ.pop(name, None)
        os.environ.update(environment)
        torch.set_num_threads(1)
        if port:
            store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result = function(rank, *args)
        if dist.is_initialized():
            # Rank 0 may host the cluster that the others still use.
            dist.barrier()
        message = pickle.dumps(result)
    except BaseException:
        message = pickle.dumps(Failure(traceback.format_exc()))
    with contextlib.suppress(OSError):
        connection.send_bytes(message)
    connection.close()
