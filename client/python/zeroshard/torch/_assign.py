"""Refuses ``load_state_dict(assign=True)`` of modules whose parameters are trained elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InvalidArgumentError
from ._module_hooks import OfOneModule, is_copied
from ._private import add_load_hook, load_hooks


class _Refusal(OfOneModule):
    """A hook that torch calls before a module loads its state."""

    def __call__(self, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise InvalidArgumentError(
                "assign=True would replace the parameters that the optimizer and the servers "
                "train; use load_state_dict(..., assign=False), which copies the values"
            )


def refuse_assign(model: nn.Module) -> None:
    """Makes ``load_state_dict(assign=True)`` raise an error, of the model and all its modules."""
    refusal = _Refusal()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # has no such hooks
        if not any(map(is_refusal, load_hooks(module).values())):
            add_load_hook(module, refusal)


def allow_assign(model: nn.Module) -> None:
    """Undoes :func:`refuse_assign`."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        hooks = load_hooks(module)
        for number, hook in list(hooks.items()):
            if is_refusal(hook):
                del hooks[number]


def is_refusal(hook: Any) -> bool:
    """Returns whether a hook that a module calls before it loads its state, or of a copy of it, is
    that of :func:`refuse_assign`."""
    called = getattr(hook, "hook", None)
    return isinstance(called, _Refusal) or is_copied(called)
