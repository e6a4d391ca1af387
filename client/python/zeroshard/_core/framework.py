"""What the substance must know of PyTorch or Paddle: what a tensor is, a module, and a backward
pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from .._native import Array
from ..errors import InvalidArgumentError
from .layout import Layout

#: A tensor of the framework.
T = TypeVar("T")

#: A box of a tensor: first index, and number of indices, along each dimension.
Area = tuple[Sequence[int], Sequence[int]]

#: This rank, how many ranks there are, and which of the world's ranks they are.
Place = tuple[int, int, tuple[int, ...]]


class Incoming(Protocol):
    """Where the values of a tensor are received: its own memory, or a copy that :meth:`finish`
    moves there."""

    array: Array

    def finish(self) -> None:
        """Call it when the transfer is over."""


class ParameterMemory(ABC, Generic[T]):
    """The memory of parameters that come and go; a parameter keeps its identity, shape and
    dtype."""

    @abstractmethod
    def take(self, parameter: T) -> T:
        """Uninitialised memory for a parameter that is dropped: a tensor of its shape, dtype and
        device."""

    @abstractmethod
    def put(self, parameter: T, value: T) -> None:
        """Gives the parameter the elements of what was taken for it."""

    @abstractmethod
    def drop(self, parameter: T) -> None:
        """Takes the parameter's elements away, and what was taken for it back.

        What the program still refers to (a view) keeps its memory.
        """


class Optimizer(ABC, Generic[T]):
    """What the servers must know of an optimizer, as it is now."""

    @abstractmethod
    def kind(self) -> str:
        """The servers' name of it; it may change with its settings."""

    @abstractmethod
    def parameters(self) -> Sequence[Sequence[T]]:
        """What it steps, by parameter group."""

    @abstractmethod
    def groups(self, kind: str) -> list[tuple[str, dict[str, float]]]:
        """The hyperparameters of each group, by the servers' names of ``kind``."""


