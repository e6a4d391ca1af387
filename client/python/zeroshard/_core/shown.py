"""Adapter interface: gradients that the program sees as means over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from .entry import Entry
from .mean import MeanGradient, OpenGradients
from .modules import Modules
from .tensors import T


class Outside(ABC, Generic[T]):
    """The gradients of parameters that are not in the optimizer, for what shows them."""

    @property
    @abstractmethod
    def in_backward(self) -> bool:
        """Returns whether a backward pass is running."""

    @abstractmethod
    def average(self, looked_at: T) -> None:
        """Replaces the gradients that the program sees by their means, when it looks at that of a
        parameter. Every rank must call it."""


class ShownGradients(Modules[T]):
    """Shows means in the place of this rank's gradients."""

    def show_mean(
        self, gradients: OpenGradients[T], entry: Entry[T], freed: bool
    ) -> MeanGradient[T] | None:
        """Replaces a parameter's gradient by a tensor that shows the program the mean over the
        ranks. ``freed``: this rank's gradient was sent and is freed now.

        None: it stays this rank's gradient, because there is none, or the framework cannot show the
        mean.
        """
        return None

    def show_absent(self, gradients: OpenGradients[T], entry: Entry[T]) -> MeanGradient[T] | None:
        """Shows the program the mean over the ranks of a gradient that this rank does not have.
        None if the framework cannot."""
        return None

    def shown_mean(self, parameter: T) -> MeanGradient[T] | None:
        """The mean gradient that the parameter shows."""
        return None

    def given_gradient(self, parameter: T) -> object:
        """The object that is the parameter's gradient for the program. It changes when the program
        sets the gradient, if the framework can tell."""
        return None

    def set_aside(self, gradient: T) -> T | None:
        """Moves a gradient that may wait for long out of the memory of this process. Returns the
        gradient; ``None`` if the framework cannot (Paddle is still adding to it then)."""
        return None

    @abstractmethod
    def stand_in(self, parameter: T) -> T:
        """A parameter with the same shape, dtype and device, whose gradient is averaged instead."""

    def show_outside(self, outside: Outside[T], entry: Entry[T]) -> None:
        """From now on the program sees the mean over the ranks as the gradient of a parameter that
        is not in the optimizer."""

    def hide_outside(self, parameter: T) -> None:
        """The parameter is in the optimizer now, and has this rank's gradient again."""

    def outside_gradient(self, parameter: T) -> T | None:
        """This rank's gradient of a parameter that :meth:`show_outside` was called with, or a copy
        of it if the result may be overwritten. None if it has none, or if the program has replaced
        it."""
        return None

    def receive_outside(self, parameter: T, mean: T | None) -> None:
        """The program sees this mean. None: no rank has a gradient."""
