"""Hooks of modules that have no effect in copies of the modules."""

from __future__ import annotations

import contextlib
import types
from typing import Any


class OfOneModule:
    """A hook that has no effect in a copy of its module, deep or pickled: the copy is plain."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A method of Python's that takes any arguments and does nothing: it can be read where
        # ZeroShard is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_copied(hook: Any) -> bool:
    """Returns whether a hook is the copy of an :class:`OfOneModule`."""
    return isinstance(hook, types.MethodType) and isinstance(hook.__self__, contextlib.nullcontext)