class Framework(ABC, Generic[T]):
    """Tensors and modules of a framework. Modules are whatever it has; only it looks into them."""

    # ---- tensors

    @abstractmethod
    def shape(self, tensor: T) -> tuple[int, ...]: ...

    def layout(self, tensor: T) -> Layout | None:
        """How the tensor lies on a mesh of ranks; None: this rank has all of it."""
        return None

    def local_shape(self, tensor: T) -> tuple[int, ...]:
        """The shape of what this rank has of it."""
        return self.shape(tensor)

    @abstractmethod
    def dtype(self, tensor: T) -> str | None:
        """``"f32"``, ``"bf16"`` or ``"f16"``; None for what the servers cannot compute with."""

    @abstractmethod
    def dtype_text(self, tensor: T) -> str:
        """The dtype as the framework's users know it."""

    @abstractmethod
    def element_size(self, tensor: T) -> int:
        """Bytes of an element."""

    @abstractmethod
    def changes(self, tensor: T) -> int:
        """A number that is another one after the program has written to the tensor."""

    def numel(self, tensor: T) -> int:
        """How many elements this rank has of it."""
        return math.prod(self.local_shape(tensor))

    def nbytes(self, tensor: T) -> int:
        """How many bytes they have."""
        return self.numel(tensor) * self.element_size(tensor)

    def words(self, tensor: T) -> int:
        """How many 4-byte words hold the tensor's memory."""
        return math.ceil(self.nbytes(tensor) / 4)

    def dtype_of(self, what: str, tensor: T) -> str:
        """``"f32"``, ``"bf16"`` or ``"f16"``; :class:`~zeroshard.InvalidArgumentError` for any
        other dtype of ``what``."""
        dtype = self.dtype(tensor)
        if dtype is None:
            raise InvalidArgumentError(
                f"dtype of {what} is {self.dtype_text(tensor)}; it must be float32, bfloat16 or float16"
            )
        return dtype

    # ---- their memory, of what this rank has, as transfers read and write it

    @abstractmethod
    def host(self, shape: Sequence[int]) -> T:
        """An uninitialised contiguous f32 tensor in host memory."""

    @abstractmethod
    def array(self, host: T, area: Area | None = None) -> Array:
        """The memory of a contiguous host tensor; of a fetch, what of the fetched tensor it is
        for."""

    @abstractmethod
    def zeros_like(self, tensor: T) -> T:
        """Zeros of the tensor's shape, dtype and device, contiguous."""

    @abstractmethod
    def outgoing(self, tensor: T) -> Array:
        """The values of ``tensor``, to be sent: its own memory, or a copy if that is elsewhere or
        has gaps.

        A copy from a device waits for the current stream, so that what is sent is what was
        computed.
        """

    @abstractmethod
    def incoming(self, tensor: T) -> Incoming:
        """Where the values of ``tensor`` are received."""

    @abstractmethod
    def outgoing_words(self, tensor: T) -> Array:
        """Any dtype's raw memory as :meth:`words` f32 words: what travels when nothing computes
        with it."""

    @abstractmethod
    def incoming_words(self, tensor: T) -> Incoming:
        """Where what :meth:`outgoing_words` made is received."""

    # ---- gradients

    @abstractmethod
    def trains(self, tensor: T) -> bool:
        """Whether backward makes a gradient for it."""

    @abstractmethod
    def gradient(self, parameter: T) -> T | None:
        """It lies as the parameter does."""

    @abstractmethod
    def set_gradient(self, parameter: T, gradient: T | None) -> None: ...

    @abstractmethod
    def own_elements(self, tensor: T) -> T:
        """The tensor, or a dense copy if it is sparse or several of its elements share their
        memory."""

    @abstractmethod
    def clips(self, parameter: T) -> bool:
        """Whether it takes part in clipping by the global norm."""

    @abstractmethod
    def after_gradient(self, parameter: T, call: Callable[[T], None]) -> Callable[[], None]:
        """Calls with the parameter after each backward pass in which it got a gradient. Returns
        what ends that."""

    # ---- a backward pass

    @abstractmethod
    def in_backward(self) -> bool:
        """Whether one is running in this thread."""

    @abstractmethod
    def backward_pass(self) -> Hashable:
        """Which pass is running, in backward."""

    @abstractmethod
    def backward_node(self) -> Any:
        """Which operation of the pass is running: one object as long as it runs."""

    @abstractmethod
    def after_backward(self, call: Callable[[], None]) -> None:
        """In backward: calls once when the running pass is over."""

    # ---- modules

    @abstractmethod
    def parameters(self, model: Any) -> Iterable[tuple[str, T]]:
        """A model's parameters by their full names, each once."""

    @abstractmethod
    def buffers(self, model: Any) -> Iterable[tuple[str, T]]:
        """A model's buffers by their full names, each once."""

    @abstractmethod
    def modules(self, model: Any) -> Iterable[Any]:
        """The model and every module in it, each once, outer ones first."""

    @abstractmethod
    def own_parameters(self, module: Any) -> Iterable[tuple[str, T]]:
        """Those of a module that are not in a module inside it, by their names there."""

    @abstractmethod
    def around_forward(
        self, module: Any, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Calls before and after each forward of the module; after it also where it ends in an
        error."""

    # ---- parameters that come and go

    @abstractmethod
    def parameter_memory(self, limit: int) -> ParameterMemory[T]:
        """Memory for parameters; at most ``limit`` bytes that nobody uses are kept for later."""

    @abstractmethod
    def guard(
        self,
        module: Any,
        parameters: dict[str, T],
        access: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """Has ``access`` called before anything is computed with one of these parameters of a
        module.

        ``release`` is called when a state dict has been made of them, with copies of their
        elements.
        """

    @abstractmethod
    def memory(self, tensor: T) -> Hashable | None:
        """What memory a tensor's elements are in; None where that cannot be told."""

    @abstractmethod
    def view(self, saved: T, parameter: T) -> Callable[[], T] | None:
        """Of a tensor in the parameter's memory: what makes it again, of the memory that the
        parameter has then.

        None where it cannot be made again.
        """

    @abstractmethod
    def saved_tensors(
        self, pack: Callable[[T], Any], unpack: Callable[[Any], T]
    ) -> AbstractContextManager[Any]:
        """Inside, what backward needs is kept as ``pack`` makes it, and given by ``unpack`` when it
        is needed."""
