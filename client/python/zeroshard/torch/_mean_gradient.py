"""The mean over the ranks of one parameter's gradient, wherever its values are."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .._core.gradients import Gradients
from .._core.job import Entry
from ..errors import InvalidArgumentError

R = TypeVar("R")


@dataclass
class _Fetched:
    """The values of a mean gradient that the program has looked at."""

    #: The program may write to them.
    values: Tensor
    #: A copy, to find what the program writes.
    original: Tensor
    #: The loss scale by which they were divided.
    loss_scale: float

    def scale(self, factor: float) -> None:
        self.values.mul_(factor)
        self.original.mul_(factor)

    @property
    def is_edited(self) -> bool:
        values, original = (
            tensor.reshape(-1).view(torch.uint8) for tensor in (self.values, self.original)
        )
        return not torch.equal(values, original)


class MeanGradient:
    """The mean over the ranks of one parameter's gradient in one step."""

    def __init__(self, gradients: Gradients[Tensor], entry: Entry[Tensor], own: Tensor) -> None:
        # Weak, since Python cannot find a cycle through a parameter and its gradient.
        self._of_gradients = weakref.ref(gradients)
        self.entry = entry
        #: This rank's gradient, as long as it is on this worker.
        self.own: Tensor | None = own
        #: The factor by which the program has multiplied the mean.
        self.factor = 1.0
        self._fetched: _Fetched | None = None

    @property
    def entry(self) -> Entry[Tensor]:
        """The parameter."""
        return self._alive(self._of_entry())

    @entry.setter
    def entry(self, entry: Entry[Tensor]) -> None:
        self._of_entry = weakref.ref(entry)
        self.name = entry.name

    @property
    def _gradients(self) -> Gradients[Tensor]:
        return self._alive(self._of_gradients())

    def _alive(self, found: R | None) -> R:
        if found is None:
            raise self._gone()
        return found

    # ---- used by autograd

    def accumulate(self, gradient: Tensor) -> None:
        """Adds a gradient that a further backward pass has computed on this rank."""
        if self.own is None or self._gradients.is_sent(self):
            raise self._too_late()
        if gradient.requires_grad:
            raise InvalidArgumentError(
                "a backward pass with create_graph=True adds to the gradient of parameter "
                f"{self.name!r}; call optimizer.zero_grad() before it"
            )
        own = self._scaled_own(self.own)
        if self._fetched is not None:
            # With what the program has written to it.
            own, self._fetched = self._fetched.values, None
        self.own = own + gradient if own.is_sparse else own.add_(gradient)

    # ---- used by the program

    def scale(self, factor: float) -> None:
        """Multiplies the mean by a factor, which must be equal on all ranks."""
        gradient = self._in_hook()
        if gradient is not None:
            gradient.mul_(factor)
            return
        if self._fetched is not None:
            self._fetched.scale(factor)
        elif self.own is None and not self._gradients.is_open(self):
            raise self._gone()
        self.factor *= factor

    def zero(self) -> None:
        """Sets the gradient to zero."""
        if self._fetched is None and not self._gradients.is_sent(self):
            self.own = torch.zeros_like(self.entry.tensor, requires_grad=False)
            self.factor = 1.0
        else:
            self.values().zero_()

    def norm(self) -> float | None:
        """The L2 norm; None if it must be computed from the values."""
        if self._fetched is not None or self._in_hook() is not None:
            return None
        gradients = self._gradients
        if not gradients.is_open(self):
            return None
        norm = gradients.norms()[self.entry.index]
        return abs(self.factor) * norm / gradients.loss_scale

    def values(self) -> Tensor:
        """The mean as a tensor with the parameter's shape, dtype and device. The step applies what
        the program writes to it, which must be the same on all ranks."""
        gradient = self._in_hook()
        if gradient is not None:
            return gradient
        if self._fetched is None:
            gradients = self._gradients
            if gradients.is_open(self):
                self._fetched = self._fetch(gradients)
            elif self.own is not None and gradients.is_alone:
                return self._scaled_own(self.own)
            else:
                raise self._gone()
        return self._current(self._fetched).values

    @property
    def is_available(self) -> bool:
        """Whether the values can be read now."""
        gradients = self._of_gradients()
        return self._fetched is not None or (
            gradients is not None and gradients.is_open(self) and not gradients.in_backward
        )

    @property
    def is_edited(self) -> bool:
        """Whether the program has written to the values."""
        return self._fetched is not None and self._fetched.is_edited

    def to_send(self) -> Tensor:
        """The values as gradients that are sent, which are multiplied by the loss scale. They
        include the factor, which becomes 1."""
        values = self.values()
        self.factor = 1.0
        return values * self._gradients.loss_scale

    # ---- internal

    def _in_hook(self) -> Tensor | None:
        """In a hook of the parameter: the gradient of this rank, before it is sent."""
        gradients = self._of_gradients()
        if self.own is None or gradients is None or not gradients.in_backward:
            return None
        return None if gradients.is_sent(self) else self._scaled_own(self.own)

    def _fetch(self, gradients: Gradients[Tensor]) -> _Fetched:
        entry = self.entry
        if entry.layout is not None:
            raise InvalidArgumentError(
                f"the values of the gradient of parameter {self.name!r}, which is distributed over "
                "ranks, are not available; use its norm, or register a hook on the parameter "
                "before the forward"
            )
        gradients.norms()  # waits until the gradient of every rank has arrived
        total, divisor = gradients.fetch(entry)
        mean = total.div_(divisor * gradients.loss_scale).mul_(self.factor)
        values = mean.reshape(entry.tensor.shape).to(entry.tensor.device, entry.tensor.dtype)
        return _Fetched(values, values.clone(), gradients.loss_scale)

    def _current(self, fetched: _Fetched) -> _Fetched:
        """The values, divided by the loss scale that the program has removed in the meantime."""
        gradients = self._of_gradients()
        if gradients is not None and gradients.is_open(self):
            if fetched.loss_scale != gradients.loss_scale:
                fetched.scale(fetched.loss_scale / gradients.loss_scale)
                fetched.loss_scale = gradients.loss_scale
        return fetched

    def _scaled_own(self, own: Tensor) -> Tensor:
        if self.factor != 1.0:
            own.mul_(self.factor)
            self.factor = 1.0
        return own

    def _gone(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the gradient of parameter {self.name!r} belongs to a step that has ended, and is no "
            "longer available; use it between backward() and optimizer.step()"
        )

    def _too_late(self) -> InvalidArgumentError:
        if self._gradients.is_open(self):
            return self._gradients.already_sent(self.entry)
        return InvalidArgumentError(
            f"a backward pass has computed a gradient of parameter {self.name!r} and adds it to "
            "that of a step that has ended, which is no longer available; call "
            "optimizer.zero_grad() after each step"
        )
