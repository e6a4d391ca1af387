"""Conversion between torch's optimizers and those of the shard servers: names, hyperparameters and
state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .. import _native
from .._core.optimizer_spec import State
from .._core.hyperparameters import hyperparameters as _numbers
from .._core.hyperparameters import STATE_WITH_OPTIONS, reserving
from ..errors import InvalidArgumentError, UnsupportedOptimizerError
from ._gather_rows import gathered
from .optim import NAMES

#: The dimension in which Adafactor's state tensors have size 1 in torch. On the servers, and in
#: :data:`State`, their values are repeated to the parameter's shape.
_REPEATED = {"row_var": -1, "col_var": -2}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The servers' name of an optimizer.

    A subclass of a supported optimizer is supported if it does not override ``step``.

    Raises:
        UnsupportedOptimizerError: the servers do not implement the optimizer. The message lists
            those that they implement.
    """
    base = _base(optimizer)
    if base is None or not _steps_alike(type(optimizer), base):
        cls = type(optimizer)
        why = "" if base is None else f": it overrides the step of {_name(base)}"
        known = ", ".join(_name(known) for known in sorted(NAMES, key=_name))
        raise UnsupportedOptimizerError(
            f"the shard servers do not have {_name(cls)}{why}; use one of {known}"
        )
    if not issubclass(base, torch.optim.Adam):
        return NAMES[base]
    # Adam has decoupled weight decay if its group says so; AdamW is an Adam whose groups do.
    names = {
        "adamw" if group.get("decoupled_weight_decay", base is torch.optim.AdamW) else "adam"
        for group in optimizer.param_groups
    }
    if len(names) != 1:
        raise UnsupportedOptimizerError(
            "decoupled_weight_decay differs between the parameter groups of one optimizer; it must "
            "be the same in all of them; pass an optimizer for each"
        )
    return names.pop()


def server_name(optimizer: torch.optim.Optimizer) -> str | None:
    """As :func:`optimizer_name`. None if the servers do not have an optimizer of this class."""
    base = _base(optimizer)
    if base is None or not _steps_alike(type(optimizer), base):
        return None
    return optimizer_name(optimizer)


