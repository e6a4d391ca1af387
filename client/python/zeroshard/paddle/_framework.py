"""The adapter for Paddle: tensors, layers, backward passes and optimizers."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddle.optimizer.lr import CosineAnnealingWarmRestarts, LRScheduler

from .._core.entry import Entry
from .._core.framework import Framework
from .._core.gathering import ParameterMemory
from .._core.mean import OpenGradients
from .._core.optimizer_settings import Optimizer
from .._core.parameters import Hook
from .._core.shown import Outside
from .._core.tensors import Incoming
from .._native import Array, Box, Layout
from .._rendezvous import ProcessGroup, world_group
from ..errors import InvalidArgumentError
from . import _autograd, _conversion, _memory, _private
from ._collectives import PaddleCollectives
from ._dtensor import aligned_gradient, assembled, layout, local
from ._mean_gradient import MeanGradient, given, own_gradient, show, shown

#: The dtypes of parameters and gradients that the servers support.
_DTYPES = {paddle.float32: "f32", paddle.bfloat16: "bf16", paddle.float16: "f16"}


class _Paddle(Framework[Tensor]):
    # ---- tensors

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def layout(self, tensor: Tensor) -> Layout | None:
        return layout(tensor)

    def local_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(_private.local_shape(tensor))

    def dtype(self, tensor: Tensor) -> str | None:
        return _DTYPES.get(tensor.dtype)

    def dtype_text(self, tensor: Tensor) -> str:
        return str(tensor.dtype)

    def element_size(self, tensor: Tensor) -> int:
        return int(tensor.element_size())

    def changes(self, tensor: Tensor) -> int:
        return _memory.changes(tensor)

    def collectives(self, ranks: Sequence[int], timeout: float) -> PaddleCollectives:
        return PaddleCollectives(ranks, timeout)

    # ---- the memory of local tensors

    def host(self, shape: Sequence[int]) -> Tensor:
        return paddle.empty(list(shape), dtype="float32", device="cpu")

    def array(self, host: Tensor, box: Box | None = None) -> Array:
        # A separate tensor: the given one may be freed before its memory has been read.
        kept = _memory.alias(host)
        return Array(
            kept.data_ptr() or 0, self.numel(host), self.dtype_of("a tensor", host), kept, box
        )

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return paddle.zeros(tensor.shape, dtype=tensor.dtype)

    def outgoing(self, tensor: Tensor) -> Array:
        _memory.check_has_values(tensor)
        values = local(tensor)
        return self.array(values if _is_plain(values) else values.detach().cpu().contiguous())

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

    def is_stepped(self, parameter: Tensor) -> bool:
        return not parameter.stop_gradient

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = aligned_gradient(parameter)
        if gradient is None:
            return None
        if gradient.is_dist():
            return _memory.alias(local(gradient))
        if gradient.is_selected_rows():
            return _dense(gradient, parameter)
        # Clearing a gradient frees its tensor.
        return _memory.alias(gradient)

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            parameter.clear_gradient(False)
            return
        own = own_gradient(parameter)
        if own is not None and own.is_selected_rows():
            # A sparse gradient cannot be replaced by a dense one: it becomes one with all rows.
            rows = own.get_selected_rows()
            rows.set_rows(list(range(parameter.shape[0])))
            rows.get_tensor().set(gradient.numpy(), paddle.CPUPlace())
        elif own is None or own.data_ptr() != gradient.data_ptr():
            # Paddle copies the tensor.
            parameter.clear_gradient(False)
            parameter.grad = gradient

    def show_mean(
        self, gradients: OpenGradients[Tensor], entry: Entry[Tensor], freed: bool
    ) -> MeanGradient | None:
        if not isinstance(entry.tensor, _memory.Counted) or (gradients.is_alone and not freed):
            return None
        return show(gradients, entry)

    def show_absent(
        self, gradients: OpenGradients[Tensor], entry: Entry[Tensor]
    ) -> MeanGradient | None:
        return show(gradients, entry) if isinstance(entry.tensor, _memory.Counted) else None

    def shown_mean(self, parameter: Tensor) -> MeanGradient | None:
        return shown(parameter)

    def given_gradient(self, parameter: Tensor) -> object:
        return given(parameter)

    def stand_in(self, parameter: Tensor) -> Tensor:
        return _memory.stand_in(parameter)

    def show_outside(self, outside: Outside[Tensor], entry: Entry[Tensor]) -> None:
        if isinstance(entry.tensor, _memory.Counted):
            setattr(entry.tensor, _memory.OUTSIDE, weakref.ref(outside))

    def hide_outside(self, parameter: Tensor) -> None:
        parameter.__dict__.pop(_memory.OUTSIDE, None)

    def outside_gradient(self, parameter: Tensor) -> Tensor | None:
        return self.gradient(parameter) if _memory.OUTSIDE in parameter.__dict__ else None

    def receive_outside(self, parameter: Tensor, mean: Tensor | None) -> None:
        if parameter.__dict__.pop(_memory.OUTSIDE, None) is not None and mean is not None:
            self.set_gradient(parameter, mean)

    def own_elements(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def clips(self, parameter: Tensor) -> bool:
        return getattr(parameter, "need_clip", True) is not False

    def after_gradient(self, parameter: Tensor, call: Callable[[Tensor], None]) -> Hook:
        watch = _Watch(call)
        _watches(parameter).append(weakref.ref(watch))
        return watch

    # ---- a backward pass

    def is_recording(self) -> bool:
        return bool(paddle.is_grad_enabled()) or self.in_backward()

    def in_backward(self) -> bool:
        return _autograd.running() is not None

    def backward_pass(self) -> Hashable:
        return _autograd.running()

    def backward_node(self) -> Any:
        # Paddle does not expose the node, so each call counts as another one. A tensor that is
        # freed too early keeps its memory as long as the running operation refers to it.
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
        # A recurrent layer has a buffer without memory.
        yield from (
            (name, tensor)
            for name, tensor in _once(model.named_buffers())
            if _private.is_initialised(tensor)
        )

    def record_buffers(self, model: Any) -> Callable[[], None]:
        with paddle.no_grad():
            copies = [(buffer, buffer.clone()) for _, buffer in self.buffers(model)]

        def restore() -> None:
            with paddle.no_grad():
                for buffer, values in copies:
                    paddle.assign(values, output=buffer)

        return restore

    def modules(self, model: Any) -> Iterable[Any]:
        layers: Iterable[Any] = model.sublayers(include_self=True)
        return layers

    def own_parameters(self, module: Any) -> Iterable[tuple[str, Tensor]]:
        statistics = {id(tensor) for tensor in _own_statistics(module)}
        return [
            (name, value)
            for name, value in _private.parameters_of(module).items()
            if value is not None and id(value) not in statistics
        ]

    def borrowed(self, module: Any) -> Iterable[Tensor]:
        # A tied parameter, and those that the program declares for Paddle's own stage 3.
        tied = (tensor for _, tensor in self.own_parameters(module))
        return [*tied, *getattr(module, "extra_parameters", ())]

    def around_forward(
        self, module: Any, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        module.__dict__["forward"] = _Forward(module, begin, end)

    # ---- gathered parameters

    def parameter_memory(self, *, shown: bool) -> ParameterMemory[Tensor]:
        return _memory.Memory()

    def guard(
        self,
        module: Any,
        parameters: dict[str, Tensor],
        access: Callable[[], AbstractContextManager[Any]],
        expose: Callable[[], None],
        renew: Callable[[Tensor], Tensor],
        release: Callable[[], None],
    ) -> None:
        _autograd.install()
        _memory.guard(module, parameters, access, expose, release)

    def memory(self, tensor: Tensor) -> Hashable | None:
        if not tensor.is_dense():
            return None
        address: int | None = tensor.data_ptr()
        return address or None

    def alias(self, tensor: Tensor) -> object:
        return tensor.detach()

    def view(self, saved: Tensor, parameter: Tensor) -> Callable[[], Tensor] | None:
        if saved.dtype != parameter.dtype:
            return None
        # A view that begins at the parameter's first element: memory() identifies no other.
        values = local(saved)
        shape, strides = list(values.shape), list(values.strides)
        layout = (
            (list(saved.shape), saved.process_mesh, saved.placements) if saved.is_dist() else None
        )

        def view() -> Any:
            again = _memory.strided(local(parameter), shape, strides)
            return again if layout is None else assembled(again, *layout)

        return view

    def saved_tensors(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        def leaf(saved: Any) -> Any:
            packed = pack(saved)
            if packed is not saved:
                return packed
            # An operation that saves its own result would be part of a reference cycle.
            alone: Any = saved.detach()
            alone.stop_gradient = saved.stop_gradient
            return alone

        hooks: AbstractContextManager[Any] = paddle.autograd.saved_tensors_hooks(
            leaf, _autograd.guarded(unpack)
        )
        return hooks


PADDLE = _Paddle()

#: The class of a scheduler, among the items of its saved state.
_CLASS = "class"


class PaddleOptimizer(Optimizer[Tensor]):
    """The settings of a ``paddle.optimizer.Optimizer``.

    Paddle has learning rates and weight decay per parameter. For the servers, all parameters with
    the same hyperparameters form a group.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def parameters(self) -> list[list[Tensor]]:
        name = _conversion.optimizer_name(self._optimizer)
        return [parameters for parameters, _ in _conversion.groups(self._optimizer, name)]

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        name = _conversion.optimizer_name(self._optimizer)
        return [(name, values) for _, values in _conversion.groups(self._optimizer, name)]

    def schedule(self) -> dict[str, Any] | None:
        schedule = _private.learning_rate(self._optimizer)
        if not isinstance(schedule, LRScheduler):
            return None
        state: dict[str, Any] = {**schedule.state_dict(), **_restarts(schedule)}
        # Many schedulers have states with the same names.
        state[_CLASS] = type(schedule).__name__
        for name, value in state.items():
            if not _is_json(value):
                raise InvalidArgumentError(
                    f"{name!r} in the state of the scheduler {type(schedule).__name__} is "
                    f"{value!r}, which zeroshard.steps cannot save; it must consist of numbers of "
                    "Python, strings, lists and dicts"
                )
        return state

    def set_schedule(self, state: dict[str, Any] | None) -> None:
        schedule = _private.learning_rate(self._optimizer)
        own = type(schedule).__name__ if isinstance(schedule, LRScheduler) else None
        saved = None if state is None else state[_CLASS]
        if saved != own:
            raise InvalidArgumentError(
                f"the learning rate of the optimizer is {own or 'a number'}, and in the checkpoint "
                f"it is {saved or 'a number'}; use the learning rate of the run before"
            )
        if state is None:
            return
        restarts = _restarts(schedule)
        values = {name: state[name] for name in state if name != _CLASS and name not in restarts}
        try:
            schedule.set_state_dict(values)
            for name in restarts:
                setattr(schedule, name, state[name])
        except (KeyError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"the checkpoint has another state of the scheduler ({', '.join(state)}), which "
                f"this {own} cannot load; use the scheduler of the run before"
            ) from error


