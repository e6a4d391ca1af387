"""Runs a function in several ranks of Paddle at once, on the CPU.

The processes are forked from a server that has imported Paddle and nothing else has happened in
(multiprocessing's "forkserver"): each is as fresh as a new interpreter, without the seconds that
importing Paddle takes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import processes
from processes import LOOPBACK, TIMEOUT, RankFailed, free_port, run_all

__all__ = ["RankFailed", "Team", "at_once", "run"]

#: ``True`` if a connection sends at once.
AT_ONCE = socket.IPPROTO_TCP, socket.TCP_NODELAY

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["paddle", "paddle.distributed", "pytest"])


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Calls ``function(rank, *args)`` in ``world`` new processes. Returns the results by rank.

    The processes have the environment that ``paddle.distributed.launch`` sets. With ``init``, the
    parallel environment is initialised before the call. ``env`` is added to the environment. For
    timeouts and errors see :func:`processes.run_all`.
    """
    arguments = [
        (rank, world, environment | (env or {}), init, timeout, function, args)
        for rank, environment in enumerate(environments(world))
    ]
    return run_all(_context, _rank, arguments, timeout)


def environments(world: int) -> list[dict[str, str]]:
    """The variables that ``paddle.distributed.launch`` sets, by rank."""
    endpoints = [f"{LOOPBACK}:{free_port()}" for _ in range(world)]
    shared = {
        "PADDLE_MASTER": f"{LOOPBACK}:{free_port()}",
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    return [
        {**shared, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoints[rank]}
        for rank in range(world)
    ]


def _rank(
    rank: int,
    world: int,
    environment: dict[str, str],
    init: bool,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    _begin(rank, world, environment, init, timeout)
    import paddle.distributed as dist

    result = function(rank, *args)
    if dist.is_initialized():
        # Rank 0 may host the cluster and the store that the others still use.
        dist.barrier()
    return result


def _begin(rank: int, world: int, environment: dict[str, str], init: bool, timeout: float) -> None:
    """Begins a rank."""
    for name in list(os.environ):
        if name.startswith(("PADDLE_", "ZEROSHARD_")):
            del os.environ[name]
    os.environ.update(environment)
    import paddle
    import paddle.distributed as dist

    # What was imported before the fork has drawn from the same seed in each.
    paddle.seed(1000 + rank)
    if init and world > 1:
        if rank > 0:
            _await(environment["PADDLE_MASTER"], timeout)
        dist.init_parallel_env()


def _turn(
    rank: int, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import paddle
    import paddle.distributed as dist

    paddle.seed(1000 + rank)
    # As in a new process, in which names are counted from 0.
    names = paddle.utils.unique_name.guard()
    with processes.turn(function, environment, dist.barrier), names:
        return function(rank, *args)


class Team(processes.Team):
    """Ranks with a parallel environment."""

    context = _context
    turn = staticmethod(_turn)

    def beginnings(self) -> Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]:
        return [
            (_begin, (rank, self.world, environment, True, TIMEOUT))
            for rank, environment in enumerate(environments(self.world))
        ]


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of a rank whose requests to Paddle's store are sent at once.

    The store writes a request in parts, each of which waits 40 ms until the other end acknowledges
    the part before (Nagle's algorithm). A comparison of two ranks takes three of these waits. The
    function must not create process groups with Paddle: they write the addresses of their ranks
    under the same names, and without the waits a group finds those of an earlier one.
    """

    @functools.wraps(function)
    def decorated(*args: Any) -> Any:
        delayed = [
            connection for connection in _connections() if not connection.getsockopt(*AT_ONCE)
        ]
        for connection in delayed:
            connection.setsockopt(*AT_ONCE, 1)
        try:
            return function(*args)
        finally:
            for connection in delayed:
                connection.setsockopt(*AT_ONCE, 0)
                connection.close()

    return decorated


def _connections() -> Iterator[socket.socket]:
    """Yields a copy of each TCP socket of this process."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of listdir
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{number}").st_mode):
                found = socket.socket(fileno=os.dup(int(number)))
                if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()


def _await(master: str, timeout: float) -> None:
    """Waits until rank 0 serves the store. Paddle itself polls every three seconds."""
    host, _, port = master.rpartition(":")
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.01)
