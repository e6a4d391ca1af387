"""Interface of an optimizer that the servers do not have: it runs on the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from .entry import Entry
from .job import ModelJob
from .rank_state import RankState
from .tensors import T


@dataclass(frozen=True)
class Due(Generic[T]):
    """A parameter that the open step changes."""

    entry: Entry[T]
    #: The factor of the sum of the gradients over the ranks: it makes it the mean, without loss
    #: scale and clipped.
    factor: float
    #: ``True`` if the program has written to the parameter, so that the step begins with its values
    #: on this worker.
    is_written: bool


class RankOptimizer(RankState[T]):
    """The optimizers of a model that run on the ranks."""

    @abstractmethod
    def follow(self, job: ModelJob[T]) -> None:
        """Takes over what the optimizers have changed in their parameter groups up to the current
        version of the job."""

    @abstractmethod
    def hyperparameter_hashes(self) -> Mapping[int, int]:
        """A hash of the hyperparameters of each parameter, which all ranks must have alike, by the
        id of the parameter."""

    @abstractmethod
    def step(self, job: ModelJob[T], due: Sequence[Due[T]]) -> None:
        """Updates these parameters, whose gradients all ranks have sent, and sends their new values
        and new state in the open attempt."""


def mixed(hashed: int, written: int) -> int:
    """One hash of two. Never 0."""
    return (hashed * 0x9E3779B97F4A7C15 + written) % 2**64 or 1
