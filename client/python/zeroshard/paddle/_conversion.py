"""Conversion between Paddle's optimizers and those of the shard servers: names, hyperparameters and
state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import Optimizer as Optimizer
from paddle.optimizer.lr import LRScheduler
from paddle.regularizer import L2Decay

from .. import _native
from .._core.optimizer_spec import State
from .._core.hyperparameters import hyperparameters
from ..errors import InvalidArgumentError, UnsupportedOptimizerError
from . import _private

#: The supported optimizers, and the servers' name of each. Subclasses precede their base classes.
NAMES: dict[type, str] = {
    paddle.optimizer.SGD: "sgd",
    paddle.optimizer.Momentum: "sgd",
    paddle.optimizer.AdamW: "adamw",
    paddle.optimizer.Adam: "adam",
    paddle.optimizer.Adamax: "adamax",
    paddle.optimizer.NAdam: "nadam",
    paddle.optimizer.RAdam: "radam",
    paddle.optimizer.Adagrad: "adagrad",
    paddle.optimizer.Adadelta: "adadelta",
    paddle.optimizer.RMSProp: "rmsprop",
    paddle.optimizer.Lamb: "lamb",
    # Paddle has no adafactor and no lion, and its ASGD is not asgd.
}

#: Paddle's names of the servers' state tensors.
_ACCUMULATORS: dict[str, dict[str, str]] = {
    "sgd": {"momentum_buffer": "velocity"},
    "adam": {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max"},
    "adamw": {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "moment2_max"},
    "adamax": {"exp_avg": "moment", "exp_inf": "inf_norm"},
    "nadam": {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
    "radam": {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
    "adagrad": {"sum": "moment"},
    "adadelta": dict(zip(("square_avg", "acc_delta"), _private.ADADELTA, strict=True)),
    "rmsprop": {
        "square_avg": "mean_square",
        "momentum_buffer": "momentum",
        "grad_avg": "mean_grad",
    },
    "lamb": {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
}

#: The optimizers that count their steps: the accumulators with powers of betas, and whether they
#: hold the powers for the next step.
_POWERS: dict[str, tuple[dict[str, str], bool]] = {
    **dict.fromkeys(
        ("adam", "adamw", "lamb"), ({"beta1": "beta1_pow_acc", "beta2": "beta2_pow_acc"}, True)
    ),
    "adamax": ({"beta1": "beta1_pow_acc"}, True),
    "nadam": ({"beta2": "beta2_pow"}, False),
    "radam": ({"beta1": "beta1_pow", "beta2": "beta2_pow"}, False),
}

#: The number of applied steps if a power of beta has underflowed to 0. Bias correction is 1 long
#: before.
_MANY = 1_000_000


def optimizer_name(optimizer: Any) -> str:
    """The servers' name of an optimizer.

    A subclass of a supported optimizer is supported if it does not override the step.

    Raises:
        UnsupportedOptimizerError: the servers do not implement the optimizer. The message lists
            those that they implement.
    """
    cls = type(optimizer)
    base = next((known for known in NAMES if isinstance(optimizer, known)), None)
    if base is not None and _private.steps_alike(cls, base):
        return NAMES[base]
    why = "" if base is None else f": it overrides the step of {base.__name__}"
    known = ", ".join(sorted(f"paddle.optimizer.{known.__name__}" for known in NAMES))
    raise UnsupportedOptimizerError(
        f"the shard servers do not support {cls.__module__}.{cls.__qualname__}{why}; "
        f"use one of {known}"
    )


def groups(optimizer: Any, name: str) -> list[tuple[list[Any], dict[str, float]]]:
    """Groups of parameters with the same hyperparameters, and their current hyperparameters.

    The order of the groups is that of their first parameters. Parameters are grouped by the factor
    of their learning rate, not by its value, so that a scheduler does not change the groups.

    Raises:
        UnsupportedOptimizerError: the servers do not implement one of the settings.
    """
    lr = _learning_rate(optimizer)
    found: dict[tuple[Any, ...], tuple[list[Any], dict[str, float]]] = {}
    for number, group in enumerate(param_groups(optimizer)):
        values = _values(optimizer, name, group)
        for parameter in group["params"]:
            factor, decay = _lr_factor(parameter), _decay(optimizer, name, group, parameter)
            key = (number, factor, decay)
            if key not in found:
                own = hyperparameters(name, {**values, "lr": lr * factor, "weight_decay": decay})
                found[key] = ([], own)
            found[key][0].append(parameter)
    return list(found.values())


def param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: a single group if it was created with a list of
    parameters."""
    given = _private.given_parameters(optimizer)
    return list(given) if _has_groups(optimizer) else [{"params": list(given)}]


