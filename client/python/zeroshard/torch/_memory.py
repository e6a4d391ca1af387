"""The memory of gathered parameters, and the detection of their use.

All elements of a dropped parameter share a single NaN. Host memory is pooled: allocating a block
from the system faults in every page again, which takes longer than filling it, and freed blocks of
this size fragment the heap.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.gathering import ParameterMemory
from ..errors import InvalidArgumentError
from ._deferred_load import defers
from ._dtensor import local
from ._module_hooks import OfOneModule
from ._panes import pane_of, reserve
from ._private import (
    memory_id,
    memory_users,
    metadata_functions,
    outside_graphs,
    set_local_tensor,
    without_torch_function,
)
from ._reads import copy_of
from ._transforms import check_not_recorded, is_transformed

P = ParamSpec("P")
R = TypeVar("R")

#: Attributes of a tensor that read its elements, or are views of them.
_DATA_ATTRIBUTES = {"data", "T", "H", "mT", "mH", "real", "imag"}
#: Functions and attributes that do not read the elements of a tensor.
METADATA: set[Any] = {
    getattr(Tensor, name)
    for name in (
        "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj",
        "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_signed",
        "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "untyped_storage",
    )
}  # fmt: skip
METADATA |= metadata_functions()
METADATA |= {
    access
    for name in dir(Tensor)
    if name not in _DATA_ATTRIBUTES
    and isinstance(getattr(Tensor, name), types.GetSetDescriptorType)
    for attribute in (getattr(Tensor, name),)
    for access in (attribute.__get__, attribute.__set__, attribute.__delete__)
}
_DATA: Any = Tensor.data
#: Functions that give the memory of a tensor to something else than another tensor.
_EXPORTS: set[Any] = {
    getattr(Tensor, name)
    for name in (
        "__array__", "__dlpack__", "const_data_ptr", "data_ptr", "numpy", "share_memory_", "storage"
    )
    if hasattr(Tensor, name)
}  # fmt: skip


def unwatched(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, in which no operation gathers the parameters that it reads first: it is
    the one that gathers them, and each look at a parameter would cost some microseconds."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_torch_function():
            return function(*args, **kwargs)

    return called


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Calls a torch function, after gathering the parameters among its arguments."""
    if func == _DATA.__set__:
        return _replace_data(*args)
    if func == Tensor.detach and (copy := copy_of(args[0])) is not None:
        return copy
    if func == Tensor.copy_ and len(args) > 1 and defers(args[0], args[1]):
        return args[0]
    parameters: list[Any] = []
    if func not in METADATA:
        parameters = [*_gathered(args), *_gathered((kwargs or {}).values())]
    context: AbstractContextManager[Any] = contextlib.nullcontext()
    if parameters:
        check_not_recorded()
    for parameter in parameters:
        if func in _EXPORTS:
            parameter._zeroshard_expose()
        else:
            context = parameter._zeroshard_access()
    with context, without_torch_function():
        result = func(*args, **(kwargs or {}))
        for parameter in parameters:
            if _is_view(result, parameter):
                parameter._zeroshard_expose()
    return result


def _replace_data(parameter: Tensor, data: Tensor) -> None:
    """Copies the values, because the memory of a gathered parameter is not the program's."""
    with without_torch_function():
        found, expected = (
            f"{values.dtype} of shape {list(values.shape)} on {values.device}"
            for values in (data, parameter)
        )
        if found != expected:
            raise InvalidArgumentError(
                f"the data of a parameter is set to {found}; at level p_g_os it must be {expected}"
            )
        # Before the parameter gets other memory, which may be that of the values.
        values = local(data).clone()
        parameter._zeroshard_renew(parameter).copy_(values)  # type: ignore[attr-defined]


def _is_view(result: Any, parameter: Tensor) -> bool:
    """Returns whether a result is a tensor, or a sequence of tensors, in the memory of the
    parameter."""
    if isinstance(result, list | tuple):
        return any(_is_view(one, parameter) for one in result)
    if not isinstance(result, Tensor) or result.layout is not torch.strided or result is parameter:
        return False
    if is_transformed(result):
        return False  # a parameter that a transformation uses is exposed
    memory, of_parameter = (memory_id(local(one).untyped_storage()) for one in (result, parameter))
    return memory == of_parameter


