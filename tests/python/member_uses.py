"""Uses of the members of a wrapped model that are the same in every framework. A use takes a script
with a ``model`` and a ``step`` method, and returns what the script sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Use = Callable[[Any], Any]


def text(values: Any) -> Any:
    """Types instead of modules, and names."""
    return [
        (value[0], type(value[1]).__name__) if isinstance(value, tuple) else type(value).__name__
        for value in values
    ]


def then_step(change: Callable[[Any], Any]) -> Use:
    """Changes the model, and then makes two steps."""

    def use(script: Any) -> Any:
        result = change(script.model)
        is_self = result is script.model
        return is_self, script.step(), script.step(), list(script.model.state_dict())

    return use


def hooked(register: str) -> Use:
    """Registers a hook, makes a step, removes the hook, and makes another one."""

    def use(script: Any) -> Any:
        calls: list[int] = []
        handle = getattr(script.model, register)(lambda *args: calls.append(len(args)))
        result = script.step()
        handle.remove()
        return calls, result, script.step(), calls

    return use


def forward_replaced(script: Any) -> Any:
    """Replaces the forward method of the model."""
    forward = script.model.forward
    script.model.forward = lambda x: forward(x) * 2
    return script.step()
