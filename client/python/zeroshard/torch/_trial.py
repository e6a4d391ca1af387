"""Runs an optimizer of torch on scratch parameters, and finds out in a trial what state it keeps.

The original object never steps: a twin of its class does, which has the scratch parameters in its
groups, their state, and none of the hooks.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOptimizerError
from ._packed import pack, paths_on_cpu
from ._private import SET_IN_STEPS, hook_attributes

#: The steps of a trial. Some optimizers begin to keep state in their second step.
_STEPS = 2


@dataclass(frozen=True)
class Found:
    """What a trial has found of one parameter's state."""

    #: The text of the state.
    text: str
    #: Its tensors, without values.
    tensors: Mapping[str, Tensor]
    #: The paths of those that stay in host memory, wherever the parameter is.
    on_cpu: frozenset[str]
    #: The hyperparameters of its group that the steps have changed.
    changed: frozenset[str]


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class of an optimizer."""
    return type(optimizer).__qualname__


def check_runs(optimizer: torch.optim.Optimizer) -> None:
    """Raises an error if an optimizer cannot run on the ranks.

    Raises:
        UnsupportedOptimizerError: it needs the loss or the model, or it has other state than that
            of its parameters.
    """
    name = class_name(optimizer)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            f"{name} evaluates the loss several times in a step, which the servers cannot do; "
            "train it without zeroshard.shard, or with an optimizer that makes a step from one "
            "gradient"
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise UnsupportedOptimizerError(
            f"{name} changes parameters in train() and eval(), of which the servers do not learn; "
            "use an optimizer that changes them only in step()"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(
            f"differentiable of {name} is True, and autograd cannot follow a step whose result "
            "comes from the servers; set it to False"
        )
    members = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for attribute, value in _attributes(optimizer).items():
        if _refers_to(value, members):
            raise UnsupportedOptimizerError(
                f"{name} has parameters or another optimizer in its attribute {attribute!r}, "
                "which it would change instead of the copies that a step on the ranks gets; use "
                "an optimizer that has parameters only in its parameter groups"
            )


def _refers_to(value: Any, members: Collection[int]) -> bool:
    """Returns whether an attribute has parameters, whose ids are ``members``, or optimizers."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return any(_refers_to(each, members) for each in value)
    return id(value) in members or isinstance(value, torch.nn.Parameter | torch.optim.Optimizer)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer has beside those of torch."""
    kept = (*hook_attributes(), "param_groups", "state", "defaults", "step")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in kept and not name.startswith(SET_IN_STEPS)
    }


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the hyperparameters of a group."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def scratch(parameter: Tensor, value: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    """A parameter of the optimizer's twin: in f32, with the attributes that the script has given
    the parameter."""
    made = torch.nn.Parameter(value)
    own = {key: held for key, held in vars(parameter).items() if not key.startswith("_")}
    vars(made).update(own)
    made.grad = gradient
    return made


def step(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]
) -> torch.optim.Optimizer:
    """Makes a step of a twin of ``optimizer`` with these groups, and this state by parameter.
    Returns the twin."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)  # that of a scheduler
    for name in hook_attributes():
        twin.__dict__[name] = OrderedDict()
    twin.param_groups, twin.state = groups, defaultdict(dict, state)
    own = {name: value for name, value in _attributes(twin).items() if _is_data(value)}
    # What the step writes to must not be the attributes of the original.
    twin.__dict__.update(copy.deepcopy(own))
    with torch.no_grad():
        twin.step()
    for name, value in _attributes(twin).items():
        if _is_data(value) and not _equal(own.get(name), value):
            if not _is_flag(own.get(name), value):
                raise _keeps(optimizer, name)
    scratches = {id(parameter) for group in groups for parameter in group["params"]}
    for key in twin.state:
        if id(key) not in scratches:
            raise UnsupportedOptimizerError(
                f"{class_name(optimizer)} keeps state that belongs to no parameter (the key is a "
                f"{type(key).__name__}), which the servers do not keep; keep it in "
                "state[parameter] or in the parameter groups"
            )
    return twin


def _is_data(value: Any) -> bool:
    """Returns whether a value consists of tensors and plain values."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return all(_is_data(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _is_flag(before: Any, after: Any) -> bool:
    """Returns whether an attribute says that a first step was made. A trial finds out whether that
    changes the steps after it."""
    return before is False and after is True


def _flags(before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> list[str]:
    own, later = _attributes(before), _attributes(after)
    return [name for name, value in later.items() if _is_flag(own.get(name), value)]


def _keeps(optimizer: torch.optim.Optimizer, attribute: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{class_name(optimizer)} keeps state in its attribute {attribute!r}, which the servers do "
        "not keep; keep it in state[parameter] or in the parameter groups"
    )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context with random numbers that depend on ``seed`` alone, and after which those of the
    program continue."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def run_trial(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Found:
    """Makes a few steps with a small gradient.

    Raises:
        UnsupportedOptimizerError: the optimizer cannot run on the ranks.
    """
    what = f"the state of {class_name(optimizer)}"
    tensors = dict[str, Tensor]()
    for twin, made in _steps(optimizer, group, parameter):
        text, found = pack(twin.state.get(made, {}), what)
        tensors |= {path: each.to("meta") for path, each in found.items()}
    if flags := _flags(optimizer, twin):
        *_, (lasting, other) = _steps(optimizer, group, parameter, lasts=True)
        packed = pack(lasting.state.get(other, {}), what)
        if not _equal((made.detach(), text, found), (other.detach(), *packed)):
            raise _keeps(optimizer, flags[0])
    on_cpu = frozenset(paths_on_cpu(twin.state.get(made, {})))
    changed = changes(hyperparameters(group), twin.param_groups[0])
    return Found(text, tensors, on_cpu, frozenset(changed))


def _steps(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    lasts: bool = False,
) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    """The twin and its parameter after each step of a trial. If it ``lasts``, the twin keeps its
    attributes from one step to the next."""
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    values = torch.linspace(-0.5, 0.5, max(parameter.numel(), 1), device=device)
    values = values[: parameter.numel()].reshape(parameter.shape)
    made = scratch(parameter, values.clone(), values * 1e-3)
    groups: list[dict[str, Any]] = [{"params": [made], **hyperparameters(group)}]
    state: dict[Tensor, Any] = {}
    for number in range(_STEPS):
        made.grad = values * 1e-3
        try:
            with seeded(number, device):
                twin = step(optimizer, groups, state)
        except UnsupportedOptimizerError:
            raise
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{class_name(optimizer)} cannot run on the ranks: a trial step on a copy of a "
                f"parameter of shape {list(parameter.shape)} has raised {type(error).__name__}: "
                f"{error}; use an optimizer whose step() needs only parameters and gradients"
            ) from error
        state = dict(twin.state)
        if lasts:
            optimizer = twin
        yield twin, made


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a step has changed."""
    return {
        key: value
        for key, value in after.items()
        if key != "params" and (key not in before or not _equal(before[key], value))
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(_equal, one, other))
    return bool(one == other)


def in_groups(
    groups: Sequence[Mapping[str, Any]], members: Mapping[int, Tensor]
) -> dict[int, dict[str, Any]]:
    """Copies of the parameter groups that have one of some scratch parameters, by number.
    ``members``: those, by the id of the parameter."""
    copies = {}
    for number, group in enumerate(groups):
        made = [members[id(each)] for each in group["params"] if id(each) in members]
        if made:
            copies[number] = {"params": made, **hyperparameters(group)}
    return copies
