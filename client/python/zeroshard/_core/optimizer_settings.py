"""Adapter interface: the settings of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from .tensors import T


class Optimizer(ABC, Generic[T]):
    """The settings of an optimizer that the servers need, as they currently are."""

    @abstractmethod
    def parameters(self) -> Sequence[Sequence[T]]:
        """The parameters of each parameter group."""

    @abstractmethod
    def groups(self) -> list[tuple[str, dict[str, float]]]:
        """The servers' name of the optimizer of each parameter group, which may change with its
        settings, and its hyperparameters."""

    def schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler that belongs to the optimizer, as values of JSON. None if
        schedulers are objects of the program's own."""
        return None

    def set_schedule(self, state: dict[str, Any] | None) -> None:
        """Loads a state of :meth:`schedule`.

        Raises:
            InvalidArgumentError: the state is that of another scheduler.
        """
