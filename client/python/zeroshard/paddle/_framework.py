"""What the substance of the package must know of Paddle: its tensors, its layers, its backward
passes."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from .._core.framework import Area, Framework, Incoming, Optimizer, ParameterMemory, Place
from .._core.layout import Layout
from .._native import Array
from .._rendezvous import place
from . import _autograd, _memory, kinds
from ._dtensor import aligned_gradient, assembled, layout, local

#: What parameters and gradients may be made of.
_DTYPES = {paddle.float32: "f32", paddle.bfloat16: "bf16", paddle.float16: "f16"}


class _Paddle(Framework[Tensor]):
    # ---- tensors

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def layout(self, tensor: Tensor) -> Layout | None:
        return layout(tensor)

    def local_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor._local_shape if tensor.is_dist() else tensor.shape)

    def dtype(self, tensor: Tensor) -> str | None:
        return _DTYPES.get(tensor.dtype)

    def dtype_text(self, tensor: Tensor) -> str:
        return str(tensor.dtype)

    def element_size(self, tensor: Tensor) -> int:
        return int(tensor.element_size())

    def changes(self, tensor: Tensor) -> int:
        return _memory.changes(tensor)

    # ---- their memory

    def host(self, shape: Sequence[int]) -> Tensor:
        return paddle.empty(list(shape), dtype="float32", device="cpu")

    def array(self, host: Tensor, area: Area | None = None) -> Array:
        # A tensor of our own: the given one may be emptied before its memory has been read.
        kept = _memory.alias(host)
        return Array(
            kept.data_ptr() or 0, self.numel(host), self.dtype_of("a tensor", host), kept, area
        )

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return paddle.zeros(tensor.shape, dtype=tensor.dtype)

    def outgoing(self, tensor: Tensor) -> Array:
        here = local(tensor)
        return self.array(here if _is_plain(here) else here.detach().cpu().contiguous())

    def incoming(self, tensor: Tensor) -> Incoming:
        return _Received(tensor)

    def outgoing_words(self, tensor: Tensor) -> Array:
        words = np.zeros(self.words(tensor), np.float32)
        words.view(np.uint8)[: self.nbytes(tensor)] = (
            local(tensor).numpy().reshape(-1).view(np.uint8)
        )
        return _words_array(words)

    def incoming_words(self, tensor: Tensor) -> Incoming:
        return _ReceivedWords(tensor)

    # ---- gradients

    def trains(self, tensor: Tensor) -> bool:
        return not tensor.stop_gradient

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = aligned_gradient(parameter)
        if gradient is None:
            return None
        if gradient.is_dist():
            return _memory.alias(local(gradient))
        if gradient.is_selected_rows():
            return _dense(gradient, parameter)
        # Clearing a gradient empties the tensor that it is.
        return _memory.alias(gradient)

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            parameter.clear_gradient(False)
        elif parameter.grad is not None and parameter.grad.is_selected_rows():
            # Nothing else can take its place: rows, but all of them.
            rows = parameter.grad.get_selected_rows()
            rows.set_rows(list(range(parameter.shape[0])))
            rows.get_tensor().set(gradient.numpy(), paddle.CPUPlace())
        elif parameter.grad is None or parameter.grad.data_ptr() != gradient.data_ptr():
            # Paddle copies it.
            parameter.clear_gradient(False)
            parameter.grad = gradient

    def own_elements(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def clips(self, parameter: Tensor) -> bool:
        return getattr(parameter, "need_clip", True) is not False

    def after_gradient(
        self, parameter: Tensor, call: Callable[[Tensor], None]
    ) -> Callable[[], None]:
        watch = _Watch(call)
        _watches(parameter).append(weakref.ref(watch))
        return watch.end

    # ---- a backward pass

    def in_backward(self) -> bool:
        return _autograd.running() is not None

    def backward_pass(self) -> Hashable:
        return _autograd.running()

    def backward_node(self) -> Any:
        # Paddle does not tell. Each tensor that is needed counts as another operation: what is
        # freed for the next one keeps its memory as long as the running one refers to it.
        return object()

    def after_backward(self, call: Callable[[], None]) -> None:
        _autograd.after_backward(call)

    # ---- modules

    def parameters(self, model: Any) -> Iterable[tuple[str, Tensor]]:
        statistics = _statistics(model)
        return (
            (name, tensor)
            for name, tensor in _once(model.named_parameters())
            if id(tensor) not in statistics
        )

    def buffers(self, model: Any) -> Iterable[tuple[str, Tensor]]:
        statistics = _statistics(model)
        yield from (
            (name, tensor)
            for name, tensor in _once(model.named_parameters())
            if id(tensor) in statistics
        )
        # A recurrent layer has one without memory.
        yield from (
            (name, tensor)
            for name, tensor in _once(model.named_buffers())
            if tensor._is_initialized()
        )

    def modules(self, model: Any) -> Iterable[Any]:
        layers: Iterable[Any] = model.sublayers(include_self=True)
        return layers

    def own_parameters(self, module: Any) -> Iterable[tuple[str, Tensor]]:
        return [(name, value) for name, value in module._parameters.items() if value is not None]

    def around_forward(
        self, module: Any, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        module.__dict__["forward"] = _Forward(module, begin, end)

    # ---- parameters that come and go

    def parameter_memory(self, limit: int) -> ParameterMemory[Tensor]:
        return _memory.Memory()

    def guard(
        self,
        module: Any,
        parameters: dict[str, Tensor],
        access: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        _memory.guard(module, parameters, access, release)

    def memory(self, tensor: Tensor) -> Hashable | None:
        if not tensor.is_dense():
            return None
        address: int | None = tensor.data_ptr()
        return address or None

    def view(self, saved: Tensor, parameter: Tensor) -> Callable[[], Tensor] | None:
        if saved.dtype != parameter.dtype:
            return None
        # What begins where the parameter begins: memory() knows no other.
        here = local(saved)
        shape, strides = list(here.shape), list(here.strides)
        lies = (
            (list(saved.shape), saved.process_mesh, saved.placements) if saved.is_dist() else None
        )

        def view() -> Any:
            again = _memory.strided(local(parameter), shape, strides)
            return again if lies is None else assembled(again, *lies)

        return view

    def saved_tensors(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        def leaf(saved: Any) -> Any:
            packed = pack(saved)
            if packed is not saved:
                return packed
            # An operation that keeps its own result would keep itself, for ever.
            alone: Any = saved.detach()
            alone.stop_gradient = saved.stop_gradient
            return alone

        hooks: AbstractContextManager[Any] = paddle.autograd.saved_tensors_hooks(
            leaf, _autograd.guarded(unpack)
        )
        return hooks


PADDLE = _Paddle()


class PaddleOptimizer(Optimizer[Tensor]):
    """A ``paddle.optimizer.Optimizer``, as the servers must know it.

    What Paddle decides for each parameter (its learning rate, whether it decays) makes a group for
    the servers: all that have the same hyperparameters.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def kind(self) -> str:
        return kinds.kind(self._optimizer)

    def parameters(self) -> list[list[Tensor]]:
        return [parameters for parameters, _ in kinds.groups(self._optimizer, self.kind())]

    def groups(self, kind: str) -> list[tuple[str, dict[str, float]]]:
        return [(kind, values) for _, values in kinds.groups(self._optimizer, kind)]