def _has_groups(optimizer: Any) -> bool:
    given = _private.given_parameters(optimizer)
    return bool(given) and isinstance(given[0], dict)


def powers(optimizer: Any) -> dict[str, dict[str, float]]:
    """Returns the betas whose powers Paddle accumulates, by the name of the parameter. Empty for
    optimizers without such accumulators."""
    name = optimizer_name(optimizer)
    if name not in _POWERS:
        return {}
    found: dict[str, dict[str, float]] = {}
    for group in param_groups(optimizer):
        values = _values(optimizer, name, group)
        betas = {beta: float(values[beta]) for beta in _POWERS[name][0]}
        found |= {parameter.name: betas for parameter in group["params"]}
    return found


def _learning_rate(optimizer: Any) -> float:
    """Returns the learning rate of the next step, without the factors of parameters."""
    own = _private.learning_rate(optimizer)
    in_use = _private.learning_rate_in_use(optimizer)
    if in_use is None or isinstance(own, LRScheduler):
        return float(optimizer.get_lr())
    # After its first step, Paddle uses this tensor, which `set_lr` changes too. A number that is
    # assigned to the attribute has no effect.
    used = float(in_use)
    return own if isinstance(own, float) and float(np.float32(own)) == used else used


def use_learning_rate(optimizer: Any) -> None:
    """Stores the learning rate that a step uses, as Paddle's steps do, where ``set_lr`` finds
    it."""
    rate, in_use = _learning_rate(optimizer), _private.learning_rate_in_use(optimizer)
    if in_use is None:
        _private.use_learning_rate(optimizer, paddle.full([], rate, "float32"))
    elif isinstance(_private.learning_rate(optimizer), LRScheduler):
        in_use.fill_(rate)


