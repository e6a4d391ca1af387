"""The mean over the ranks of one parameter's gradient, as the program sees it, and the values of it
that the program has looked at."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol

from ..errors import InvalidArgumentError
from .entry import Entry
from .tensors import T


class Fetched(ABC, Generic[T]):
    """The values of a mean gradient that the program has looked at."""

    def __init__(self, values: T, loss_scale: float) -> None:
        #: The program may write to them.
        self.values = values
        #: The loss scale by which they were divided.
        self.loss_scale = loss_scale

    @property
    @abstractmethod
    def is_edited(self) -> bool:
        """Returns whether the program has written to the values since they were accepted."""

    @abstractmethod
    def accept(self) -> None:
        """The values are those that the servers have, or will have."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiplies the values, which stay edited or not."""


class OpenGradients(Protocol[T]):
    """The gradients of the open step, as far as a mean gradient needs them:
    :class:`zeroshard._core.looks.Looks`."""

    loss_scale: float

    @property
    def in_backward(self) -> bool: ...

    @property
    def is_alone(self) -> bool: ...

    @property
    def stay_here(self) -> bool: ...

    @property
    def is_clipped(self) -> bool: ...

    def is_open(self, mean: MeanGradient[T]) -> bool: ...

    def is_sent(self, mean: MeanGradient[T]) -> bool: ...

    def norms_of_look(self) -> list[float]: ...

    def shown_scale(self, entry: Entry[T]) -> float: ...

    def fetch(self, entry: Entry[T]) -> tuple[T, float]: ...

    def average_later(self) -> Callable[[T, T], None]: ...

    def already_sent(self, entry: Entry[T]) -> InvalidArgumentError: ...

    def changed_after_clipping(self, entry: Entry[T]) -> InvalidArgumentError: ...


class MeanGradient(ABC, Generic[T]):
    """The mean gradient of one parameter in one step."""

    #: This rank's gradient, as long as it is on this worker.
    own: T | None
    #: The factor by which the program has multiplied the mean.
    factor = 1.0
    #: ``True`` if the program has set it to zero, and nothing was added since.
    is_zero = False
    #: ``True`` if the program has set it to zero after it was sent.
    is_zeroed = False
    #: None until the program looks at it.
    _fetched: Fetched[T] | None = None

    def __init__(self, gradients: OpenGradients[T], entry: Entry[T]) -> None:
        # Weak: the parameter refers to this object, and Python does not find cycles through a
        # parameter.
        self._of_gradients = weakref.ref(gradients)
        self.entry = entry

    @property
    def entry(self) -> Entry[T]:
        """The parameter."""
        entry = self._of_entry()
        if entry is None:
            raise self._gone()
        return entry

    @entry.setter
    def entry(self, entry: Entry[T]) -> None:
        self._of_entry = weakref.ref(entry)
        # A new job has other entries for the same parameters.
        self._of_parameter = weakref.ref(entry.tensor)
        self.name = entry.name

    @property
    def _gradients(self) -> OpenGradients[T]:
        gradients = self._of_gradients()
        if gradients is None:
            raise self._gone()
        return gradients

    @property
    @abstractmethod
    def is_absent(self) -> bool:
        """Returns whether this rank has not used the parameter, and contributes nothing to the
        mean."""

    @property
    def is_edited(self) -> bool:
        """Returns whether the program has written to the values."""
        return self._fetched is not None and self._fetched.is_edited

    @property
    def is_gone(self) -> bool:
        """Returns whether there was a gradient, of which this worker has no values any more.
        Reading it is an error, as is a step."""
        return self.own is None and self._fetched is None and not self.is_absent

    def remaining(self) -> T | None:
        """Returns what stays the gradient of a parameter that leaves the optimizer: the values that
        the script has looked at, or this rank's gradient. None if it has none."""
        return self.own if self._fetched is None else self._read(self._fetched)

    def clip(self, factor: float) -> None:
        """The step will multiply the gradient by ``factor`` to clip it."""
        if self._fetched is not None:
            self._fetched.scale(factor)

    def was_sent_again(self, gradient: T) -> None:
        """The servers have ``gradient`` from this rank now."""
        self.is_zeroed = False
        if self.own is not None:
            self.own = gradient
        if self._fetched is not None:
            self._fetched.accept()

    def drop_edits(self) -> None:
        """Drops what the program has written, since no rank has this gradient."""
        self._fetched = None

    @abstractmethod
    def end_step(self, factor: float) -> None:
        """The step, which has multiplied the gradient by ``factor``, has ended."""

    @abstractmethod
    def to_send(self) -> T:
        """The values as gradients that are sent, which are multiplied by the loss scale. They
        include the factor, which becomes 1."""

    def _read(self, fetched: Fetched[T]) -> T:
        """The fetched values, divided by the loss scale that the program has removed since."""
        gradients = self._of_gradients()
        if gradients is not None and gradients.is_open(self):
            if fetched.loss_scale != gradients.loss_scale:
                fetched.scale(fetched.loss_scale / gradients.loss_scale)
                fetched.loss_scale = gradients.loss_scale
        return fetched.values

    @abstractmethod
    def _gone(self) -> InvalidArgumentError:
        """The error for values that are no longer available."""