def _restarts(schedule: LRScheduler) -> dict[str, Any]:
    """The position between two warm restarts, which Paddle's ``state_dict`` does not have. (Inside
    of a ``LinearWarmup`` it follows from the epoch.)"""
    if not isinstance(schedule, CosineAnnealingWarmRestarts):
        return {}
    return {"T_cur": schedule.T_cur, "T_i": schedule.T_i}


def _is_json(value: Any) -> bool:
    """Returns whether JSON returns the same value and type. (A NumPy float64 is a float of
    Python.)"""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))


class _Received:
    """Memory that receives the values of ``tensor``: its own, or a host buffer."""

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
    """Memory that receives the raw memory of ``tensor``."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = local(tensor)
        self._words = np.empty(PADDLE.words(tensor), np.float32)
        self.array = _words_array(self._words)

    def finish(self) -> None:
        values = self._words.view(np.uint8)[: PADDLE.nbytes(self._tensor)]
        _write(self._tensor, values.view(self._tensor.numpy().dtype).reshape(self._tensor.shape))


class _Forward:
    """Wraps the forward of a layer."""

    def __init__(self, layer: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._layer = weakref.ref(layer)
        # The forward of the class, or one that the program has assigned to this layer.
        own = layer.__dict__.get("forward")
        self._forward: Callable[..., Any] = (
            own if own is not None else functools.partial(type(layer).forward)
        )
        self._bound = own is not None
        self._begin = begin
        self._end = end
        functools.update_wrapper(self, layer.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._begin()  # in the try: it registers hooks, and may fail to fetch parameters
            return (
                self._forward(*args, **kwargs)
                if self._bound
                else self._forward(self._layer(), *args, **kwargs)
            )
        finally:
            self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer has its original forward."""
        copied = memo[id(self._layer())]
        return self._forward if self._bound else types.MethodType(type(copied).forward, copied)


