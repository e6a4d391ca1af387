"""The optimizers that the servers have: their hyperparameters and state tensors, by the servers'
names.

The names are those of ``proto/src/optimizer.rs``, which takes them from torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgumentError

#: Hyperparameters by the servers' names. Flags travel as 0 and 1.
HYPERPARAMETERS: dict[str, tuple[str, ...]] = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"),
    "adamw": ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"),
    "adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "lion": ("lr", "beta1", "beta2", "weight_decay", "maximize"),
    "lamb": ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
}

#: The group of a job whose servers only average gradients.
AVERAGE: tuple[str, dict[str, float]] = ("average", {})


def numbers(kind: str, found: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of ``kind``, from what a parameter group has by the same names.

    Raises:
        InvalidArgumentError: one is missing, or is not a number.
    """
    return {name: _number(kind, name, found) for name in HYPERPARAMETERS[kind]}


def state_names(kind: str, hyperparameters: Mapping[str, float]) -> tuple[str, ...]:
    """The state tensors that the servers keep for a parameter; each is f32 and of the parameter's
    shape."""
    if kind == "sgd":
        return ("momentum_buffer",) if hyperparameters["momentum"] != 0 else ()
    if kind in ("adam", "adamw"):
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if hyperparameters["amsgrad"] else names
    if kind == "rmsprop":
        momentum = ("momentum_buffer",) if hyperparameters["momentum"] != 0 else ()
        centered = ("grad_avg",) if hyperparameters["centered"] else ()
        return ("square_avg", *momentum, *centered)
    return {
        "adagrad": ("sum",),
        "adadelta": ("square_avg", "acc_delta"),
        "lion": ("exp_avg",),
        "lamb": ("exp_avg", "exp_avg_sq"),
    }[kind]


def _number(kind: str, name: str, found: Mapping[str, Any]) -> float:
    try:
        return float(found[name])
    except KeyError:
        raise InvalidArgumentError(f"a parameter group of {kind} lacks {name!r}") from None
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{kind}: {name} is {found[name]!r}: it must be a number"
        ) from None
