"""Adapter interface: parameters and their gradients, as the program and backward passes change
them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Protocol

from .tensors import T, Tensors


class Hook(Protocol):
    """A hook that is called with a parameter after each backward pass that has computed its
    gradient."""

    def remove(self) -> None:
        """Ends the calls."""

    @property
    def is_last(self) -> bool:
        """Returns whether the program has registered no such hook since, which would run after
        it."""


class Parameters(Tensors[T]):
    """The parameters of a model and their gradients. Buffers are parameters that do not train."""

    # ---- what the program changes

    @abstractmethod
    def changes(self, tensor: T) -> int:
        """A counter that changes when the program writes to the tensor, unless it does so through
        other views of its memory."""

    @abstractmethod
    def memory(self, tensor: T) -> Hashable | None:
        """An identifier of the memory of the tensor. None if it cannot be determined."""

    @abstractmethod
    def alias(self, tensor: T) -> object:
        """Keeps the memory of the tensor alive."""

    @abstractmethod
    def trains(self, tensor: T) -> bool:
        """Returns whether backward computes a gradient for the tensor."""

    @abstractmethod
    def is_stepped(self, parameter: T) -> bool:
        """Returns whether an optimizer of the framework would step the parameter, if it has a
        gradient."""

    @abstractmethod
    def clips(self, parameter: T) -> bool:
        """Returns whether the parameter takes part in clipping by the global norm."""

    # ---- gradients

    @abstractmethod
    def gradient(self, parameter: T) -> T | None:
        """The parameter's gradient, in the parameter's layout."""

    @abstractmethod
    def set_gradient(self, parameter: T, gradient: T | None) -> None: ...

    @abstractmethod
    def own_elements(self, tensor: T) -> T:
        """The tensor, or a dense copy if it is sparse or has elements that share memory."""

    def order_writes(self, gradient: T) -> None:
        """Called after :meth:`outgoing`, when only the caller and perhaps the program refer to the
        gradient. If the program does, what it writes to the gradient from now on must not change
        the values that :meth:`outgoing` copies."""

    def may_differentiate(self, parameter: T) -> bool:
        """Returns whether the program may differentiate the parameter's gradient, so that it must
        stay on this worker until the step."""
        return False

    @abstractmethod
    def after_gradient(self, parameter: T, call: Callable[[T], None]) -> Hook:
        """Calls ``call`` with the parameter after each backward pass that has computed its
        gradient."""
