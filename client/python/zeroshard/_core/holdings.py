"""The gathered parameters that have memory now: which memory belongs to which, and how much it
is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic

from .gathering import Gathering, ParameterMemory
from .tensors import T


class Holdings(Generic[T]):
    """The memory of gathered parameters."""

    def __init__(self, framework: Gathering[T], memory: ParameterMemory[T]) -> None:
        self._framework = framework
        self.memory = memory
        #: The parameter that owns a piece of memory.
        self._owners: dict[Hashable, T] = {}
        #: Bytes of the units that are gathered, or being fetched, and their maximum so far.
        self.nbytes, self.peak_nbytes = 0, 0

    def count(self, nbytes: int) -> None:
        """Counts the bytes of a unit that is fetched, or, negative, freed or shown by servers."""
        self.nbytes += nbytes

    def count_peak(self) -> None:
        """Called when a unit has been fetched into memory of this process."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def put(self, parameter: T, value: T) -> None:
        """Gives a parameter its memory."""
        self._owners.pop(self._framework.memory(parameter), None)
        self.memory.put(parameter, value)
        self._owners[self._framework.memory(value)] = parameter

    def drop(self, parameter: T) -> None:
        """Frees the memory of a parameter."""
        self._owners.pop(self._framework.memory(parameter), None)
        self.memory.drop(parameter)

    def owner(self, tensor: T) -> T | None:
        """The parameter in whose memory the tensor is. None if it is in none."""
        memory = self._framework.memory(tensor)
        return None if memory is None else self._owners.get(memory)
