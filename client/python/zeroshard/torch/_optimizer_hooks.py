"""The hooks of an optimizer: those that the script registers on the sharded optimizer, and those
that it had registered on the original one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def share_hooks(original: torch.optim.Optimizer, sharded: torch.optim.Optimizer) -> None:
    """Gives both optimizers the same hooks, also those that are registered later."""
    for name in _HOOKS:
        setattr(sharded, name, getattr(original, name))


def calling_state_hooks(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    """``state_dict`` of an optimizer, which calls its hooks as torch does."""

    @functools.wraps(state_dict)
    def with_hooks(optimizer: Any) -> dict[str, Any]:
        for before in optimizer._optimizer_state_dict_pre_hooks.values():
            before(optimizer)
        state = state_dict(optimizer)
        for after in optimizer._optimizer_state_dict_post_hooks.values():
            replaced = after(optimizer, state)
            state = state if replaced is None else replaced
        return state

    return with_hooks


def calling_load_hooks(load: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """``load_state_dict`` of an optimizer, which calls its hooks as torch does."""

    @functools.wraps(load)
    def with_hooks(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state = state_dict.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(optimizer, state)
            state = state if replaced is None else replaced
        load(optimizer, state)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    return with_hooks