class _Watch:
    """A callback for the gradient of a parameter, which is active as long as this object is
    alive."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self.call: Callable[[Any], None] | None = call

    #: Paddle's hooks get a gradient before it is added to the parameter's.
    is_last = True

    def remove(self) -> None:
        self.call = None


def _watches(parameter: Any) -> list[weakref.ref[_Watch]]:
    """The callbacks of a parameter. A parameter's attributes and hooks must not refer to objects,
    since the garbage collector does not find cycles through them."""
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

        _private.on_gradient(parameter, _autograd.guarded(hook))
    watches[:] = [
        watch for watch in watches if (found := watch()) is not None and found.call is not None
    ]
    return watches


def _statistics(model: Any) -> set[int]:
    """The ids of the running statistics of all batch norms."""
    return {
        id(tensor)
        for layer in model.sublayers(include_self=True)
        for tensor in _own_statistics(layer)
    }


def _own_statistics(layer: Any) -> list[Any]:
    """The running statistics of a batch norm, which are parameters in Paddle. None of another
    layer.

    They are buffers for us: the forward writes to them, so they stay on this worker.
    """
    found = _private.statistics_of(layer)
    return [tensor for tensor in found if tensor is not None and tensor.stop_gradient]


def _once(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, tensor in named:
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _is_plain(tensor: Any) -> bool:
    """Returns whether transfers can read and write the tensor's own memory."""
    return bool(tensor.place.is_cpu_place() and tensor.is_contiguous())


