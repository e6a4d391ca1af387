"""Adapter interface: everything the core needs from PyTorch or Paddle."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .._native import Array, Box, Layout
from ..errors import InvalidArgumentError
from .layout import local_box

if TYPE_CHECKING:
    from .collectives import Collectives
    from .entry import Entry
    from .gradients import Gradients
    from .mean import MeanGradient
    from .outside import OutsideGradients

#: A tensor of the framework.
T = TypeVar("T")


class Incoming(Protocol):
    """Memory that receives the values of a tensor: the tensor's own, or a host buffer."""

    array: Array

    def finish(self) -> None:
        """Copies the buffer to the tensor, if there is one. Called after the transfer."""


class Hook(Protocol):
    """A hook that is called with a parameter after each backward pass that has computed its
    gradient."""

    def remove(self) -> None:
        """Ends the calls."""

    @property
    def is_last(self) -> bool:
        """Returns whether the program has registered no such hook since, which would run after
        it."""


class ParameterMemory(ABC, Generic[T]):
    """Allocates and frees the memory of parameters. A parameter keeps its identity, shape and
    dtype."""

    #: The bytes of unused memory that are kept for later.
    limit: int = 0

    @abstractmethod
    def take(self, parameter: T) -> T:
        """Allocates an uninitialised tensor with the shape, dtype and device of a dropped
        parameter."""

    @abstractmethod
    def put(self, parameter: T, value: T) -> None:
        """Makes ``value``, which :meth:`take` has returned, the parameter's memory."""

    @abstractmethod
    def drop(self, parameter: T) -> None:
        """Frees the parameter's memory.

        A view that the program still holds keeps the memory alive.
        """


class Optimizer(ABC, Generic[T]):
    """The settings of an optimizer that the servers need, as they currently are."""

    @abstractmethod
    def name(self) -> str:
        """The servers' name of the optimizer. It may change with its settings."""

    @abstractmethod
    def parameters(self) -> Sequence[Sequence[T]]:
        """The parameters of each parameter group."""

    @abstractmethod
    def groups(self, name: str) -> list[tuple[str, dict[str, float]]]:
        """The hyperparameters of each parameter group, for the servers' optimizer ``name``."""

    def schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler that belongs to the optimizer, as values of JSON. None if
        schedulers are objects of the program's own."""
        return None

    def set_schedule(self, state: dict[str, Any] | None) -> None:
        """Loads a state of :meth:`schedule`.

        Raises:
            InvalidArgumentError: the state is that of another scheduler.
        """


