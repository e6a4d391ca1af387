"""Wraps Paddle's backward passes, for hooks: which pass is running, when it ends, and errors in
hooks.

Paddle calls its own final hooks when the innermost pass ends (a recomputed block has a pass of its
own), and reports an error in a hook as a ``SystemError`` after running further hooks. Therefore the
functions that run a pass are wrapped: the first error in a hook is recorded, further hooks are
skipped, and the error is raised when the pass ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ._private import is_backward_wrapped, replace_saved_tensors_hooks, wrap_backward


class _Pass:
    """A running backward pass."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None


class _Running(threading.local):
    """The running passes of this thread, outermost first."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


_running = _Running()


def running() -> _Pass | None:
    """The innermost running pass of this thread. None outside of backward."""
    return _running.passes[-1] if _running.passes else None


def after_backward(call: Callable[[], None]) -> None:
    """During backward: calls ``call`` once when the current pass ends without an error."""
    _running.passes[-1].callbacks.append(call)


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` as a hook: an error that it raises is raised when the pass ends, and further hooks
    are skipped. Wraps Paddle's functions: without hooks of this package they stay Paddle's."""
    install()

    @functools.wraps(call)
    def hook(*args: Any) -> Any:
        current = running()
        if current is None:
            return call(*args)
        if current.error is None:
            try:
                return call(*args)
            except BaseException as error:
                current.error = error
        return None

    return hook


def _watched(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        current = _Pass()
        _running.passes.append(current)
        try:
            try:
                result = run(*args, **kwargs)
            except BaseException:
                if current.error is None:
                    raise
            if current.error is not None:
                raise current.error from None
            while current.callbacks:
                current.callbacks.pop(0)()
            return result
        except BaseException as error:
            # Paddle would replace the error of an inner pass on its way through the outer one.
            if _running.passes[0] is not current:
                _running.passes[-2].error = error
            raise
        finally:
            current.callbacks.clear()  # the traceback of an error may keep the pass alive
            _running.passes.remove(current)

    return watched


class _SavedTensorsHooks:
    """A stack of hooks for saved tensors. Paddle, which uses them for recomputation, supports a
    single pair."""

    def __init__(self, register: Any, reset: Any) -> None:
        """``register`` and ``reset``: Paddle's functions for the single pair."""
        self._register, self._reset = register, reset
        self._pairs: list[tuple[Any, Any]] = []

    def register(self, pack: Any, unpack: Any) -> None:
        if self._pairs:
            self._reset()
        self._pairs.append((pack, unpack))
        self._register(pack, unpack)

    def reset(self) -> None:
        self._reset()
        if self._pairs:
            self._pairs.pop()
        if self._pairs:
            self._register(*self._pairs[-1])


def install() -> None:
    """Wraps Paddle's functions for the whole process, once."""
    if is_backward_wrapped():
        return
    wrap_backward(_watched)

    def stacked(register: Any, reset: Any) -> tuple[Any, Any]:
        hooks = _SavedTensorsHooks(register, reset)
        return hooks.register, hooks.reset

    replace_saved_tensors_hooks(stacked)
