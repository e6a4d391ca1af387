"""The memory of Paddle's tensors: aliases, changes by the program, and gathered parameters.

A dropped parameter has no memory; an operation on it raises Paddle's own error. A use is detected
when a layer's attribute is read (``layer.weight``), and when a method or an operator of the
parameter is called.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import paddle
from paddle import Tensor

from .._core.gathering import ParameterMemory
from .._core.shown import Outside
from ..errors import InvalidArgumentError
from ._dtensor import like
from ._mean_gradient import ATTRIBUTE, given, own_gradient
from ._private import (
    ShowsGradient,
    call_first,
    free,
    is_initialised,
    local_shape,
    offset,
    parameter_class,
    parameters_of,
    set_parameters,
    share_memory,
)

#: Methods that do not read the elements of a tensor, or gather the parameter themselves.
_METADATA = {
    "__class__", "__deepcopy__", "__delattr__", "__dir__", "__getattribute__", "__hash__",
    "__init__", "__init_subclass__", "__len__", "__new__", "__reduce__", "__reduce_ex__",
    "__setattr__", "__sizeof__", "__subclasshook__", "clear_grad", "clear_gradient", "copy_",
    "data_ptr", "detach", "dim", "element_size", "get_strides", "gradient", "is_contiguous",
    "is_dense", "is_dist", "is_floating_point", "is_selected_rows", "is_sparse", "is_sparse_coo",
    "is_sparse_csr", "ndimension", "numel", "register_hook", "set_value",
}  # fmt: skip

#: Methods whose results are views of a tensor's memory.
_VIEWS = {"__dlpack__", "get_tensor", "reshape", "value", "view"}

_FLOATING = (paddle.float32, paddle.bfloat16, paddle.float16, paddle.float64)

#: Prefix of the attributes that this package sets.
_OURS = "_zeroshard"

#: The attribute of a trainable parameter that is not in the optimizer, from a backward pass until
#: the program looks at its gradient.
OUTSIDE = "_zeroshard_outside"

#: The attribute that holds a parameter of the same shape, whose gradient is averaged in its place.
_STAND_IN = "_zeroshard_stand_in"


def alias(tensor: Any) -> Any:
    """A tensor with the same elements that keeps their memory alive."""
    return strided(tensor, tensor.shape, tensor.strides)


def strided(tensor: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """A view of the tensor's memory, starting at its first element."""
    with paddle.no_grad():
        return paddle.as_strided(tensor.detach(), shape, strides, offset(tensor))


def changes(tensor: Any) -> int:
    """A counter that changes when the program writes to the tensor.

    It does not change when an initializer writes to it, or the program through ``get_tensor()``.
    """
    if isinstance(tensor, parameter_class()) and not isinstance(tensor, Counted):
        tensor.__class__ = _variant(Counted, type(tensor))
    return int(tensor.inplace_version) + int(getattr(tensor, "_zeroshard_writes", 0))


def _set_changes(parameter: Any, number: int) -> None:
    parameter._zeroshard_writes = number - int(parameter.inplace_version)


def check_has_values(tensor: Any) -> None:
    """Raises an error for a parameter that the program has taken out of its model while its values
    were on the servers."""
    if getattr(tensor, "_zeroshard_dropped", False) and not is_initialised(tensor):
        raise InvalidArgumentError(
            f"parameter {tensor.name!r} was taken out of the model after group_sharded_parallel, "
            "and at level p_g_os its values were on the servers only; replace parts of the model "
            "before group_sharded_parallel"
        )


def _gradient(parameter: Any) -> Any | None:
    """The gradient that the program sees."""
    mean = given(parameter)
    if mean is not None and mean.average_left is not None:
        mean.average_left(parameter, _stand_in(parameter))
        parameter.__dict__.pop(ATTRIBUTE, None)
        own = own_gradient(parameter)
        if own is not None and mean.left_scale != 1.0:
            with paddle.no_grad():
                own.scale_(mean.left_scale)
    elif mean is not None:
        return mean.values()
    elif (outside := _outside_of(parameter)) is not None:
        outside.average(parameter)
    return own_gradient(parameter)


