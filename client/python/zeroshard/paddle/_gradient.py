"""A gradient that was sent to the servers and freed on this worker."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from .._core.entry import Entry

#: The parameter's attribute that holds its :class:`FreedGradient`.
ATTRIBUTE = "_zeroshard_gradient"


class FreedGradient:
    """Stands for the gradient of a parameter until the program clears or replaces it. Its values
    are not available.

    It implements :class:`zeroshard._core.framework.MeanGradient`.
    """

    own: Any | None = None
    factor = 1.0
    is_zeroed = False
    is_absent = False
    is_edited = False

    def __init__(self, entry: Entry[Any]) -> None:
        self.entry = entry

    @property
    def entry(self) -> Entry[Any]:
        """The parameter."""
        entry = self._entry()
        if entry is None:
            raise self.error()
        return entry

    @entry.setter
    def entry(self, entry: Entry[Any]) -> None:
        # Weak: the parameter refers to this object, and Python does not find cycles through a
        # parameter.
        self._entry = weakref.ref(entry)
        self.name = entry.name

    def was_sent_again(self, gradient: Any) -> None:
        """The servers have ``gradient`` from this rank now."""

    def clip(self, factor: float) -> None:
        """The step will multiply the gradient by ``factor``."""

    def end_step(self, factor: float) -> None:
        """The step, which has multiplied the gradient by ``factor``, has ended."""

    def to_send(self) -> Any:
        """Raises an error: the values are not on this worker."""
        raise InvalidArgumentError(
            "a gradient or a setting of the optimizer was changed after backward, but "
            f"the gradient of parameter {self.name!r} was already sent to the servers; make the "
            "change before the forward or after optimizer.step(), or use level os"
        )

    def error(self) -> InvalidArgumentError:
        """The error for a program that reads the gradient."""
        return InvalidArgumentError(
            f"the gradient of parameter {self.name!r} was sent to the servers and is not on this "
            "worker; to clip it, use grad_clip of the optimizer or zeroshard.paddle."
            "clip_grad_norm_; to use its values, register a hook on the parameter, or use level os"
        )
