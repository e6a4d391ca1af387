"""Gradients that are on the servers, as tensors of torch.

After a backward pass the gradient of a parameter is this rank's, while a program expects the mean
over all ranks in ``parameter.grad``, as under DistributedDataParallel. A :class:`GradientTensor`
takes its place: norms come from the servers, a multiplication by a number becomes part of the
step, and every other operation fetches the values. What the program writes to them replaces the
gradient before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from ._mean_gradient import MeanGradient
from ._memory import METADATA
from ._outside import OutsideGradient
from ._private import (
    foreach_functions,
    is_describing,
    tree_map_only,
    without_torch_function,
    wrapper_subclass,
)


class GradientTensor(torch.Tensor):
    """Takes the place of a parameter's gradient. See the module's docstring."""

    source: MeanGradient | OutsideGradient

    @staticmethod
    def __new__(cls, source: MeanGradient | OutsideGradient, parameter: Tensor) -> GradientTensor:
        made: GradientTensor = wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        found = NotImplemented if special is None else special(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if func in METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Calls of the program end in `__torch_function__`. These are calls of autograd's own.
        if func in _ACCUMULATIONS and isinstance(args[0], GradientTensor):
            args[0].source.accumulate(args[1])
            return args[0]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func.overloadpacket is torch.ops.aten.set_ and isinstance(args[0], GradientTensor):
            _no_memory(args[0])
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function with the values of the gradients among its arguments."""
    given: dict[int, GradientTensor] = {}

    def values(gradient: GradientTensor) -> Tensor:
        found = gradient.source.values()
        given[id(found)] = gradient
        return found

    args, kwargs = tree_map_only(GradientTensor, values, (tuple(args), dict(kwargs)))
    result = func(*args, **kwargs)
    # An operation in place returns the gradient itself.
    return given.get(id(result), result)


def _number(other: Any) -> float | None:
    """The number that a tensor is multiplied by. None if it is not a single number."""
    if isinstance(other, Tensor):
        return None if other.ndim > 0 or isinstance(other, GradientTensor) else float(other)
    return float(other) if isinstance(other, (int, float)) else None


def _scaled(inverse: bool) -> Callable[..., Any]:
    def scaled(gradient: Any, other: Any, **options: Any) -> Any:
        number = _number(other)
        if number is None or options or not isinstance(gradient, GradientTensor):
            return NotImplemented
        if inverse and number == 0.0:
            return NotImplemented  # has no inverse
        gradient.source.scale(1.0 / number if inverse else number)
        return gradient

    return scaled


def _each_scaled(gradients: Any, by: Any) -> Any:
    each = isinstance(by, (list, tuple))
    numbers = [_number(one) for one in by] if each else [_number(by)] * len(gradients)
    if None in numbers:
        return NotImplemented
    for gradient, number in zip(gradients, numbers, strict=True):
        gradient.mul_(number)
    return None


def _each_zeroed(gradients: Any) -> None:
    for gradient in gradients:
        gradient.zero_()


def _zeroed(gradient: GradientTensor) -> GradientTensor:
    gradient.source.zero()
    return gradient


def _norm(
    gradient: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    order = options.pop("p", options.pop("ord", order))
    dtype = options.pop("dtype", None)
    if order not in (2, 2.0, "fro", None) or dim is not None or keepdim or options:
        return NotImplemented
    norm = gradient.source.norm()
    if norm is None:
        return NotImplemented
    return torch.tensor(norm, dtype=dtype or gradient.dtype, device=gradient.device)


def _each_norm(gradients: Any, order: Any = 2, dtype: Any = None) -> Any:
    return tuple(torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients)


def _unscaled(gradients: Any, found_inf: Tensor, inverse_scale: Tensor) -> None:
    """``torch.amp.GradScaler`` checks whether gradients are finite, and unscales them."""
    factor = float(inverse_scale)
    for gradient in gradients:
        norm = gradient.source.norm() if isinstance(gradient, GradientTensor) else None
        if norm is None:
            norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            found_inf.fill_(1.0)
        gradient.mul_(factor)


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    def moved(gradient: GradientTensor, *args: Any, **kwargs: Any) -> Any:
        probe = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        # torch returns the tensor itself if there is nothing to do.
        return gradient if function(probe, *args, **kwargs) is probe else NotImplemented

    return moved


def _set_data(gradient: GradientTensor, data: Any) -> Any:
    return None if data is gradient else NotImplemented


def _no_memory(gradient: GradientTensor, *args: Any, **kwargs: Any) -> Any:
    raise InvalidArgumentError(
        f"the gradient of parameter {gradient.source.name!r} has no memory on this worker; use "
        "a copy of it, parameter.grad.clone(), and call optimizer.zero_grad() before torch.export"
    )


def _storage(gradient: GradientTensor) -> Any:
    # torch.compile describes the gradients of the parameters that it traces.
    return NotImplemented if is_describing() else _no_memory(gradient)


def _text(gradient: GradientTensor, *args: Any, **kwargs: Any) -> Any:
    if gradient.source.is_available:
        return NotImplemented
    return f"GradientTensor(of parameter {gradient.source.name!r})"


def _itself(gradient: GradientTensor, *args: Any, **kwargs: Any) -> GradientTensor:
    return gradient


#: Operations that do not need the values.
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    Tensor.mul_: _scaled(False),
    Tensor.__imul__: _scaled(False),
    Tensor.div_: _scaled(True),
    Tensor.__itruediv__: _scaled(True),
    Tensor.zero_: _zeroed,
    **foreach_functions(_each_norm, _each_scaled, _each_zeroed, _unscaled),
    Tensor.detach: _itself,
    Tensor.detach_: _itself,
    Tensor.data.__get__: _itself,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **{
        function: _moved(function)
        for function in (
            Tensor.to,
            Tensor.cpu,
            Tensor.float,
            Tensor.double,
            Tensor.half,
            Tensor.bfloat16,
        )
    },
    Tensor.__repr__: _text,
    Tensor.__format__: _text,
    Tensor.untyped_storage: _storage,
    # Pointers and memory, and changes of the shape in place.
    **{
        getattr(Tensor, name): _no_memory
        for name in (
            "data_ptr",
            "const_data_ptr",
            "storage",
            "share_memory_",
            "set_",
            "resize_",
            "resize_as_",
            "as_strided_",
            "squeeze_",
            "unsqueeze_",
            "t_",
            "transpose_",
            "swapaxes_",
            "swapdims_",
        )
        if hasattr(Tensor, name)
    },  # fmt: skip
}

_ACCUMULATIONS = {torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor}
