"""Checks of arguments that the functions of all frameworks have."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from .._rendezvous import ProcessGroup
from ..errors import InvalidArgumentError
from .sharded_models import is_sharded


def check_class(argument: str, value: object, kind: type[Any], name: str) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` unless an argument is a ``kind``, which
    errors call ``name``."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{argument} is a {type(value).__name__}; it must be a {name}")


def check_plain(
    argument: str, value: object, kind: type[Any], sharded: type[Any], name: str
) -> None:
    """As :func:`check_class`, for an argument that must not be ``sharded`` yet."""
    if not isinstance(value, kind) or isinstance(value, sharded):
        raise InvalidArgumentError(
            f"{argument} is a {type(value).__name__}; it must be a {name} that is not sharded yet"
        )


def check_not_sharded(parameters: Iterable[Any], *, is_guarded: bool = False) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` if a model with one of these parameters is
    sharded. ``is_guarded``: the framework can tell that it is."""
    if is_sharded(parameters) or is_guarded:
        raise InvalidArgumentError(
            "the model is sharded already; use the model and the optimizer that "
            "group_sharded_parallel has returned, or create the model anew"
        )


def check_steps_model(stepped: Iterable[Any], parameters: Iterable[Any]) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` if an optimizer, which has the parameters
    ``stepped``, has none of the model's ``parameters``."""
    if {id(parameter) for parameter in stepped}.isdisjoint(map(id, parameters)):
        raise InvalidArgumentError(
            "none of the optimizer's parameters belong to the model; "
            "create the optimizer from model.parameters()"
        )


def warn_of_strategy(strategy: object) -> None:
    """Warns the caller of a constructor's caller that ``strategy`` is deprecated."""
    if strategy is not None:
        warnings.warn(
            "strategy has no effect and will be removed", DeprecationWarning, stacklevel=3
        )


def warn_of_single_process(ranks: ProcessGroup) -> None:
    """Warns the caller of a constructor's caller that there are no other ranks."""
    if ranks.size == 1:
        warnings.warn("DataParallel has no effect in a single process", UserWarning, stacklevel=3)
