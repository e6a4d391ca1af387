"""Paddle's backward passes, as hooks must know them: which one is running, when it is over, and
what went wrong in it.

Paddle calls its own final hooks when the innermost pass ends (a recomputed block has a pass of its
own), and an error in any hook comes out as a ``SystemError``, after more hooks have run. So the
functions that run a pass are wrapped: hooks keep their error, the pass goes on without them, and at
its end the error is raised as it was.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from paddle.base import core


class _Pass:
    """One backward pass that is running."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None


class _Running(threading.local):
    """The passes of this thread, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []


_running = _Running()


def running() -> _Pass | None:
    """The innermost pass of this thread."""
    return _running.passes[-1] if _running.passes else None


def after_backward(call: Callable[[], None]) -> None:
    """In backward: calls once when the running pass is over, unless it ends in an error."""
    _running.passes[-1].callbacks.append(call)


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` for a hook: what it raises ends the pass, at its end. Without effect once something
    has been raised."""

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
            # A pass inside another: what Paddle makes of it on the way out says less.
            if _running.passes[0] is not current:
                _running.passes[-2].error = error
            raise
        finally:
            _running.passes.remove(current)

    return watched


class _SavedTensorsHooks:
    """Hooks for saved tensors, one pair inside another: Paddle, which uses them for recomputation,
    knows one at a time."""

    def __init__(self) -> None:
        self._register = core.eager.register_saved_tensors_hooks
        self._reset = core.eager.reset_saved_tensors_hooks
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
    """Wraps Paddle's functions, once."""
    if hasattr(core.eager.run_backward, "__wrapped__"):
        return
    for name in ("run_backward", "run_partial_grad"):
        setattr(core.eager, name, _watched(getattr(core.eager, name)))
    hooks = _SavedTensorsHooks()
    core.eager.register_saved_tensors_hooks, core.eager.reset_saved_tensors_hooks = (
        hooks.register,
        hooks.reset,
    )
