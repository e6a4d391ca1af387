"""Runs functions in several processes at once, with a timeout."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.context
import os
import pathlib
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

#: What a function may take, in seconds, unless it says otherwise.
TIMEOUT = 120.0
#: How long the other ranks may go on, in seconds, once one has failed: their errors may tell more.
GRACE = 3.0
LOOPBACK = "127.0.0.1"


class RankFailed(AssertionError):
    """A rank raised an error, died or timed out. The message contains the traceback of every
    rank."""


@dataclass
class Failure:
    """The error of a rank."""

    text: str


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def run_all(
    context: multiprocessing.context.ForkServerContext,
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    timeout: float,
) -> list[Any]:
    """Calls ``function`` in one process per tuple of arguments. Returns the results in the same
    order.

    The function must be at the top level of its module, and its result must be picklable. If a
    process fails, or after ``timeout`` seconds, all processes are killed, and :class:`RankFailed`
    contains the errors of all.
    """
    with contextlib.ExitStack() as stack:
        processes: dict[Any, tuple[int, Any]] = {}
        for rank, args in enumerate(arguments):
            ours, theirs = context.Pipe()
            process = context.Process(target=_process, args=(theirs, function, args))
            process.start()
            stack.callback(_end, process)
            theirs.close()
            processes[ours] = rank, process
        return _collect(processes, timeout)


class Team(ABC):
    """Ranks that call one function after the other: most tests need no processes of their own, and
    starting two takes half a second. Each function has a session of its own.

    A function must leave nothing behind that changes the next one. After an error or a timeout all
    ranks are killed, and the next call starts new ones.
    """

    #: Starts the processes.
    context: ClassVar[multiprocessing.context.ForkServerContext]
    #: Calls a function of a test on a rank. Its arguments are the rank, additions to the
    #: environment, the function, and the function's arguments after the rank.
    turn: ClassVar[Callable[..., Any]]

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: dict[Any, tuple[int, Any]] = {}

    @abstractmethod
    def beginnings(self) -> Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Returns the first function of each rank, and its arguments."""

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Any]:
        """Calls ``function(rank, *args)`` on each rank. Returns the results by rank. For timeouts
        and errors see :func:`run_all`."""
        if not self._processes:
            for rank, beginning in enumerate(self.beginnings()):
                ours, theirs = self.context.Pipe()
                process = self.context.Process(target=_member, args=(theirs, *beginning))
                process.start()
                theirs.close()
                self._processes[ours] = rank, process
        try:
            for connection, (rank, _) in self._processes.items():
                call = self.turn, (rank, dict(env or {}), function, args)
                connection.send_bytes(pickle.dumps(call))
            return _collect(self._processes, timeout)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the ranks."""
        processes, self._processes = self._processes, {}
        for connection in processes:
            connection.close()
        for _, process in processes.values():
            _end(process)


@contextlib.contextmanager
def turn(
    function: Callable[..., Any],
    environment: Mapping[str, str],
    barrier: Callable[[], Any],
    state: Callable[[], Any] = lambda: None,
) -> Iterator[None]:
    """A context in which a rank of a team calls a function of a test. The function must change
    neither the process's environment nor what ``state`` returns."""
    os.environ.update(environment)
    before = dict(os.environ), state()
    yield
    after = dict(os.environ), state()
    assert after == before, f"{function.__name__} leaves something behind; use ranks.run"
    # Rank 0 may host the cluster that the others still use.
    barrier()
    if "zeroshard" in sys.modules:
        sys.modules["zeroshard"].shutdown()
    for name in environment:
        del os.environ[name]


def _end(process: Any) -> None:
    """Ends a process that may have ended already."""
    process.join(0.5)
    if process.is_alive():
        process.kill()
    process.join()
    _stack_file(process.pid).unlink(missing_ok=True)


def _collect(processes: dict[Any, tuple[int, Any]], timeout: float) -> list[Any]:
    """Returns the result of every rank, or raises an error with the failures of all. The ranks and
    processes are given by their connections."""
    began = time.monotonic()
    end = began + timeout
    waiting = dict(processes)
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while waiting and (left := end - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank, process = waiting.pop(connection)
            try:
                result = pickle.loads(connection.recv_bytes())
            except EOFError:
                result = Failure(f"ended without a word: {_cause(process)}")
            if isinstance(result, Failure):
                failures[rank] = result.text
                end = min(end, time.monotonic() + GRACE)
            else:
                results[rank] = result
    if failures or waiting:
        took = f"{time.monotonic() - began:.0f} s"
        for rank, process in waiting.values():
            failures[rank] = f"had not ended {took} after the start\n{_stacks(process)}"
        raise RankFailed(
            "\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
        )
    return [results[rank] for rank in range(len(processes))]


def _stack_file(pid: int) -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir(), f"zeroshard-stacks-{pid}")


def _show_stacks_when_asked() -> None:
    """Makes this process write the stacks of its threads into its file for them on ``SIGUSR1``."""
    file = _stack_file(os.getpid()).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file)


def _stacks(process: Any) -> str:
    """The stacks of the threads of a process that should have ended."""
    file = _stack_file(process.pid)
    if not file.exists():
        return "it had not begun"
    os.kill(process.pid, signal.SIGUSR1)
    process.join(1)  # a second to write them
    return file.read_text(encoding="utf-8")


def _cause(process: Any) -> str:
    """Why a process has ended that has closed its connection."""
    process.join(GRACE)
    status = process.exitcode
    return signal.Signals(-status).name if status is not None and status < 0 else f"exit {status}"


def _process(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The main function of a process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show_stacks_when_asked()
    with contextlib.suppress(OSError):
        connection.send_bytes(_outcome(function, args))
    connection.close()


def _member(connection: Connection, begin: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The main function of a rank of a team."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show_stacks_when_asked()
    begin(*args)
    with contextlib.suppress(OSError, EOFError):
        while True:
            connection.send_bytes(_outcome(*pickle.loads(connection.recv_bytes())))


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The result of a function, or its failure, as a message."""
    try:
        return pickle.dumps(function(*args))
    except BaseException:
        return pickle.dumps(Failure(traceback.format_exc()))