def _write(tensor: Any, values: Any) -> None:
    """Sets the values of a tensor. Does not count as a change by the program."""
    Tensor.set_value(tensor, values)


def _dense(gradient: Any, parameter: Any) -> Any:
    """The dense gradient of an embedding with ``sparse=True``."""
    rows = gradient.get_selected_rows()
    dense = np.zeros(parameter.shape, np.float32)
    np.add.at(dense, list(rows.rows()), gradient.numpy())
    return paddle.to_tensor(dense, dtype=parameter.dtype, place=gradient.place)


def _words_array(words: Any) -> Array:
    return Array(words.ctypes.data, math.prod(words.shape), "f32", words)


def process_group(group: Any | None, name: str = "group") -> ProcessGroup:
    """The ranks of a group of Paddle; all ranks if it is None.

    Raises:
        InvalidArgumentError: it is not a group, or does not include this rank.
    """
    world = world_group()
    if group is None:
        return world
    if not isinstance(group, Group):
        raise InvalidArgumentError(
            f"{name} is {group!r}; it must be a group of paddle.distributed (new_group), or None"
        )
    ranks = tuple(group.ranks)
    if world.rank not in ranks:
        raise InvalidArgumentError(
            f"{name} has the ranks {list(ranks)}, and this process is rank {world.rank}; pass a "
            "group that includes it, or make the call on the ranks of the group only"
        )
    # Paddle's own number of the rank in a group of one is -1.
    return ProcessGroup(ranks.index(world.rank), ranks)