class Framework(ABC, Generic[T]):
    """The tensors and modules of a framework. The core accesses modules only through this class."""

    # ---- tensors

    @abstractmethod
    def shape(self, tensor: T) -> tuple[int, ...]: ...

    def layout(self, tensor: T) -> Layout | None:
        """The tensor's layout on a mesh of ranks. None: this rank has the whole tensor."""
        return None

    def local_shape(self, tensor: T) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return self.shape(tensor)

    @abstractmethod
    def dtype(self, tensor: T) -> str | None:
        """``"f32"``, ``"bf16"`` or ``"f16"``; None if the servers do not support the dtype."""

    @abstractmethod
    def dtype_text(self, tensor: T) -> str:
        """The framework's own name of the dtype."""

    @abstractmethod
    def element_size(self, tensor: T) -> int:
        """Bytes per element."""

    @abstractmethod
    def changes(self, tensor: T) -> int:
        """A counter that changes when the program writes to the tensor, unless it does so through
        other views of its memory."""

    def numel(self, tensor: T) -> int:
        """The number of elements of the local tensor."""
        return math.prod(self.local_shape(tensor))

    def largest_numel(self, tensor: T) -> int:
        """The number of elements of the largest local tensor of any rank. All ranks compute the
        same number."""
        layout = self.layout(tensor)
        if layout is None:
            return self.numel(tensor)
        # As in torch.chunk, no part is larger than the first.
        return local_box(layout, self.shape(tensor), layout.mesh.ranks[0]).numel

    def nbytes(self, tensor: T) -> int:
        """The number of bytes of the local tensor."""
        return self.numel(tensor) * self.element_size(tensor)

    def words(self, tensor: T) -> int:
        """The number of 4-byte words that hold the local tensor."""
        return math.ceil(self.nbytes(tensor) / 4)

    def dtype_of(self, what: str, tensor: T) -> str:
        """The dtype for the servers. Raises :class:`~zeroshard.InvalidArgumentError` if they do not
        support it."""
        dtype = self.dtype(tensor)
        if dtype is None:
            raise InvalidArgumentError(
                f"the dtype of {what} is {self.dtype_text(tensor)}; "
                "it must be float32, bfloat16 or float16"
            )
        return dtype

    @abstractmethod
    def collectives(self, ranks: Sequence[int], timeout: float) -> Collectives[T]:
        """Collective operations of some ranks of the program, which must all call it. ``timeout``:
        of an operation, in seconds.

        Raises :class:`~zeroshard.InvalidArgumentError` if the program has no process group.
        """

    # ---- the memory of local tensors, for transfers

    @abstractmethod
    def host(self, shape: Sequence[int]) -> T:
        """An uninitialised contiguous f32 tensor in host memory."""

    @abstractmethod
    def array(self, host: T, box: Box | None = None) -> Array:
        """The memory of a contiguous host tensor. ``box`` is the part of the fetched tensor that it
        receives."""

    @abstractmethod
    def zeros_like(self, tensor: T) -> T:
        """Contiguous zeros with the tensor's shape, dtype and device."""

    @abstractmethod
    def outgoing(self, tensor: T) -> Array:
        """The values of ``tensor`` for a push: its own memory, or a copy if it is not contiguous
        host memory.

        A copy from a device is ordered after the work on the current stream. Transfers wait for
        it, and the program must not change the tensor meanwhile.
        """

    @abstractmethod
    def incoming(self, tensor: T) -> Incoming:
        """Memory that receives the values of ``tensor``."""

    @abstractmethod
    def outgoing_words(self, tensor: T) -> Array:
        """The raw memory of a tensor of any dtype as :meth:`words` f32 words, for buffers that the
        servers only store."""

    @abstractmethod
    def incoming_words(self, tensor: T) -> Incoming:
        """Memory that receives the words of :meth:`outgoing_words`."""

    # ---- gradients

    @abstractmethod
    def trains(self, tensor: T) -> bool:
        """Returns whether backward computes a gradient for the tensor."""

    @abstractmethod
    def is_stepped(self, parameter: T) -> bool:
        """Returns whether an optimizer of the framework would step the parameter, if it has a
        gradient."""

    @abstractmethod
    def gradient(self, parameter: T) -> T | None:
        """The parameter's gradient, in the parameter's layout."""

    @abstractmethod
    def set_gradient(self, parameter: T, gradient: T | None) -> None: ...

    def order_writes(self, gradient: T) -> None:
        """Called after :meth:`outgoing`, when only the caller and perhaps the program refer to the
        gradient. If the program does, what it writes to the gradient from now on must not change
        the values that :meth:`outgoing` copies."""

    def show_mean(
        self, gradients: Gradients[T], entry: Entry[T], freed: bool
    ) -> MeanGradient[T] | None:
        """Replaces a parameter's gradient by a tensor that shows the program the mean over the
        ranks. ``freed``: this rank's gradient was sent and is freed now.

        None: it stays this rank's gradient, because there is none, or the framework cannot show the
        mean.
        """
        return None

    def show_absent(self, gradients: Gradients[T], entry: Entry[T]) -> MeanGradient[T] | None:
        """Shows the program the mean over the ranks of a gradient that this rank does not have.
        None if the framework cannot."""
        return None

    def may_differentiate(self, parameter: T) -> bool:
        """Returns whether the program may differentiate the parameter's gradient, so that it must
        stay on this worker until the step."""
        return False

    def shown_mean(self, parameter: T) -> MeanGradient[T] | None:
        """The mean gradient that the parameter shows."""
        return None

    def given_gradient(self, parameter: T) -> object:
        """The object that is the parameter's gradient for the program. It changes when the program
        sets the gradient, if the framework can tell."""
        return None

    @abstractmethod
    def stand_in(self, parameter: T) -> T:
        """A parameter with the same shape, dtype and device, whose gradient is averaged instead."""

    def show_outside(self, outside: OutsideGradients[T], entry: Entry[T]) -> None:
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

    @abstractmethod
    def own_elements(self, tensor: T) -> T:
        """The tensor, or a dense copy if it is sparse or has elements that share memory."""

    @abstractmethod
    def clips(self, parameter: T) -> bool:
        """Returns whether the parameter takes part in clipping by the global norm."""

    @abstractmethod
    def after_gradient(self, parameter: T, call: Callable[[T], None]) -> Hook:
        """Calls ``call`` with the parameter after each backward pass that has computed its
        gradient."""

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

    def is_transforming(self) -> bool:
        """Returns whether a function transformation runs in this thread, in which saved tensors
        cannot be replaced."""
        return False

    def outside_transforms(self) -> AbstractContextManager[None]:
        """A context whose operations are not transformed."""
        return nullcontext()

    # ---- modules

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

    # ---- gathered parameters

    @abstractmethod
    def parameter_memory(self) -> ParameterMemory[T]:
        """Memory for gathered parameters."""

    @abstractmethod
    def guard(
        self,
        module: Any,
        parameters: dict[str, T],
        access: Callable[[], AbstractContextManager[Any]],
        expose: Callable[[], None],
        renew: Callable[[T], T],
        release: Callable[[], None],
    ) -> None:
        """Calls ``access`` before an operation reads one of these parameters of a module, and runs
        the operation in the context that it returns if backward could need the parameter. Calls
        ``expose`` before the program gets a view of its memory. ``renew`` gives a parameter other
        memory, which is returned, and leaves the earlier memory to its views.

        Calls ``release`` after a state dict has been made with copies of them.
        """

    def guard_tied(self, module: Any, parameters: dict[str, T]) -> None:
        """Called for a module that shares these parameters with a guarded module before it."""

    @abstractmethod
    def memory(self, tensor: T) -> Hashable | None:
        """An identifier of the memory of the tensor. None if it cannot be determined."""

    @abstractmethod
    def alias(self, tensor: T) -> object:
        """Keeps the memory of the tensor alive."""

    @abstractmethod
    def view(self, saved: T, parameter: T) -> Callable[[], T] | None:
        """For a saved tensor in the parameter's memory: a function that makes the same view of the
        memory that the parameter has when it is called.

        None if the view cannot be made again.
        """

    @abstractmethod
    def saved_tensors(
        self, pack: Callable[[T], Any], unpack: Callable[[Any], T]
    ) -> AbstractContextManager[Any]:
        """A context in which tensors saved for backward are replaced by ``pack`` and restored by
        ``unpack``."""