def _outside_of(parameter: Any) -> Outside[Any] | None:
    """The gradients to which that of the parameter belongs, if it is to become a mean now."""
    reference = parameter.__dict__.get(OUTSIDE)
    outside: Outside[Any] | None = None if reference is None else reference()
    return None if outside is None or outside.in_backward else outside


def _stand_in(parameter: Any) -> Any:
    """The stand-in that the parameter keeps."""
    if _STAND_IN not in parameter.__dict__:
        setattr(parameter, _STAND_IN, stand_in(parameter))
    return parameter.__dict__[_STAND_IN]


def stand_in(parameter: Any) -> Any:
    """As :meth:`zeroshard._core.shown.ShownGradients.stand_in`."""
    zeros = paddle.nn.initializer.Constant(0.0)
    return paddle.create_parameter(
        list(parameter.shape), dtype=parameter.dtype, default_initializer=zeros
    )


def access(parameter: Any) -> None:
    """Called before an operation reads the parameter."""
    guarded = _guarded(parameter)
    if guarded is not None:
        guarded.access()


def _expose(parameter: Any) -> None:
    """Called before the program gets a view of the parameter's memory."""
    guarded = _guarded(parameter)
    if guarded is not None:
        guarded.expose()


def _guarded(parameter: Any) -> _Parameters | None:
    # A weak reference: the garbage collector does not find cycles through a parameter's attributes.
    reference = parameter.__dict__.get("_zeroshard_layer")
    if reference is None:
        return None
    guarded: _Parameters | None = reference()
    if guarded is None and parameter._zeroshard_dropped:
        raise InvalidArgumentError(
            f"the values of parameter {parameter.name!r} were on the servers, and its model was "
            "deleted; keep the model that group_sharded_parallel returned, or call its "
            "get_all_parameters() before it is deleted"
        )
    return guarded


