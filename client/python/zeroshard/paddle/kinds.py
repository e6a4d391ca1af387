"""Which of the servers' optimizers a ``paddle.optimizer.Optimizer`` is, and its state in their form
and Paddle's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle
from paddle.optimizer import optimizer as _base
from paddle.regularizer import L2Decay

from .._core import kinds as _kinds
from ..errors import InvalidArgumentError, UnsupportedOptimizerError

#: The optimizers whose arithmetic the servers have, and the servers' name of each. A class comes
#: before its base classes.
KINDS: dict[type, str] = {
    paddle.optimizer.SGD: "sgd",
    paddle.optimizer.Momentum: "sgd",
    paddle.optimizer.AdamW: "adamw",
    paddle.optimizer.Adam: "adam",
    paddle.optimizer.Adagrad: "adagrad",
    paddle.optimizer.Adadelta: "adadelta",
    paddle.optimizer.Lamb: "lamb",
}

#: Why one that has a likely name is none of them.
_OTHERWISE = {
    paddle.optimizer.RMSProp: "adds epsilon under the root, the servers' rmsprop (torch's) outside it",
}

#: The servers' state tensors by Paddle's names.
_ACCUMULATORS: dict[str, dict[str, str]] = {
    "sgd": {"momentum_buffer": "velocity"},
    "adam": {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max"},
    "adamw": {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max"},
    "adagrad": {"sum": "moment"},
    "adadelta": {"square_avg": "_avg_squared_grad", "acc_delta": "_avg_squared_update"},
    "lamb": {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
}

#: Steps that have been applied where a power of beta has become 0: the correction is 1 from long
#: before.
_MANY = 1_000_000


def kind(optimizer: Any) -> str:
    """The servers' name of an optimizer.

    A subclass counts as its base class unless it has a step of its own.

    Raises:
        UnsupportedOptimizerError: the servers have no such optimizer. The message lists those that
            they have.
    """
    cls = type(optimizer)
    base = next((known for known in KINDS if isinstance(optimizer, known)), None)
    if base is not None and _steps_alike(cls, base):
        return KINDS[base]
    why = next(
        (
            f" ({cls.__name__} {why})"
            for other, why in _OTHERWISE.items()
            if isinstance(optimizer, other)
        ),
        "",
    )
    known = ", ".join(sorted(f"paddle.optimizer.{known.__name__}" for known in KINDS))
    raise UnsupportedOptimizerError(
        f"{cls.__module__}.{cls.__qualname__} is not an optimizer that the shard servers have{why}. There are {known}"
    )


def groups(optimizer: Any, kind: str) -> list[tuple[list[Any], dict[str, float]]]:
    """Parameters that have the same hyperparameters, and these, as they are now.

    The order is that of the parameters; what has been told apart once by a hyperparameter that
    changes (a scheduler's learning rate) stays together, since it is told apart by what Paddle
    multiplies it with.

    Raises:
        UnsupportedOptimizerError: a setting asks for arithmetic that the servers do not have.
    """
    lr = float(optimizer.get_lr())
    found: dict[tuple[Any, ...], tuple[list[Any], dict[str, float]]] = {}
    for number, group in enumerate(param_groups(optimizer)):
        values = _values(optimizer, kind, group)
        for parameter in group["params"]:
            factor, decay = _lr_factor(parameter), _decay(optimizer, kind, group, parameter)
            key = (number, factor, decay)
            if key not in found:
                own = _kinds.numbers(kind, {**values, "lr": lr * factor, "weight_decay": decay})
                found[key] = ([], own)
            found[key][0].append(parameter)
    return list(found.values())


def param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The optimizer's groups; one of all parameters where it was given none."""
    given = optimizer._param_groups
    return list(given) if given and isinstance(given[0], dict) else [{"params": list(given)}]


def _values(optimizer: Any, kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters that are the same for all of its parameters, by the servers'
    names."""

    def get(name: str, default: Any = None) -> Any:
        if name in group:
            return group[name]
        # A step of several groups leaves the last one's values in the attributes.
        known = optimizer._default_dict
        return known[name] if name in known else getattr(optimizer, f"_{name}", default)

    values: dict[str, Any] = {"maximize": False}
    if kind == "sgd":
        if get("rescale_grad", 1.0) != 1.0:
            raise UnsupportedOptimizerError(
                f"rescale_grad is {get('rescale_grad')}; it must be 1: scale the loss instead"
            )
        values |= {
            "momentum": get("momentum", 0.0),
            "dampening": 0.0,
            "nesterov": get("use_nesterov", False),
        }
    elif kind in ("adam", "adamw", "lamb"):
        if get("lazy_mode", False):
            raise UnsupportedOptimizerError(
                "lazy_mode is True; it must be False: the servers step whole tensors"
            )
        values |= {"beta1": get("beta1"), "beta2": get("beta2"), "eps": get("epsilon")}
        values["amsgrad"] = getattr(optimizer, "_amsgrad", False)
    elif kind == "adagrad":
        start = group.get("initial_accumulator_value", optimizer.initial_accumulator_value)
        values |= {"lr_decay": 0.0, "eps": get("epsilon"), "initial_accumulator_value": start}
    else:
        values |= {"rho": get("rho"), "eps": get("epsilon")}
    return values


def _lr_factor(parameter: Any) -> float:
    attributes = getattr(parameter, "optimize_attr", None) or {}
    return float(attributes.get("learning_rate", 1.0))


def _decay(optimizer: Any, kind: str, group: Mapping[str, Any], parameter: Any) -> float:
    """The weight decay of one parameter."""
    if kind == "adamw":
        decays = optimizer._apply_decay_param_fun
        default = optimizer._default_dict.get("weight_decay", optimizer._weight_decay)
        return (
            0.0
            if decays is not None and not decays(parameter.name)
            else float(group.get("weight_decay", default))
        )
    if kind == "lamb":
        excludes = group.get(
            "exclude_from_weight_decay_fn", optimizer._default_dict["exclude_from_weight_decay_fn"]
        )
        decay = group.get("lamb_weight_decay", optimizer._default_dict["lamb_weight_decay"])
        decay = 0.0 if excludes is not None and excludes(parameter) else float(decay)
        if decay == 0 and not optimizer.always_adapt:
            raise UnsupportedOptimizerError(
                f"parameter {parameter.name!r} has no weight decay, for which Paddle's Lamb does not adapt the step; "
                "always_adapt must be True, or the decay more than 0"
            )
        return decay
    own = getattr(parameter, "regularizer", None)
    regularizer = own if own is not None else optimizer.regularization
    if regularizer is None:
        # Momentum keeps it elsewhere.
        return float(
            group.get(
                "regularization_coeff", optimizer._default_dict.get("regularization_coeff", 0.0)
            )
        )
    if not isinstance(regularizer, L2Decay):
        raise UnsupportedOptimizerError(
            f"{type(regularizer).__name__} of parameter {parameter.name!r}: the servers have L2Decay only"
        )
    return float(regularizer._coeff)


def to_paddle(
    kind: str, name: str, values: Mapping[str, float], applied: int, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """One parameter's state by the names that Paddle gives it in a fresh process.

    Args:
        kind: the optimizer, as :func:`kind` names it.
        name: the parameter's ``name``.
        values: its hyperparameters.
        applied: how many steps it has been updated by.
        tensors: the state tensors by the servers' names.
    """
    state = {f"{name}_{_ACCUMULATORS[kind][ours]}_0": tensor for ours, tensor in tensors.items()}
    if kind in ("adam", "adamw", "lamb"):
        for beta in ("beta1", "beta2"):
            # Paddle's powers are those of the step that comes next.
            state[f"{name}_{beta}_pow_acc_0"] = paddle.to_tensor(
                [values[beta] ** (applied + 1)], dtype="float32"
            )
    return state


def from_paddle(
    kind: str, values: Mapping[str, float], shape: Sequence[int], get: Callable[[str], Any | None]
) -> tuple[int, dict[str, Any]]:
    """One parameter's state from Paddle's, the other way round than :func:`to_paddle`.

    Args:
        kind: the optimizer, as :func:`kind` names it.
        values: the parameter's hyperparameters.
        shape: its shape.
        get: an accumulator of it by Paddle's name; None where there is none.

    Returns:
        How many steps count as applied, and the state tensors: contiguous, float32, on the CPU;
            none if it is 0.
        What does not count its steps has one.

    Raises:
        InvalidArgumentError: a state tensor is missing or has another shape.
    """
    names = _kinds.state_names(kind, values)
    found = {name: get(_ACCUMULATORS[kind][name]) for name in names}
    if all(tensor is None for tensor in found.values()):
        return 0, {}
    tensors = {}
    for name, tensor in found.items():
        if tensor is None:
            raise InvalidArgumentError(
                f"optimizer state lacks {_ACCUMULATORS[kind][name]!r}, which {kind} needs"
            )
        if not isinstance(tensor, paddle.Tensor):
            tensor = paddle.to_tensor(tensor)
        tensor = tensor.detach().astype("float32").cpu().contiguous()
        if tuple(tensor.shape) != tuple(shape):
            raise InvalidArgumentError(
                f"optimizer state {_ACCUMULATORS[kind][name]!r} has shape {tuple(tensor.shape)}: the parameter's is "
                f"{tuple(shape)}"
            )
        tensors[name] = tensor
    if kind not in ("adam", "adamw", "lamb"):
        return 1, tensors
    applied = _steps(values["beta2"], get("beta2_pow_acc"))
    return (applied, tensors) if applied else (0, {})


def _steps(beta: float, power: Any | None) -> int:
    """How many steps have made a power of beta what it is."""
    if power is None:
        raise InvalidArgumentError(
            "optimizer state lacks 'beta2_pow_acc', which says how many steps it has seen"
        )
    value = float(power.reshape([-1])[0])
    if not 0 < beta < 1 or value <= 0:
        return _MANY
    return max(0, round(math.log(value) / math.log(beta)) - 1)


def _steps_alike(cls: type, base: type) -> bool:
    return all(
        inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(base, name))
        for name in ("step", "_append_optimize_op", "_apply_optimize")
    )


#: Every optimizer of Paddle, to know one.
Optimizer = _base.Optimizer
