"""Calls of methods that do not keep their object alive: the garbage collector does not find cycles
through the hooks and gradients of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgumentError


def weakly(owner: Any, method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """``method`` of ``owner`` as a hook, which does nothing when ``owner`` was deleted."""
    reference = weakref.ref(owner)

    def call(*more: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *args, *more)

    return call


def of_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as a function that raises :class:`~zeroshard.InvalidArgumentError` when the
    sharded model that its object belongs to was deleted."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        if alive is None:
            raise InvalidArgumentError(
                "a gradient of a model that was deleted is no longer available; keep the model "
                "that group_sharded_parallel returned"
            )
        return alive(*args)

    return call