class GatheredParameter(nn.Parameter):
    """A parameter that is gathered before an operation reads it. A copy of it is a plain one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.detach().clone(), self.requires_grad)

    @classmethod
    @outside_graphs
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs)


class GatheredDTensor(DTensor):
    """A distributed parameter whose local tensor is gathered before an operation reads it."""

    @classmethod
    @outside_graphs
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs)

    # These methods do not call __torch_function__. Their results may be views.

    def to_local(self, **options: Any) -> Tensor:
        _expose_all((self,))
        return super().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        _expose_all((self,))
        return super().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        _expose_all((self,))
        return super().redistribute(*args, **options)


def _gathered(values: Iterable[Any]) -> Iterator[Any]:
    """The gathered parameters among arguments of a function."""
    for value in values:
        if isinstance(value, GatheredParameter | GatheredDTensor):
            if hasattr(value, "_zeroshard_access"):  # a copy is not gathered
                yield value
        elif isinstance(value, list | tuple):
            yield from _gathered(value)


def _expose_all(values: Iterable[Any]) -> None:
    for parameter in _gathered(values):
        parameter._zeroshard_expose()


def guard(
    module: nn.Module,
    parameters: dict[str, Tensor],
    access: Callable[[], AbstractContextManager[Any]],
    expose: Callable[[], None],
    renew: Callable[[Tensor], Tensor],
    release: Callable[[], None],
) -> None:
    """As :meth:`zeroshard._core.gathering.Gathering.guard`."""
    for parameter in parameters.values():
        parameter.__class__ = (
            GatheredDTensor if isinstance(parameter, DTensor) else GatheredParameter
        )
        parameter._zeroshard_access = access  # type: ignore[attr-defined]
        parameter._zeroshard_expose = expose  # type: ignore[attr-defined]
        parameter._zeroshard_renew = renew  # type: ignore[attr-defined]

    module.register_state_dict_post_hook(_CopyState(parameters, release))


@contextlib.contextmanager
def plain_parameters(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which parameters, which are gathered, have the class that they had before
    :func:`guard`."""
    guarded = [(parameter, type(parameter)) for parameter in _gathered(parameters)]
    for parameter, kind in guarded:
        parameter.__class__ = DTensor if kind is GatheredDTensor else nn.Parameter
    try:
        yield
    finally:
        for parameter, kind in guarded:
            parameter.__class__ = kind


