"""Which of the servers' optimizers a ``torch.optim.Optimizer`` is, and its state in their form and
torch's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core.kinds import numbers, state_names
from ..errors import InvalidArgumentError, UnsupportedOptimizerError
from .optim import LAMB, Lion

#: The optimizers there are, and the servers' name of each. A class comes before its base classes.
KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adadelta: "adadelta",
    torch.optim.RMSprop: "rmsprop",
    Lion: "lion",
    LAMB: "lamb",
}


def kind(optimizer: torch.optim.Optimizer) -> str:
    """The servers' name of an optimizer.

    A subclass counts as its base class unless it has a step of its own.

    Raises:
        UnsupportedOptimizerError: the servers have no such optimizer. The message lists those that
            they have.
    """
    base = next((known for known in KINDS if isinstance(optimizer, known)), None)
    if base is None or not _steps_alike(type(optimizer), base):
        cls = type(optimizer)
        why = "" if base is None else f" has a step of its own, unlike {_name(base)}, and so"
        known = ", ".join(_name(known) for known in sorted(KINDS, key=_name))
        raise UnsupportedOptimizerError(
            f"{_name(cls)}{why} is not an optimizer that the shard servers have. There are {known}"
        )
    if not issubclass(base, torch.optim.Adam):
        return KINDS[base]
    # What Adam does with its weight decay is said by each group; AdamW is Adam that says so.
    names = {
        "adamw" if group.get("decoupled_weight_decay", base is torch.optim.AdamW) else "adam"
        for group in optimizer.param_groups
    }
    if len(names) != 1:
        raise UnsupportedOptimizerError(
            "decoupled_weight_decay must be the same in all groups of an Adam: a job runs one optimizer"
        )
    return names.pop()


def hyperparameters(kind: str, group: Mapping[str, Any]) -> dict[str, float]:
    """What the servers need to know of a parameter group, as it is now.

    Args:
        kind: the optimizer, as :func:`kind` names it.
        group: one of the optimizer's ``param_groups``.

    Raises:
        UnsupportedOptimizerError: the group is ``differentiable``: gradients cannot flow through
            the servers.
        InvalidArgumentError: a hyperparameter is missing, or is not a number.
    """
    if group.get("differentiable"):
        raise UnsupportedOptimizerError(
            "differentiable=True: the step happens on the shard servers, where autograd cannot see it"
        )
    found = dict(group)
    if "betas" in group:
        found["beta1"], found["beta2"] = group["betas"]
    return numbers(kind, found)


def to_torch(kind: str, applied: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """One parameter's state as ``torch.optim.Optimizer.state_dict()`` has it.

    Args:
        kind: the optimizer, as :func:`kind` names it.
        applied: how many steps the parameter has been updated by.
        tensors: the state tensors by name.

    Returns:
        An empty dict for a parameter that was never updated, or whose optimizer keeps nothing.
    """
    if applied == 0:
        return {}
    if kind == "sgd":
        return dict(tensors)
    return {"step": torch.tensor(float(applied)), **tensors}


def from_torch(
    kind: str,
    hyperparameters: Mapping[str, float],
    state: Mapping[str, Any],
    shape: Sequence[int],
) -> tuple[int, dict[str, torch.Tensor]]:
    """One parameter's state from torch's ``state_dict``, the other way round than :func:`to_torch`.

    Args:
        kind: the optimizer, as :func:`kind` names it.
        hyperparameters: those of the parameter's group.
        state: what torch has for the parameter; empty if it has nothing.
        shape: the parameter's shape.

    Returns:
        How many steps count as applied, and the state tensors: contiguous, f32, on the CPU; none if
            it is 0.
        SGD does not count its steps: one stands for all.

    Raises:
        InvalidArgumentError: a state tensor is missing or has another shape.
    """
    names = state_names(kind, hyperparameters)
    if kind == "sgd":
        applied = 1 if names and state.get("momentum_buffer") is not None else 0
    else:
        applied = int(state.get("step", 0))
    if applied == 0:
        return 0, {}
    tensors = {}
    for name in names:
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"optimizer state after {applied} steps lacks {name!r}: {kind} needs {', '.join(names)}"
            )
        if tuple(tensor.shape) != tuple(shape):
            raise InvalidArgumentError(
                f"optimizer state {name!r} has shape {tuple(tensor.shape)}: the parameter's is {tuple(shape)}"
            )
        tensors[name] = tensor.detach().to("cpu", torch.float32).contiguous()
    return applied, tensors


def _steps_alike(cls: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]) -> bool:
    # torch wraps the step of each class that is instantiated, for its profiler.
    return inspect.unwrap(cls.step) is inspect.unwrap(base.step)


def _name(cls: type) -> str:
    module = cls.__module__
    for public in ("torch.optim", "zeroshard.torch"):
        if module.startswith(public + "."):
            module = public
    return f"{module}.{cls.__qualname__}"
