"""The hooks of an optimizer: those that the script registers on the sharded optimizer, and those
that it had registered on the original one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._private import optimizer_hooks


def calling_state_hooks(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    """``state_dict`` of an optimizer, which calls its hooks as torch does."""

    @functools.wraps(state_dict)
    def with_hooks(optimizer: Any) -> dict[str, Any]:
        for before in optimizer_hooks(optimizer, "state_dict_pre"):
            before(optimizer)
        state = state_dict(optimizer)
        for after in optimizer_hooks(optimizer, "state_dict_post"):
            replaced = after(optimizer, state)
            state = state if replaced is None else replaced
        return state

    return with_hooks


def calling_load_hooks(load: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """``load_state_dict`` of an optimizer, which calls its hooks as torch does."""

    @functools.wraps(load)
    def with_hooks(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state = state_dict.copy()
        for before in optimizer_hooks(optimizer, "load_state_dict_pre"):
            replaced = before(optimizer, state)
            state = state if replaced is None else replaced
        load(optimizer, state)
        for after in optimizer_hooks(optimizer, "load_state_dict_post"):
            after(optimizer)

    return with_hooks
