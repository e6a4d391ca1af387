"""The gradient of a trainable parameter that is not in the optimizer, as the program sees it."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .._core.entry import Entry
from .._core.shown import Outside
from ..errors import InvalidArgumentError
from ._mean_gradient import added


class OutsideGradient:
    """This rank's gradient until the program looks at it after a backward pass, then the mean over
    the ranks. What the program writes stays on this worker."""

    def __init__(self, outside: Outside[Tensor], entry: Entry[Tensor], own: Tensor | None) -> None:
        """``own``: this rank's gradient. None if it has none."""
        # Weak, since Python cannot find a cycle through a parameter and its gradient.
        self._of_outside = weakref.ref(outside)
        self._of_parameter = weakref.ref(entry.tensor)
        self.name = entry.name
        #: This rank's gradient, or the mean. None: this rank contributes zeros to the mean.
        self.own = own
        self._is_mean = False

    def is_of(self, parameter: Tensor) -> bool:
        """Returns whether it is the gradient of this parameter."""
        return self._of_parameter() is parameter

    def receive(self, mean: Tensor) -> None:
        """Takes the mean over the ranks."""
        self.own, self._is_mean = mean, True

    def accumulate(self, gradient: Tensor) -> None:
        """Adds a gradient that a further backward pass has computed on this rank."""
        self.own, self._is_mean = added(self.own, gradient, self.name), False

    def scale(self, factor: float) -> None:
        """Multiplies the gradient by a factor, which must be equal on all ranks."""
        if self.own is not None:
            self.own.mul_(factor)

    def zero(self) -> None:
        """Sets the gradient to zero."""
        if self.own is not None:
            self.own.zero_()

    def norm(self) -> float | None:
        """None: the L2 norm is computed from the values."""
        return None

    @property
    def is_available(self) -> bool:
        """Returns whether the values can be read now."""
        outside = self._of_outside()
        return self._is_mean or (outside is not None and not outside.in_backward)

    def values(self) -> Tensor:
        """The mean. During a backward pass: the gradient of this rank."""
        outside, parameter = self._of_outside(), self._of_parameter()
        is_computed = outside is not None and outside.in_backward
        if self.own is not None and (self._is_mean or is_computed):
            return self.own
        if outside is None or parameter is None:
            raise self._gone()
        if is_computed:
            return torch.zeros_like(parameter, requires_grad=False)
        with torch.inference_mode(False), torch.no_grad():
            outside.average(parameter)
        if self.own is None or not self._is_mean:
            raise self._gone()
        return self.own

    def _gone(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"this gradient of parameter {self.name!r}, which is not in the optimizer, is no "
            "longer available; look at it before you set parameter.grad or zero it, and use "
            "parameter.grad.clone() to keep values"
        )
