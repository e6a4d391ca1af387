"""Adapter interface: the modules of a model, and their forward and backward passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .parameters import Parameters
from .tensors import T


class Modules(Parameters[T]):
    """The modules of a model, which the core accesses only through this class."""

    def stays(self, module: Any) -> bool:
        """Returns whether the parameters of a module stay on the worker, since native code reads
        them."""
        return False

    @abstractmethod
    def parameters(self, model: Any) -> Iterable[tuple[str, T]]:
        """The model's parameters by full name. Tied parameters appear once."""

    @abstractmethod
    def buffers(self, model: Any) -> Iterable[tuple[str, T]]:
        """The model's buffers by full name. Tied buffers appear once."""

    @abstractmethod
    def record_buffers(self, model: Any) -> Callable[[], None]:
        """Copies the model's buffers. Returns a function that restores them."""

    @abstractmethod
    def modules(self, model: Any) -> Iterable[Any]:
        """The model and all modules in it, parents first, each once."""

    @abstractmethod
    def own_parameters(self, module: Any) -> Iterable[tuple[str, T]]:
        """The parameters of a module itself, without its children's, by name."""

    def borrowed(self, module: Any) -> Iterable[T]:
        """The parameters of other modules that the forward of this module may use without one of
        the accesses that :meth:`guard` detects."""
        return ()

    @abstractmethod
    def around_forward(
        self, module: Any, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Calls ``begin`` before and ``end`` after each forward of the module, also if it raises an
        error."""

    # ---- a backward pass

    @abstractmethod
    def is_recording(self) -> bool:
        """Returns whether operations of this thread can be differentiated, or a backward pass is
        running."""

    @abstractmethod
    def in_backward(self) -> bool:
        """Returns whether a backward pass is running in this thread."""

    @abstractmethod
    def backward_pass(self) -> Hashable:
        """An identifier of the running backward pass."""

    @abstractmethod
    def backward_node(self) -> Any:
        """The graph node that is being executed, one object per execution."""

    @abstractmethod
    def after_backward(self, call: Callable[[], None]) -> None:
        """During backward: calls ``call`` once when the current pass has ended."""

    @abstractmethod
    def saved_tensors(
        self, pack: Callable[[T], Any], unpack: Callable[[Any], T]
    ) -> AbstractContextManager[Any]:
        """A context in which tensors saved for backward are replaced by ``pack`` and restored by
        ``unpack``."""

    def is_transforming(self) -> bool:
        """Returns whether a function transformation runs in this thread, in which saved tensors
        cannot be replaced."""
        return False

    def outside_transforms(self) -> AbstractContextManager[None]:
        """A context whose operations are not transformed."""
        return nullcontext()
