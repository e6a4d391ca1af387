"""Adapter interface: everything the core needs from PyTorch or Paddle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from .collectives import Collectives
from .gathering import Gathering
from .shown import ShownGradients
from .tensors import T


class Framework(Gathering[T], ShownGradients[T]):
    """What a sharded model needs. Classes that need less take one of the bases."""

    @abstractmethod
    def collectives(self, ranks: Sequence[int], timeout: float) -> Collectives[T]:
        """Collective operations of some ranks of the program, which must all call it. ``timeout``:
        of an operation, in seconds.

        Raises :class:`~zeroshard.InvalidArgumentError` if the program has no process group.
        """