def _base(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    return next((known for known in NAMES if isinstance(optimizer, known)), None)


def hyperparameters(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """The current hyperparameters of a parameter group, for the servers.

    Args:
        name: the optimizer, as :func:`optimizer_name` returns it.
        group: one of the optimizer's ``param_groups``.

    Raises:
        UnsupportedOptimizerError: the group is ``differentiable``.
        InvalidArgumentError: a hyperparameter is missing, or is not a number.
    """
    if group.get("differentiable"):
        raise UnsupportedOptimizerError(
            "differentiable is True; it must be False, since autograd cannot follow a step on the "
            "shard servers"
        )
    found = {"paddle": False, **group}
    if name == "sgd" and not group["momentum"]:
        found["nesterov"] = False  # torch ignores it without momentum
    if "betas" in group:
        found["beta1"], found["beta2"] = group["betas"]
    if name == "adafactor":
        found["eps1"], found["eps2"] = group["eps"]
        if found["eps1"] is None:
            found["eps1"] = _machine_epsilon(group["params"])
    return _numbers(name, found)


def keeping() -> tuple[str, dict[str, float]]:
    """An optimizer of the servers that has no state and keeps the values of a parameter, since it
    adds 0 to them, and its hyperparameters. (A value of -0 may become 0.)"""
    name = "sgd"
    return name, {**_native.Optimizer(name).hyperparameters, "lr": 0.0}


def to_torch(name: str, state: State[torch.Tensor]) -> dict[str, Any]:
    """The state of a parameter, in the format of ``torch.optim.Optimizer.state_dict()``.

    Args:
        name: the optimizer, as :func:`optimizer_name` returns it.
        state: the state on the servers.

    Returns:
        The state. Empty if the parameter was never updated, or if the optimizer has no state.
    """
    applied, scalars, tensors = state
    if applied == 0:
        return {}
    if name == "sgd":
        return dict(tensors)
    names = _native.Optimizer(name).scalar_state
    numbers = {"step": applied, **dict(zip(names, scalars, strict=True))}
    kept = {key: _shortened(key, tensor) for key, tensor in tensors.items()}
    return {**{key: torch.tensor(float(value)) for key, value in numbers.items()}, **kept}


def _shortened(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A state tensor in torch's shape."""
    dim = _REPEATED.get(name)
    is_repeated = dim is not None and tensor.shape[dim] != 1
    return tensor.narrow(dim, 0, 1).clone() if dim is not None and is_repeated else tensor


def state_box(name: str, box: _native.Box, shape: Sequence[int]) -> _native.Box:
    """The box of a state tensor to fetch, if ``box`` is that of its parameter: one value of each
    that are repeated in the parameter's shape, of all rows and columns."""
    if name not in _REPEATED:
        return box
    return _native.Box([0] * len(shape), _shape_of(name, shape))


@functools.cache
def state_names(name: str) -> frozenset[str]:
    """The keys of the state of a parameter that an optimizer of torch may have itself.

    Args:
        name: the optimizer, as :func:`optimizer_name` returns it.
    """
    plain = _native.Optimizer(name)
    every = _native.Optimizer(name, reserving(name, plain.hyperparameters, STATE_WITH_OPTIONS))
    counted = () if name == "sgd" else ("step",)
    return frozenset((*every.state, *every.scalar_state, *counted))


def state_names_of(
    name: str, group: Mapping[str, Any], shape: Sequence[int], kept: Collection[str]
) -> tuple[list[str], list[str]]:
    """The keys of the state that a parameter has after its first step: of numbers, and of tensors.

    Args:
        name: the optimizer, as :func:`optimizer_name` returns it.
        group: the parameter's group.
        shape: the parameter's shape.
        kept: state tensors that the optimizer has in addition to those that its next step uses.
    """
    optimizer = _native.Optimizer(name, reserving(name, hyperparameters(name, group), kept))
    numbers = [] if name == "sgd" else ["step", *optimizer.scalar_state]
    return numbers, optimizer.state_of(shape)


def from_torch(
    name: str,
    hyperparameters: Mapping[str, float],
    state: Mapping[str, Any],
    shape: Sequence[int],
    uploader: int = 0,
) -> State[torch.Tensor]:
    """The state of a parameter for the servers, from torch's format: the inverse of
    :func:`to_torch`.

    Args:
        name: the optimizer, as :func:`optimizer_name` returns it.
        hyperparameters: the hyperparameters of the parameter's group.
        state: torch's state of the parameter. Empty if it has none.
        shape: the parameter's shape.
        uploader: the rank of the world that needs the elements of DTensors.

    Returns:
        The state, without scalars and tensors if no step was applied. The tensors are contiguous,
            f32 and on the CPU, and are converted, or gathered if they are DTensors, each time that
            one is read. For SGD, which does not count its steps, the number of steps is 1 if there
            is state.

    Raises:
        InvalidArgumentError: a part of the state is missing, or a tensor has another shape.
    """
    # torch keeps state that steps do not use with the current hyperparameters.
    had = [part for part, value in state.items() if isinstance(value, torch.Tensor)]
    optimizer = _native.Optimizer(name, reserving(name, hyperparameters, had))
    names, scalar_names = optimizer.state_of(shape), optimizer.scalar_state
    if name == "sgd":
        applied = 1 if names and state.get("momentum_buffer") is not None else 0
    else:
        applied = int(state.get("step", 0))
    if applied == 0 and not any(_is_set(state[part]) for part in had if part in names):
        return 0, (), {}
    if applied == 0 and scalar_names:
        raise InvalidArgumentError(
            f"the state of an optimizer {name!r} has 0 steps and {', '.join(names)} that are not "
            f"0, which the servers cannot continue, since it also has {', '.join(scalar_names)}; "
            "remove the state of the parameter, or set the tensors to 0 as well"
        )
    missing = [part for part in names if not isinstance(state.get(part), torch.Tensor)]
    missing += [part for part in scalar_names if state.get(part) is None]
    if missing:
        raise InvalidArgumentError(
            f"{missing[0]!r} is missing from the state of an optimizer {name!r} after {applied} "
            f"steps; it must have {', '.join([*names, *scalar_names])}"
        )
    for part in names:
        found = tuple(state[part].shape)
        if found not in (tuple(shape), _shape_of(part, shape)):
            raise InvalidArgumentError(
                f"optimizer state {part!r} has shape {found}; "
                f"it must have the shape {_shape_of(part, shape)}, since the parameter's is "
                f"{tuple(shape)}"
            )
    tensors = _Converted({part: state[part] for part in names}, shape, uploader)
    return applied, [float(state[part]) for part in scalar_names], tensors


class _Converted(Mapping[str, torch.Tensor]):
    """The state tensors of a parameter, which are converted when they are read, so that a loaded
    state is not in memory twice."""

    def __init__(
        self, given: Mapping[str, torch.Tensor], shape: Sequence[int], uploader: int
    ) -> None:
        self._given = given
        self._shape = shape
        self._uploader = uploader
        #: See :func:`zeroshard._core.uploading.is_joint`.
        self.is_joint = any(isinstance(tensor, DTensor) for tensor in given.values())

    def __getitem__(self, part: str) -> torch.Tensor:
        tensor = gathered(self._given[part], self._uploader)
        if self.is_joint and dist.get_rank() != self._uploader:
            return tensor  # only its shape counts
        tensor = repeated(part, tensor, self._shape)
        return tensor.detach().to("cpu", torch.float32).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def _is_set(tensor: torch.Tensor) -> bool:
    """Returns whether an element is not 0. All ranks must call it for a DTensor."""
    found = tensor.any()
    return bool(found.full_tensor() if isinstance(found, DTensor) else found)


def repeated(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The state tensor ``name`` of a parameter of this shape, repeated to that shape if it has one
    value for each row or column. A tensor of any other shape is returned as it is."""
    if name in _REPEATED and tuple(tensor.shape) == _shape_of(name, shape):
        return tensor.expand(tuple(shape))
    return tensor


def _shape_of(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in torch of the state tensor ``name`` of a parameter of this shape."""
    found = list(shape)
    if name in _REPEATED:
        found[_REPEATED[name]] = 1
    return tuple(found)


def _machine_epsilon(parameters: Sequence[torch.Tensor]) -> float:
    """Adafactor's default of the first epsilon. torch takes that of the first parameter with a
    gradient for the whole group."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        raise InvalidArgumentError(
            "the first eps of Adafactor is None, which stands for the machine epsilon of the "
            f"parameters, and a parameter group has {' and '.join(sorted(map(str, dtypes)))}; "
            "give eps a number, or give each dtype a parameter group"
        )
    return torch.finfo(next(iter(dtypes), torch.float32)).eps


def _steps_alike(cls: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]) -> bool:
    # torch wraps the step of each class that is instantiated, for its profiler.
    return inspect.unwrap(cls.step) is inspect.unwrap(base.step)


def _name(cls: type) -> str:
    module = cls.__module__
    for public in ("torch.optim", "zeroshard.torch"):
        if module.startswith(public + "."):
            module = public
    return f"{module}.{cls.__qualname__}"