class Counted(ShowsGradient):
    """A parameter that counts the writes that Paddle's own counter omits: ``set_value``, ``copy_``
    and ``data``. Its gradient is
    the mean over the ranks."""

    #: Added to Paddle's counter.
    _zeroshard_writes = 0

    def set_value(self, value: Any) -> None:
        access(self)
        super().set_value(value)  # type: ignore[misc]
        self._zeroshard_writes += 1

    def copy_(self, *args: Any) -> Any:
        access(self)
        result = super().copy_(*args)  # type: ignore[misc]
        self._zeroshard_writes += 1
        return result

    @property
    def data(self) -> Any:
        _expose(self)
        return super().data  # type: ignore[misc]

    @data.setter
    def data(self, value: Any) -> None:
        access(self)
        before = changes(self)
        parameter_class().data.__set__(self, value)
        _set_changes(self, before + 1)

    @property
    def grad(self) -> Any | None:
        return _gradient(self)

    @grad.setter
    def grad(self, gradient: Any | None) -> None:
        if gradient is not None:
            access(self)  # Paddle compares it with the values
        self._forget_mean()
        Tensor.grad.__set__(self, gradient)

    @property
    def grad_(self) -> Any | None:
        found = _gradient(self)
        return super().grad_ if given(self) is None else found  # type: ignore[misc]

    def _zeroshard_grad_ivar(self, own: Callable[[], Any | None]) -> Any | None:
        found = _gradient(self)
        return own() if given(self) is None else found

    def gradient(self) -> Any | None:
        found = _gradient(self)
        if given(self) is None:
            return super().gradient()  # type: ignore[misc]
        return None if found is None else found.numpy()

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        self._forget_mean()
        super().clear_gradient(set_to_zero)  # type: ignore[misc]

    def _forget_mean(self) -> None:
        self.__dict__.pop(ATTRIBUTE, None)
        self.__dict__.pop(OUTSIDE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        access(self)
        ours = {
            name: self.__dict__.pop(name) for name in list(self.__dict__) if name.startswith(_OURS)
        }
        try:
            return super().__deepcopy__(memo)  # type: ignore[misc]
        finally:
            self.__dict__.update(ours)


class _Gathered(Counted):
    """A parameter that is gathered when one of its methods or operators is called."""


def _after(action: Callable[[Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(parameter: Any, *args: Any, **kwargs: Any) -> Any:
        action(parameter)
        return method(parameter, *args, **kwargs)

    return call


for _name in dir(Tensor):
    _method = getattr(Tensor, _name)
    if (
        callable(_method)
        and _name not in _METADATA
        and (_name.startswith("__") or not _name.startswith("_"))
    ):
        setattr(_Gathered, _name, _after(_expose if _name in _VIEWS else access, _method))

_variants: dict[tuple[type, type], type] = {}


def _variant(base: type, cls: type) -> type:
    """The subclass of a parameter class and ``base``, with the name of the parameter class."""
    cls = next(known for known in cls.__mro__ if not issubclass(known, ShowsGradient))
    if (base, cls) not in _variants:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _variants[base, cls] = type(cls.__name__, (base, cls), names)
    return _variants[base, cls]


class _Parameters(OrderedDict[str, Any]):
    """A layer's parameters by name. Reading one as an attribute of the layer gathers it."""

    access: Callable[[], object]
    expose: Callable[[], None]
    gathered: frozenset[str]

    def __getitem__(self, name: str) -> Any:
        if name in self.gathered:
            self.access()
        return super().__getitem__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        return OrderedDict((name, deepcopy(parameter, memo)) for name, parameter in self.items())


def guard(
    layer: Any,
    parameters: dict[str, Any],
    access: Callable[[], object],
    expose: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """As :meth:`zeroshard._core.gathering.Gathering.guard`."""
    guarded = _Parameters(parameters_of(layer))
    guarded.access, guarded.expose = access, expose
    guarded.gathered = frozenset(parameters)
    set_parameters(layer, guarded)
    for parameter in parameters.values():
        parameter.__class__ = _variant(_Gathered, type(parameter))
        parameter._zeroshard_layer = weakref.ref(guarded)
        parameter._zeroshard_dropped = False
    ours = {id(parameter) for parameter in parameters.values()}

    def copy_state(state: dict[str, Any]) -> None:
        for name, value in state.items():
            if id(value) in ours:
                access()
                state[name] = value.detach().clone() if value.is_dist() else alias(value).clone()
        release()

    hook = layer.register_state_dict_hook(copy_state)
    # Before other hooks, which do not fetch parameters: that of paddle.amp.decorate casts them.
    call_first(layer, hook)


def is_guarded(layer: Any) -> bool:
    """Returns whether the layer's parameters are gathered, or were until its model was deleted."""
    return isinstance(parameters_of(layer), _Parameters)


class Memory(ParameterMemory[Any]):
    """Memory from Paddle's allocator."""

    def take(self, parameter: Any) -> Any:
        return paddle.empty(local_shape(parameter), dtype=parameter.dtype)

    def put(self, parameter: Any, value: Any) -> None:
        before = changes(parameter)
        if parameter.is_dist():
            value = like(value, parameter)
        share_memory(value, parameter)
        _set_changes(parameter, before)
        parameter._zeroshard_dropped = False

    def drop(self, parameter: Any) -> None:
        # The current memory may be shared and must not be cleared: the parameter receives a new
        # tensor, which is cleared. A distributed tensor must keep at least one element.
        one = paddle.full(
            [1], float("nan") if parameter.dtype in _FLOATING else 0, dtype=parameter.dtype
        )
        shape = local_shape(parameter)
        self.put(parameter, strided(one, shape, [0] * len(shape)))
        if not parameter.is_dist():
            before = changes(parameter)
            free(parameter)
            _set_changes(parameter, before)
        parameter._zeroshard_dropped = True
