"""The mean over the ranks of one parameter's gradient, wherever its values are."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.entry import Entry
from .._core import mean
from .._core.mean import OpenGradients
from ..errors import InvalidArgumentError


class _Fetched(mean.Fetched[Tensor]):
    """Finds what the program writes by comparing the values with a copy."""

    def __init__(self, values: Tensor, loss_scale: float) -> None:
        super().__init__(values, loss_scale)
        self._accepted = values.clone()

    def scale(self, factor: float) -> None:
        self.values.mul_(factor)
        self._accepted.mul_(factor)

    def accept(self) -> None:
        self._accepted.copy_(self.values)

    @property
    def is_edited(self) -> bool:
        values, accepted = (
            tensor.reshape(-1).view(torch.uint8) for tensor in (self.values, self._accepted)
        )
        return not torch.equal(values, accepted)


def added(own: Tensor | None, gradient: Tensor, name: str) -> Tensor:
    """A rank's gradient of parameter ``name``, if it has one, and a further one, which is added in
    place if possible."""
    if gradient.requires_grad:
        raise InvalidArgumentError(
            "a backward pass with create_graph=True adds to the gradient of parameter "
            f"{name!r}; call optimizer.zero_grad() before it"
        )
    if own is None:
        return gradient.detach().clone()
    if own.is_sparse and not gradient.is_sparse:
        return gradient + own
    return own + gradient if own.is_sparse else own.add_(gradient)


class MeanGradient(mean.MeanGradient[Tensor]):
    """The mean over the ranks of one parameter's gradient in one step."""

    is_absent = True

    def __init__(
        self, gradients: OpenGradients[Tensor], entry: Entry[Tensor], own: Tensor | None
    ) -> None:
        """``own``: this rank's gradient. None if it has none."""
        super().__init__(gradients, entry)
        self.own, self.is_absent = own, own is None

    def is_of(self, parameter: Tensor) -> bool:
        """Returns whether it is the gradient of this parameter."""
        return self._of_parameter() is parameter

    # ---- used by autograd

    def accumulate(self, gradient: Tensor) -> None:
        """Adds a gradient that a further backward pass has computed on this rank."""
        gradients = self._gradients
        if gradients.is_sent(self):
            raise gradients.already_sent(self.entry)
        self.is_zero = False
        if self.is_absent and not gradient.requires_grad:
            self.own, self.factor = gradient.detach().clone(), 1.0
            self.is_absent = self.is_zeroed = False
            self._fetched = None
            return
        if self.own is None and not self.is_absent:
            # The sum is not available. It is needed only if the optimizer steps, which then raises
            # an error: a backward pass through a model that is not trained now, as in a GAN, may
            # add to what the last step has left.
            return
        own = None if self.own is None else self._scaled_own(self.own)
        if self._fetched is not None and self._fetched.is_edited:
            own = self._read(self._fetched)
        self._fetched = None
        self.own = added(own, gradient, self.name)

    def remaining(self) -> Tensor | None:
        if self._fetched is None and self.own is not None:
            return self._scaled_own(self.own)
        return super().remaining()

    def end_step(self, factor: float) -> None:
        """The step, which has multiplied the gradient by ``factor``, has ended."""
        self.factor *= factor

    # ---- used by the program

    def scale(self, factor: float) -> None:
        """Multiplies the mean by a factor, which must be equal on all ranks."""
        gradient = self._in_hook()
        if gradient is not None:
            gradient.mul_(factor)
            return
        gradients = self._gradients
        if gradients.is_clipped:
            raise gradients.changed_after_clipping(self.entry)
        if self.own is None and not gradients.is_open(self) and self._fetched is None:
            raise self._gone()
        if self._fetched is not None:
            self._fetched.scale(factor)
        self.factor *= factor

    def zero(self) -> None:
        """Sets the gradient to zero."""
        gradient = self._in_hook()
        if gradient is not None:
            gradient.zero_()
            return
        self.is_zeroed = self._gradients.is_sent(self)
        if self.is_absent and not self.is_zeroed:
            self.factor = 1.0  # this rank still contributes nothing
            return
        self.own = torch.zeros_like(self.entry.tensor, requires_grad=False)
        self.factor, self._fetched, self.is_zero = 1.0, None, True

    def norm(self) -> float | None:
        """The L2 norm; None if it must be computed from the values."""
        gradients = self._of_gradients()
        if gradients is None or self._fetched is not None or self.is_zeroed:
            return None
        if self._in_hook() is not None or not gradients.is_open(self):
            return None
        norm = self._norms(gradients)[self.entry.index]
        return abs(self.factor) * norm * gradients.shown_scale(self.entry)

    def values(self) -> Tensor:
        """The mean as a tensor with the parameter's shape, dtype and device. The step applies what
        the program writes to it, which must be the same on all ranks."""
        gradient = self._in_hook()
        if gradient is not None:
            return gradient
        if self._fetched is None:
            gradients = self._of_gradients()
            if self.is_zeroed and self.own is not None:
                return self.own
            if gradients is not None and gradients.is_open(self):
                self._fetched = self._fetch(gradients)
            elif self.own is not None and gradients is not None and gradients.is_alone:
                return self._scaled_own(self.own)
            else:
                raise self._gone()
        return self._read(self._fetched)

    @property
    def is_available(self) -> bool:
        """Returns whether the values can be read now."""
        gradients = self._of_gradients()
        return self._fetched is not None or (
            gradients is not None and gradients.is_open(self) and not gradients.in_backward
        )

    def to_send(self) -> Tensor:
        """The values as gradients that are sent, which are multiplied by the loss scale. They
        include the factor, which becomes 1."""
        values = self.values()
        self.factor = 1.0
        # In f32, so that f16 does not overflow.
        return values.float() * self._gradients.loss_scale

    def drop_edits(self) -> None:
        super().drop_edits()
        self.own, self.factor, self.is_zeroed = None, 1.0, False

    # ---- internal

    def _in_hook(self) -> Tensor | None:
        """In a hook of the parameter: the gradient of this rank, before it is sent."""
        gradients = self._of_gradients()
        if self.own is None or gradients is None or not gradients.in_backward:
            return None
        return None if gradients.is_sent(self) else self._scaled_own(self.own)

    def _norms(self, gradients: OpenGradients[Tensor]) -> list[float]:
        norms = gradients.norms_of_look()
        if not gradients.is_open(self):
            raise self._gone()
        return norms

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fetch(self, gradients: OpenGradients[Tensor]) -> _Fetched:
        entry = self.entry
        if entry.layout is not None:
            raise InvalidArgumentError(
                f"the values of the gradient of parameter {self.name!r}, which is distributed over "
                "ranks, are not available, and no gradient of its model can be changed; use norms "
                "and factors, or register hooks on parameters before the forward"
            )
        # Waits until the gradient of every rank has arrived.
        norm = self._norms(gradients)[entry.index]
        if self.is_absent and norm == 0.0:
            values = torch.zeros_like(entry.tensor, requires_grad=False)
            return _Fetched(values, gradients.loss_scale)
        total, divisor = gradients.fetch(entry)
        mean = total.div_(divisor).mul_(self.factor * gradients.shown_scale(entry))
        values = mean.reshape(entry.tensor.shape).to(entry.tensor.device, entry.tensor.dtype)
        return _Fetched(values, gradients.loss_scale)

    def _scaled_own(self, own: Tensor) -> Tensor:
        if self.factor != 1.0:
            own.mul_(self.factor)
            self.factor = 1.0
        return own

    def _gone(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the values of this gradient of parameter {self.name!r} are no longer available; they "
            "are kept until optimizer.step() or zero_grad(), or until the program sets "
            "parameter.grad; call optimizer.zero_grad() after each step, before you remove a "
            "parameter from the optimizer, and use parameter.grad.clone() to keep values"
        )
