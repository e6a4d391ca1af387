"""Finds out whether code interrupts the training of this process: a signal handler runs between
any two operations of Python, and while one waits for the servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_operations: set[CodeType] = set()


def operation(function: F) -> F:
    """Marks a function that changes what this worker holds of a job. It may be half-done for code
    that runs within it without being called by it."""
    _operations.add(function.__code__)
    return function


def is_within_operation() -> bool:
    """Whether this thread is within an operation."""
    return find_frame(_operations) is not None


def find_frame(codes: set[CodeType]) -> FrameType | None:
    """The innermost frame of this thread that runs one of these functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Whether a frame is one of the callers in this thread."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
