"""The arguments of ``to_static``, and those of the calls of a ``DistModel``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ._core.arguments import check_class, check_plain
from ._core.optimizer import SteppedByServers
from ._strategy import Strategy
from .errors import InvalidArgumentError

T = TypeVar("T")


@dataclass(frozen=True)
class Classes:
    """The classes of a framework that arguments have, and their names in errors."""

    layer: type[Any]
    layer_name: str
    #: The class of layers that are sharded already.
    sharded: type[Any]
    optimizer: type[Any]
    optimizer_name: str

    def check(self, layer: object, loss: object, optimizer: object, strategy: object) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError` if an argument of ``to_static`` is
        invalid."""
        check_plain("layer", layer, self.layer, self.sharded, self.layer_name)
        if loss is not None and not callable(loss):
            raise InvalidArgumentError(
                f"loss is {loss!r}; it must be a function of outputs and labels or None"
            )
        if optimizer is not None:
            check_class("optimizer", optimizer, self.optimizer, f"{self.optimizer_name} or None")
        if strategy is None:
            return
        check_class("strategy", strategy, Strategy, "zeroshard Strategy or None")
        assert isinstance(strategy, Strategy)
        if isinstance(optimizer, SteppedByServers) and strategy.sharding.enable:
            if strategy.level != optimizer.sharding.level:
                raise InvalidArgumentError(
                    f"the strategy has level {strategy.level!r} and the sharded optimizer "
                    f"{optimizer.sharding.level!r}; they must be the same"
                )


def flatten(values: Iterable[Any]) -> list[Any]:
    """The elements of nested lists and tuples, in order."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += flatten(value)
        else:
            flat.append(value)
    return flat


def split_tensors(
    forward: Callable[..., Any], mode: str, tensors: list[T]
) -> tuple[list[T], list[T]]:
    """Splits the tensors of a call into the inputs of the model, whose ``forward`` this is, and the
    labels for the loss.

    Raises :class:`~zeroshard.InvalidArgumentError` if their number does not match.
    """
    signature = _signature(forward)
    labels = 0 if mode == "predict" else 1
    for count in range(len(tensors) - labels, 0, -1):
        if signature is None or _takes(signature, count):
            return tensors[:count], tensors[count:]
        if mode == "predict":
            break
    wanted = "" if signature is None else f" of forward{signature}"
    also = "" if mode == "predict" else " and at least 1 label for the loss"
    raise InvalidArgumentError(
        f"mode {mode!r} takes the inputs{wanted}{also}, but got {len(tensors)} tensors"
    )


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Returns whether the function accepts this number of positional arguments."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
