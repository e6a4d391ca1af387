"""The hyperparameters of the servers' optimizers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import _native
from ..errors import InvalidArgumentError


def hyperparameters(name: str, found: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of the servers' optimizer ``name``, from those of a parameter group.

    Raises:
        InvalidArgumentError: one is missing, or is not a number.
    """
    return {each: _number(name, each, found) for each in _native.Optimizer(name).hyperparameters}


#: The hyperparameter on which a state tensor depends, and a value with which there is one.
_RESERVING = {
    "momentum_buffer": ("momentum", 0.9),
    "max_exp_avg_sq": ("amsgrad", 1.0),
    "grad_avg": ("centered", 1.0),
}
#: The state tensors that an optimizer has only with some hyperparameters.
STATE_WITH_OPTIONS = frozenset(_RESERVING)


def reserving(name: str, values: Mapping[str, float], tensors: Collection[str]) -> dict[str, float]:
    """The hyperparameters ``values`` of the servers' optimizer ``name``, changed so that it has
    these state tensors in addition to those that it uses."""
    missing = set(tensors).difference(_native.Optimizer(name, values).state)
    changed = (_RESERVING[tensor] for tensor in missing if tensor in _RESERVING)
    return {**values, **{key: value for key, value in changed if key in values}}


def _number(optimizer: str, name: str, found: Mapping[str, Any]) -> float:
    try:
        return float(found[name])
    except KeyError:
        raise InvalidArgumentError(
            f"{name!r} is missing from a parameter group of {optimizer}"
        ) from None
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{name!r} of a parameter group of {optimizer} is {found[name]!r}; it must be a number"
        ) from None