class _Received:
    """Where the values of ``tensor`` are received: its own memory, or a copy that :meth:`finish`
    moves there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = local(tensor)
        plain = _is_plain(self._tensor)
        self._host = (
            None if plain else paddle.empty(self._tensor.shape, dtype=tensor.dtype, device="cpu")
        )
        self.array = PADDLE.array(self._tensor if self._host is None else self._host)

    def finish(self) -> None:
        if self._host is not None:
            _write(self._tensor, self._host)


class _ReceivedWords:
    """Where the raw memory of ``tensor`` is received."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = local(tensor)
        self._words = np.empty(PADDLE.words(tensor), np.float32)
        self.array = _words_array(self._words)

    def finish(self) -> None:
        values = self._words.view(np.uint8)[: PADDLE.nbytes(self._tensor)]
        _write(self._tensor, values.view(self._tensor.numpy().dtype).reshape(self._tensor.shape))


class _Forward:
    """A layer's forward, with what happens around it."""

    def __init__(self, layer: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._layer = weakref.ref(layer)
        # Of its class, or one that the program has given this layer.
        own = layer.__dict__.get("forward")
        self._forward: Callable[..., Any] = (
            own if own is not None else functools.partial(type(layer).forward)
        )
        self._bound = own is not None
        self._begin = begin
        self._end = end
        functools.update_wrapper(self, layer.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        try:
            return (
                self._forward(*args, **kwargs)
                if self._bound
                else self._forward(self._layer(), *args, **kwargs)
            )
        finally:
            self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy of the layer is a plain one."""
        copied = memo[id(self._layer())]
        return self._forward if self._bound else types.MethodType(type(copied).forward, copied)


class _Watch:
    """What is called when a parameter has its gradient, as long as somebody keeps this."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self.call: Callable[[Any], None] | None = call

    def end(self) -> None:
        self.call = None


def _watches(parameter: Any) -> list[weakref.ref[_Watch]]:
    """Those of a parameter; whose attributes and hooks are no garbage, ever, and so must not refer
    to anything."""
    watches: list[weakref.ref[_Watch]] | None = parameter.__dict__.get("_zeroshard_watches")
    if watches is None:
        parameter._zeroshard_watches = watches = []
        reference = weakref.ref(parameter)

        def hook(*_: Any) -> None:
            alive = reference()
            for watch in (
                [found() for found in alive._zeroshard_watches] if alive is not None else ()
            ):
                if watch is not None and watch.call is not None:
                    watch.call(alive)

        parameter._register_backward_hook(_autograd.guarded(hook))
    watches[:] = [
        watch for watch in watches if (found := watch()) is not None and found.call is not None
    ]
    return watches


def _statistics(model: Any) -> set[int]:
    """The running statistics of batch norms, which Paddle has among the parameters, by their
    ids."""
    layers = [
        layer._parameters
        for layer in model.sublayers(include_self=True)
        if {"_mean", "_variance"} <= set(layer._parameters)
    ]
    found = [
        OrderedDict.__getitem__(parameters, name)
        for parameters in layers
        for name in ("_mean", "_variance")
    ]
    return {id(tensor) for tensor in found if tensor is not None and tensor.stop_gradient}


def _once(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, tensor in named:
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _is_plain(tensor: Any) -> bool:
    """Whether its memory can be read and written as it is."""
    return bool(tensor.place.is_cpu_place() and tensor.is_contiguous())


def _write(tensor: Any, values: Any) -> None:
    """Fills a tensor; not counted as the program's doing."""
    Tensor.set_value(tensor, values)


def _dense(gradient: Any, parameter: Any) -> Any:
    """The gradient of an embedding with ``sparse=True``."""
    rows = gradient.get_selected_rows()
    dense = np.zeros(parameter.shape, np.float32)
    np.add.at(dense, list(rows.rows()), gradient.numpy())
    return paddle.to_tensor(dense, dtype=parameter.dtype, place=gradient.place)


def _words_array(words: Any) -> Array:
    return Array(words.ctypes.data, math.prod(words.shape), "f32", words)


def group_place(group: Any | None) -> Place:
    """Rank, world and the global ranks of a group; of all processes if None."""
    if group is None:
        here = place()
        return here.rank, here.world, tuple(range(here.world))
    return int(group.rank), int(group.nranks), tuple(group.ranks)