def _setting(optimizer: Any, group: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Returns a setting of a parameter group from where Paddle reads it: the group, the attribute
    of the optimizer, or its defaults."""
    if name in group:
        return group[name]
    own = _private.setting(optimizer, name)
    # After a step with several groups, the attributes have the values of the last one.
    if not _has_groups(optimizer) and own is not None:
        return own
    known = _private.default_settings(optimizer)
    return known[name] if name in known else default if own is None else own


def _values(optimizer: Any, name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that are the same for all parameters of a group, by the servers'
    names."""

    def get(name: str, default: Any = None) -> Any:
        return _setting(optimizer, group, name, default)

    values: dict[str, Any] = {"maximize": False}
    if name == "sgd":
        if get("rescale_grad", 1.0) != 1.0:
            raise UnsupportedOptimizerError(
                f"rescale_grad is {get('rescale_grad')}; it must be 1; scale the loss instead"
            )
        values |= {
            "momentum": get("momentum", 0.0),
            "dampening": 0.0,
            "nesterov": get("use_nesterov", False),
        }
    elif name in _POWERS:
        if get("lazy_mode", False):
            raise UnsupportedOptimizerError(
                "lazy_mode is True; it must be False, since the servers update whole tensors"
            )
        values |= {"beta1": get("beta1"), "beta2": get("beta2"), "eps": get("epsilon")}
        values |= {
            "amsgrad": _private.uses_amsgrad(optimizer),
            "momentum_decay": get("momentum_decay"),
            "decoupled_weight_decay": False,
            "paddle": True,
        }
    elif name == "rmsprop":
        values |= {
            "alpha": get("rho"),
            "eps": get("epsilon"),
            "momentum": get("momentum"),
            "centered": get("centered"),
            "paddle": True,
        }
    elif name == "adagrad":
        start = group.get("initial_accumulator_value", optimizer.initial_accumulator_value)
        values |= {"lr_decay": 0.0, "eps": get("epsilon"), "initial_accumulator_value": start}
    else:
        values |= {"rho": get("rho"), "eps": get("epsilon")}
    return values


def _lr_factor(parameter: Any) -> float:
    attributes = getattr(parameter, "optimize_attr", None) or {}
    return float(attributes.get("learning_rate", 1.0))


def _decay(optimizer: Any, name: str, group: Mapping[str, Any], parameter: Any) -> float:
    """The weight decay of a parameter."""
    own = getattr(parameter, "regularizer", None)
    if own is not None and name in ("adamw", "lamb"):
        raise UnsupportedOptimizerError(
            f"parameter {parameter.name!r} has a regularizer, which Paddle adds to its gradient "
            f"beside the weight decay of {name}; the servers support only the latter, so set the "
            "parameter's regularizer to None"
        )
    if name in ("adamw", "lamb") and optimizer.regularization is not None:
        raise UnsupportedOptimizerError(
            "the script has set the attribute regularization of the optimizer, which Paddle adds "
            f"to gradients beside the weight decay of {name}; the servers support only the latter, "
            "so set the attribute to None"
        )
    if name == "adamw":
        if _private.learning_rate_ratio(optimizer) is not None:
            raise UnsupportedOptimizerError(
                "lr_ratio is given, which the servers do not support; set "
                "parameter.optimize_attr['learning_rate'] to the factor of each parameter"
            )
        decays = _private.decay_filter(optimizer)
        skips = decays is not None and not decays(parameter.name)
        return 0.0 if skips else float(_setting(optimizer, group, "weight_decay"))
    if name == "lamb":
        excludes = _setting(optimizer, group, "exclude_from_weight_decay_fn")
        decay = _setting(optimizer, group, "lamb_weight_decay")
        decay = 0.0 if excludes is not None and excludes(parameter) else float(decay)
        if decay == 0 and not optimizer.always_adapt:
            raise UnsupportedOptimizerError(
                f"the weight decay of parameter {parameter.name!r} is 0, for which Paddle's Lamb "
                "does not adapt the step; set always_adapt=True or a weight decay greater than 0"
            )
        return decay
    regularizer = own if own is not None else optimizer.regularization
    if regularizer is not None and not isinstance(regularizer, L2Decay):
        raise UnsupportedOptimizerError(
            f"the regularizer of parameter {parameter.name!r} is {type(regularizer).__name__}; "
            "the servers support L2Decay only"
        )
    decay = 0.0 if regularizer is None else _private.coefficient(regularizer)
    # Momentum applies its own weight decay beside that of the base class.
    if own is None and _setting(optimizer, group, "regularization_method") == "l2_decay":
        decay += float(_setting(optimizer, group, "regularization_coeff"))
    return decay


def to_paddle(
    optimizer: str, name: str, values: Mapping[str, float], held: State[Any]
) -> dict[str, Any]:
    """The state of a parameter, under the names that Paddle uses in a new process.

    Args:
        optimizer: the optimizer, as :func:`optimizer_name` returns it.
        name: the parameter's ``name``.
        values: its hyperparameters.
        held: the state on the servers.
    """
    applied, scalars, tensors = held
    state = {_ACCUMULATORS[optimizer][ours]: tensor for ours, tensor in tensors.items()}
    accumulators, is_next = _POWERS.get(optimizer, ({}, False))
    numbers = {
        accumulator: values[beta] ** (applied + is_next)
        for beta, accumulator in accumulators.items()
    }
    if optimizer == "nadam":
        numbers |= {"momentum_decay_pow": _momentum_power(applied), "mu_product": scalars[0]}
    elif optimizer == "radam":
        power = numbers["beta2_pow"]
        numbers["rho"] = applied * power / (1 - power)
    elif optimizer == "rmsprop":
        # Paddle has these accumulators even where it does not use their content.
        for unused in ("momentum", "mean_grad"):
            state.setdefault(unused, paddle.zeros_like(state["mean_square"]))
    # NAdam and RAdam have a copy of each number for every element of the parameter.
    shape = state["moment1"].shape if optimizer in ("nadam", "radam") else [1]
    state |= {key: paddle.full(shape, value, "float32") for key, value in numbers.items()}
    return {f"{name}_{accumulator}_0": value for accumulator, value in state.items()}


def from_paddle(
    optimizer: str,
    values: Mapping[str, float],
    shape: Sequence[int],
    get: Callable[[str], Any | None],
) -> State[Any]:
    """The state of a parameter for the servers, from Paddle's: the inverse of :func:`to_paddle`.

    Args:
        optimizer: the optimizer, as :func:`optimizer_name` returns it.
        values: the parameter's hyperparameters.
        shape: the parameter's shape.
        get: returns the accumulator with Paddle's name, or None.

    Returns:
        The state, without scalars and tensors if no step was applied. The tensors are contiguous,
            float32 and on the CPU. For optimizers that do not count their steps, the number of
            steps is 1 if there is state.

    Raises:
        InvalidArgumentError: a part of the state is missing, or a tensor has another shape.
    """
    names = _native.Optimizer(optimizer, values).state
    found = {name: get(_ACCUMULATORS[optimizer][name]) for name in names}
    if all(tensor is None for tensor in found.values()):
        return 0, (), {}
    tensors = {}
    for name, tensor in found.items():
        if tensor is None:
            raise InvalidArgumentError(
                f"{_ACCUMULATORS[optimizer][name]!r} is missing from the optimizer's state, "
                f"which must have it for {optimizer}"
            )
        if not isinstance(tensor, paddle.Tensor):
            tensor = paddle.to_tensor(tensor)
        tensor = tensor.detach().astype("float32").cpu().contiguous()
        if tuple(tensor.shape) != tuple(shape):
            raise InvalidArgumentError(
                f"optimizer state {_ACCUMULATORS[optimizer][name]!r} has shape "
                f"{tuple(tensor.shape)}; it must have the parameter's shape, {tuple(shape)}"
            )
        tensors[name] = tensor
    if optimizer not in _POWERS:
        return 1, (), tensors
    accumulators, is_next = _POWERS[optimizer]
    beta, accumulator = list(accumulators.items())[-1]
    applied = _exponent(values[beta], _number(accumulator, get)) - is_next
    if optimizer == "nadam":
        power = _number("momentum_decay_pow", get)
        by_momentum = _exponent(0.96, power)
        # Below the smallest normal number, a power no longer determines its exponent.
        applied = max(applied, by_momentum) if power < 1e-38 else by_momentum
    for each, name in accumulators.items():
        # A power near the smallest number is no correction any more, whatever the beta was. The
        # relative error of the others grows by 6e-8 with each step.
        power, own = _number(name, get), values[each]
        if power < 1e-37 or not 0 < own < 1:
            continue
        if abs(math.log(power) / math.log(own) - (applied + is_next)) > 0.1 + 1e-3 * applied:
            raise InvalidArgumentError(
                f"the optimizer state was saved with another {each} than {own:g}, and the servers "
                "cannot continue its bias correction; create the optimizer with the betas of the "
                "saved run"
            )
    if applied <= 0:
        return 0, (), {}
    return applied, [_number("mu_product", get)] if optimizer == "nadam" else (), tensors


def _number(accumulator: str, get: Callable[[str], Any | None]) -> float:
    """The content of an accumulator whose elements are all equal."""
    found = get(accumulator)
    if found is None:
        raise InvalidArgumentError(
            f"{accumulator!r} is missing from the optimizer's state, which must have it besides "
            "the moments"
        )
    return float(found.reshape([-1])[0])


def _exponent(beta: float, power: float) -> int:
    """The number of factors ``beta`` of which ``power`` is the product."""
    if not 0 < beta < 1 or power <= 0:
        return _MANY
    return round(math.log(power) / math.log(beta))


def _momentum_power(applied: int) -> float:
    """0.96 to the power of ``applied``, as Paddle's NAdam computes it: by one float32
    multiplication in each step."""
    power = np.float32(1)
    for _ in range(min(applied, 2_600)):  # it stays constant before
        power *= np.float32(0.96)
    return float(power)