def guard_tied(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """As :meth:`zeroshard._core.gathering.Gathering.guard_tied`."""
    module.register_state_dict_post_hook(_CopyState(parameters))


#: Copies of parameters in state dicts, by the ids of the state dict and the parameter.
_copies: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()


class _CopyState(OfOneModule):
    """Copies gathered parameters in a state dict, where tied parameters stay tied."""

    def __init__(
        self, parameters: dict[str, Tensor], release: Callable[[], None] | None = None
    ) -> None:
        self._parameters = parameters
        self._release = release

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        if any(copy_of(parameter) is not None for parameter in self._parameters.values()):
            return
        for name, parameter in self._parameters.items():
            value = state.get(prefix + name)
            if value is not None and value is not parameter:
                copy = _copies.get((id(state), id(parameter)))
                if copy is None or all(copy is not other for other in state.values()):
                    copy = value.clone()
                    _copies[id(state), id(parameter)] = copy
                state[prefix + name] = copy
        if self._release is not None:
            self._release()


class PooledMemory(ParameterMemory[Tensor]):
    """The memory of gathered parameters. On the CPU, a parameter has a pane if a server on this
    host shows it, and otherwise a block of a pool. On a device, torch allocates its memory."""

    def __init__(self, shown: bool) -> None:
        """``shown``: pulls may show values."""
        self._shown = shown
        self._pool = _Pool()
        #: By the id of the parameter: the memory of its pane. None: its values are copied.
        self._panes: dict[int, Tensor | None] = {}
        #: Parameters with a pane whose last values the server has sent.
        self._sent: set[int] = set()
        #: What a dropped parameter has instead of its memory, by its id.
        self._stubs: dict[int, Tensor] = {}
        #: The block and the strides of each parameter, by its id.
        self._blocks: dict[int, Tensor] = {}
        self._strides: dict[int, tuple[int, ...]] = {}

    # Memory that is allocated in inference mode cannot be used for training later.
    @torch.inference_mode(False)
    def take(self, parameter: Tensor) -> Tensor:
        values, strides = local(parameter), self._strides[id(parameter)]
        numel = _extent(values.shape, strides)
        if values.device.type == "cpu":
            block = self._block(parameter, numel * values.element_size())
            self._blocks[id(parameter)] = block
            flat = block.view(values.dtype)
        else:
            flat = torch.empty(numel, dtype=values.dtype, device=values.device)
        return flat.as_strided(values.shape, strides)

    @torch.inference_mode(False)
    def put(self, parameter: Tensor, value: Tensor) -> None:
        if isinstance(parameter, DTensor):
            set_local_tensor(parameter, value)
            return
        with without_torch_function():
            parameter.data = value

    @torch.inference_mode(False)
    def drop(self, parameter: Tensor) -> None:
        with without_torch_function():
            # The first call records the strides that the parameter was created with.
            self._strides.setdefault(id(parameter), local(parameter).stride())
            stub = self._stubs.get(id(parameter))
            if stub is None:
                stub = self._stubs[id(parameter)] = _stub(local(parameter))
            self.put(parameter, stub)
        block = self._blocks.pop(id(parameter), None)
        if block is None:
            return
        pane = pane_of(block)
        if pane is None:
            self._pool.give(block, self.limit)
        elif not pane.shown and self._panes.get(id(parameter)) is block:
            del self._panes[id(parameter)]  # with its memory

    def received(self, parameter: Tensor) -> bool:
        block = self._blocks.get(id(parameter))
        pane = None if block is None else pane_of(block)
        if pane is None:
            return False
        if pane.shown:
            self._sent.discard(id(parameter))
        elif id(parameter) in self._sent:
            self._panes[id(parameter)] = None  # the server has sent them twice in a row
        else:
            self._sent.add(id(parameter))
        return pane.shown

    def new_version(self) -> None:
        for block in self._panes.values():
            if block is not None and _is_unused(block):
                pane = pane_of(block)
                assert pane is not None, "the block is its memory"
                pane.release()

    def _block(self, parameter: Tensor, nbytes: int) -> Tensor:
        """Memory for a parameter, which no other tensor uses."""
        pane = self._panes.get(id(parameter))
        if id(parameter) not in self._panes or pane is not None and not _is_unused(pane):
            pane = self._panes[id(parameter)] = reserve(nbytes) if self._shown else None
        return self._pool.take(nbytes) if pane is None else pane


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The elements of memory that a tensor spans: more than it has, if it is a slice with gaps."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _stub(parameter: Tensor) -> Tensor:
    """A tensor with the parameter's shape whose elements share one element of memory."""
    value = float("nan") if parameter.is_floating_point() else 0
    return torch.full((1,), value, dtype=parameter.dtype, device=parameter.device).expand(
        parameter.shape
    )


class _Pool:
    """Blocks of CPU memory by size. A block is reused only if no tensor refers to it."""

    def __init__(self) -> None:
        self._kept_bytes = 0
        self._blocks: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """Returns an uninitialised block."""
        blocks = self._blocks.get(nbytes)
        if blocks:
            self._kept_bytes -= nbytes
            return blocks.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give(self, block: Tensor, limit: int) -> None:
        """Returns a block to the pool, which keeps up to ``limit`` bytes. A tensor that still uses
        the block keeps it."""
        nbytes = block.numel()
        if self._kept_bytes + nbytes <= limit and _is_unused(block):
            self._kept_bytes += nbytes
            self._blocks.setdefault(nbytes, []).append(block)


def _is_unused(block: Tensor) -> bool:
    # One reference is the block's, one that of the storage object in this expression.
    return memory_users(block.untyped_storage()) == 2
