"""The mean over the ranks of one parameter's gradient, which ``parameter.grad`` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor

from .._core import mean
from .._native import Array, hashes
from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from .._core.entry import Entry
    from .._core.mean import OpenGradients

#: The parameter's attribute that holds its :class:`MeanGradient`.
ATTRIBUTE = "_zeroshard_gradient"


def own_gradient(parameter: Any) -> Any | None:
    """The parameter's gradient on this worker."""
    return Tensor.grad.__get__(parameter)


def given(parameter: Any) -> MeanGradient | None:
    """What the parameter shows instead of its own gradient."""
    found: MeanGradient | None = getattr(parameter, ATTRIBUTE, None)
    return found


def shown(parameter: Any) -> MeanGradient | None:
    """The mean gradient of the open step that the parameter shows, or one that was not cleared
    after its step and is not on this worker."""
    found = given(parameter)
    return None if found is None or (found.has_ended and not found.is_freed) else found


def show(gradients: OpenGradients[Any], entry: Entry[Any]) -> MeanGradient:
    """Shows the mean gradient of a parameter."""
    mean = MeanGradient(gradients, entry)
    setattr(entry.tensor, ATTRIBUTE, mean)
    return mean


class _Fetched(mean.Fetched[Any]):
    """Finds what the program writes by comparing hashes of the values."""

    def __init__(self, values: Any, loss_scale: float) -> None:
        super().__init__(values, loss_scale)
        self.accept()

    def scale(self, factor: float) -> None:
        is_edited = self.is_edited
        with paddle.no_grad():
            self.values.scale_(factor)
        if not is_edited:
            self.accept()

    def accept(self) -> None:
        self._accepted = _hash(self.values)

    @property
    def is_edited(self) -> bool:
        return _hash(self.values) != self._accepted


class MeanGradient(mean.MeanGradient[Any]):
    """The mean over the ranks of one parameter's gradient in one step.

    This rank's own gradient stays where Paddle accumulates it.
    """

    def __init__(self, gradients: OpenGradients[Any], entry: Entry[Any]) -> None:
        super().__init__(gradients, entry)
        #: ``True`` if this rank's gradient was sent and freed.
        self.is_freed = False
        #: ``True`` if its step has ended.
        self.has_ended = False
        #: After the step, if each rank still has its own gradient: averages it over the ranks.
        self.average_left: Callable[[Any, Any], None] | None = None
        #: After the step: the factor of these gradients in the mean that the program sees.
        self.left_scale = 1.0

    @property
    def own(self) -> Any | None:
        """This rank's gradient, as long as it is on this worker."""
        return None if self.is_freed else own_gradient(self.entry.tensor)

    @own.setter
    def own(self, gradient: Any | None) -> None:
        parameter = self.entry.tensor
        self.is_freed = gradient is None
        # Not the parameter's own method, which would end showing this mean.
        Tensor.clear_gradient(parameter, False)
        if gradient is not None:
            Tensor.grad.__set__(parameter, gradient.astype(parameter.dtype))

    # ---- used by the step

    @property
    def is_absent(self) -> bool:
        """Returns whether this rank has not used the parameter, and contributes nothing to the
        mean."""
        return not self.is_freed and self.own is None

    def end_step(self, factor: float) -> None:
        """The step, which has multiplied the gradient by ``factor``, has ended."""
        self.has_ended = True
        gradients, entry = self._of_gradients(), self.entry
        if gradients is None or not gradients.stay_here or self._fetched or entry.layout:
            return
        self.average_left = gradients.average_later()
        # Not `factor`: what the optimizer clips, Paddle does not show.
        self.left_scale = gradients.shown_scale(entry)
        # Also where this rank has not used the parameter, and others have.
        setattr(entry.tensor, ATTRIBUTE, self)

    def to_send(self) -> Any:
        """The values as gradients that are sent, which are multiplied by the loss scale."""
        values, gradients = self.values(), self._gradients
        with paddle.no_grad():
            if values is None:
                return paddle.zeros(list(self.entry.shape), dtype="float32")
            # In f32, so that f16 does not overflow.
            return values.astype("float32") * gradients.loss_scale

    # ---- used by the program

    def values(self) -> Any | None:
        """The mean as a tensor with the parameter's shape and dtype. The step applies what the
        program writes to it, which must be the same on all ranks. None: no rank has a gradient."""
        gradients = self._of_gradients()
        if self._fetched is None:
            if gradients is None or not gradients.is_open(self):
                raise self._gone()
            if gradients.in_backward and not gradients.is_sent(self):
                return self.own
            if self.is_absent and gradients.norms_of_look()[self.entry.index] == 0:
                return None
            self._fetched = self._fetch(gradients)
        return self._read(self._fetched)

    # ---- internal

    def _fetch(self, gradients: OpenGradients[Any]) -> _Fetched:
        entry = self.entry
        if entry.layout is not None:
            raise InvalidArgumentError(
                f"the gradient of parameter {self.name!r}, which is distributed over ranks, cannot "
                "be read before the step; to clip it, use grad_clip of the optimizer or "
                "zeroshard.paddle.clip_grad_norm_; to use its values, register a hook on the "
                "parameter"
            )
        gradients.norms_of_look()  # waits until the gradient of every rank has arrived
        if not gradients.is_open(self):
            raise self._gone()
        with paddle.no_grad():
            total, divisor = gradients.fetch(entry)
            mean = (total / divisor) * gradients.shown_scale(entry)
            values = mean.reshape(list(entry.shape)).astype(entry.tensor.dtype)
            values = values.to(paddle.get_device())
        return _Fetched(values, gradients.loss_scale)

    def _gone(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the mean gradient of parameter {self.name!r} is no longer available, since its step "
            "has ended; read it between backward and optimizer.step(), and call "
            "optimizer.clear_grad() after each step"
        )


def _hash(values: Any) -> int:
    host = values.detach().cpu().contiguous()
    dtype = {paddle.float32: "f32", paddle.bfloat16: "bf16", paddle.float16: "f16"}[host.dtype]
    [found] = hashes([Array(host.data_ptr() or 0, int(host.numel()), dtype, host)])
    return found
