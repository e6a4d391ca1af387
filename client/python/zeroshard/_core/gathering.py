"""Adapter interface: parameters that have memory only while they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic

from .modules import Modules
from .tensors import T


class ParameterMemory(ABC, Generic[T]):
    """Allocates and frees the memory of parameters. A parameter keeps its identity, shape and
    dtype."""

    #: The bytes of unused memory that are kept for later.
    limit: int = 0

    @abstractmethod
    def take(self, parameter: T) -> T:
        """Allocates an uninitialised tensor with the shape, dtype and device of a dropped
        parameter."""

    @abstractmethod
    def put(self, parameter: T, value: T) -> None:
        """Makes ``value``, which :meth:`take` has returned, the parameter's memory."""

    @abstractmethod
    def drop(self, parameter: T) -> None:
        """Frees the parameter's memory.

        A view that the program still holds keeps the memory alive.
        """

    def received(self, parameter: T) -> bool:
        """Called when the values have arrived in the memory that :meth:`take` has returned. Returns
        whether servers show them there, so that they use no memory of this process."""
        return False

    def new_version(self) -> None:
        """Called after a step: servers may overwrite what they show in the memory of dropped
        parameters."""


class Gathering(Modules[T]):
    """Detects the use of parameters, and gives them memory."""

    def adopt(self, parameter: T) -> None:
        """Moves a parameter to memory in which a pull can show values without a copy, if the
        framework has such memory."""

    @abstractmethod
    def parameter_memory(self, *, shown: bool) -> ParameterMemory[T]:
        """Memory for gathered parameters. ``shown``: servers may show values in it."""

    @abstractmethod
    def guard(
        self,
        module: Any,
        parameters: dict[str, T],
        access: Callable[[], AbstractContextManager[Any]],
        expose: Callable[[], None],
        renew: Callable[[T], T],
        release: Callable[[], None],
    ) -> None:
        """Calls ``access`` before an operation reads one of these parameters of a module, and runs
        the operation in the context that it returns if backward could need the parameter. Calls
        ``expose`` before the program gets a view of its memory. ``renew`` gives a parameter other
        memory, which is returned, and leaves the earlier memory to its views.

        Calls ``release`` after a state dict has been made with copies of them.
        """

    def guard_tied(self, module: Any, parameters: dict[str, T]) -> None:
        """Called for a module that shares these parameters with a guarded module before it."""

    @abstractmethod
    def view(self, saved: T, parameter: T) -> Callable[[], T] | None:
        """For a saved tensor in the parameter's memory: a function that makes the same view of the
        memory that the parameter has when it is called.

        None if the view cannot be made again.
        """
