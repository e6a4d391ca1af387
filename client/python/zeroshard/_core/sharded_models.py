"""The sharded models of this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from .._log import is_shown
from ..errors import InvalidArgumentError
from .sharding import Sharding
from .summary import log_start
from .tensors import T

#: To find the model of a parameter.
_all: weakref.WeakSet[Sharding[Any]] = weakref.WeakSet()


def register(sharding: Sharding[Any]) -> None:
    """Called when a model has been sharded. Its job ends when it is deleted."""
    _all.add(sharding)
    sharding.job.retire_after(sharding)
    if sharding.job.group.rank == 0 and is_shown():
        log_start(sharding.job, sharding.level, sharding.gatherer)
    sharding.job.connection.activity.begin()


def forget(sharding: Sharding[Any]) -> None:
    """Ends the training of a model that is not sharded any more."""
    _all.discard(sharding)
    sharding.backward.unwatch()
    sharding.job.retire()


def all_open() -> list[Sharding[Any]]:
    """The sharded models of this process whose session is open."""
    return [sharding for sharding in _all if not sharding.job.connection.closed]


def is_sharded(parameters: Iterable[Any]) -> bool:
    """Returns whether a model with one of these parameters is sharded already."""
    given = list(parameters)
    if find(given) is None:
        return False
    gc.collect()  # the program may have deleted it
    return find(given) is not None


def find(parameters: Iterable[Any]) -> Sharding[Any] | None:
    """A sharded model with one of these parameters. None if there is none."""
    given = {id(parameter) for parameter in parameters}
    found = (
        other for other in _all if any(id(entry.tensor) in given for entry in other.job.entries)
    )
    return next(found, None)


def averaged_of(parameters: Iterable[Any], name: str) -> AbstractContextManager[None]:
    """A context in which the sharded model with these parameters has the values of an average.

    Raises:
        InvalidArgumentError: there is no such model.
    """
    sharding = find(parameters)
    if sharding is None:
        raise InvalidArgumentError(
            "the model is not sharded, and has no averages; pass a model of zeroshard.shard or "
            "group_sharded_parallel"
        )
    return sharding.averaged.showing(name)


def clip(parameters: Iterable[T], max_norm: float, norm_type: float) -> float | None:
    """Clips the open step of the sharded model that trains these parameters.

    Args:
        parameters: all parameters of its optimizer.
        max_norm: the norm to which the step is clipped.
        norm_type: 2.0.

    Returns:
        The global norm of the mean gradient over all ranks. None if the framework's own function
            must clip: there is no such model, or its optimizer does not have all that are given.

    Raises:
        InvalidArgumentError: only some of the optimizer's parameters are given, or ``norm_type`` is
            not 2.0.
    """
    given = {id(parameter): parameter for parameter in parameters}
    sharding = _trainer(given)
    if sharding is None:
        return None
    trained, framework = (
        {id(entry.tensor) for entry in sharding.job.trained},
        sharding.job.framework,
    )
    if any(key not in trained and framework.trains(given[key]) for key in given):
        return None
    if norm_type != 2.0:
        raise InvalidArgumentError(
            f"norm_type is {norm_type}; it must be 2.0 for sharded parameters"
        )
    return sharding.clip(float(max_norm))


def _trainer(given: Collection[int]) -> Sharding[Any] | None:
    """The sharded model that trains the parameters with these ids. None if there is none."""
    for sharding in _all:
        trained = list(sharding.job.trained)
        missing = [entry for entry in trained if id(entry.tensor) not in given]
        if len(missing) == len(trained):
            continue
        for entry in missing:
            if sharding.job.framework.is_stepped(entry.tensor):
                raise InvalidArgumentError(
                    f"parameters do not include {entry.name!r}; pass all parameters that the "
                    "sharded optimizer trains, since the global norm is over all of them"
                )
        return sharding
    return None
