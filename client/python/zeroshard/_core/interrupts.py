"""Finds out whether code interrupts the training of this process: a signal handler runs between
any two operations of Python, and while one waits for the servers."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_operations: set[CodeType] = set()


@dataclass
class _Thread:
    """The operations of a thread: the number that have begun, and of those that are running."""

    begun: int = 0
    running: int = 0


_threads: dict[int, _Thread] = {}


def operation(function: F) -> F:
    """Marks a function that changes what this worker holds of a job. It may be half-done for code
    that runs within it without being called by it."""
    _operations.add(function.__code__)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        thread = _threads.setdefault(threading.get_ident(), _Thread())
        before = thread.running
        try:
            thread.running = before + 1
            thread.begun += 1
            return function(*args, **kwargs)
        finally:
            thread.running = before

    return cast(F, counted)


def encloses_operations(function: F) -> F:
    """As :func:`operation`, for a function that itself changes nothing but in operations, and that
    torch.compile may record."""
    _operations.add(function.__code__)
    return function


def between_operations() -> object:
    """A value that changes with each operation of any thread. None while one is running."""
    threads = list(_threads.items())
    if any(thread.running for _, thread in threads):
        return None
    return [(number, thread.begun) for number, thread in threads]


def is_within_operation() -> bool:
    """Returns whether this thread is within an operation."""
    return find_frame(_operations) is not None


def find_frame(codes: set[CodeType]) -> FrameType | None:
    """The innermost frame of this thread that runs one of these functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Returns whether a frame is one of the callers in this thread."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
