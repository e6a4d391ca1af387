"""Interface of the state of an optimizer that the servers do not have: they keep it as tensors that
do not train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Generic

from .tensors import T


class RankState(ABC, Generic[T]):
    """The state of the optimizers of a model that run on the ranks."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The names of their classes."""

    @abstractmethod
    def runs(self, parameter: T) -> bool:
        """Returns whether one of them updates the parameter."""

    @abstractmethod
    def alike(self) -> dict[str, str]:
        """What all ranks must have alike, as text by name."""

    # ---- state

    @abstractmethod
    def slots(self, names: Mapping[int, str]) -> Iterable[tuple[str, T]]:
        """The tensors in which the servers keep the state: names, and tensors without values.
        ``names``: those of the parameters, by id. Called before a job is opened."""

    @abstractmethod
    def units(self) -> Iterable[tuple[Collection[T], Collection[str]]]:
        """What one rank steps together: parameters, and the slots with their state. Called after
        :meth:`slots`."""

    @abstractmethod
    def initial(self, slot: str) -> T:
        """The first values of a slot."""

    @abstractmethod
    def is_given(self, slot: str) -> bool:
        """Returns whether the program has set the state in a slot, so that the one that the servers
        have is replaced."""

    @abstractmethod
    def settle(self) -> None:
        """Called when the servers have the state that the program has set."""
