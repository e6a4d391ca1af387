"""The memory of parameters that come and go, and how their use is noticed.

A dropped parameter has one NaN for all of its elements. Host memory goes round: given back to the
system and taken again, each page of a block would be faulted in anew, which takes longer than
filling it; left to the heap, blocks of this size would spread over it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.framework import ParameterMemory
from ._dtensor import local

#: What says something about a tensor without reading its elements.
_WITHOUT_DATA = {"data", "T", "H", "mT", "mH", "real", "imag"}
_METADATA: set[Any] = {
    access
    for name in dir(Tensor)
    if name not in _WITHOUT_DATA and isinstance(getattr(Tensor, name), types.GetSetDescriptorType)
    for access in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__)
} | {vars(torch._C.TensorBase)["data"].__set__} | {
    getattr(Tensor, name)
    for name in (
        "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
        "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_signed", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
        "storage_offset", "stride", "untyped_storage",
    )
}  # fmt: skip


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """A torch function of parameters that must be here for it."""
    if func not in _METADATA:
        _access_all(args)
        _access_all(tuple((kwargs or {}).values()))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class GatheredParameter(nn.Parameter):
    """A parameter that is fetched when something is computed with it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs)


class GatheredDTensor(DTensor):
    """The same, of what this rank has of a distributed parameter."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs)

    # These are no torch functions.

    def to_local(self, **options: Any) -> Tensor:
        _access_all((self,))
        return super().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        _access_all((self,))
        return super().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        _access_all((self,))
        return super().redistribute(*args, **options)


def _access_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, GatheredParameter | GatheredDTensor):
            access: Callable[[], None] | None = getattr(value, "_zeroshard_access", None)
            if access is not None:
                access()
        elif isinstance(value, list | tuple):
            _access_all(value)


def guard(
    module: nn.Module,
    parameters: dict[str, Tensor],
    access: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """As :meth:`zeroshard._core.framework.Framework.guard`."""
    for parameter in parameters.values():
        parameter.__class__ = (
            GatheredDTensor if isinstance(parameter, DTensor) else GatheredParameter
        )
        parameter._zeroshard_access = access  # type: ignore[attr-defined]

    def copy_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in parameters.items():
            value = state.get(prefix + name)
            if value is not None and value is not parameter:
                state[prefix + name] = value.clone()
        release()

    module.register_state_dict_post_hook(copy_state)


class PooledMemory(ParameterMemory[Tensor]):
    """On the host, blocks that are used again; on a device, what torch's allocator gives."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes that are kept for later."""
        self._pool = _Pool(limit)
        #: The block that was taken for a parameter, and its strides, by its id.
        self._blocks: dict[int, Tensor] = {}
        self._strides: dict[int, tuple[int, ...]] = {}

    def take(self, parameter: Tensor) -> Tensor:
        here = local(parameter)
        if here.device.type == "cpu":
            block = self._pool.take(here.numel() * here.element_size())
            self._blocks[id(parameter)] = block
            flat = block.view(here.dtype)
        else:
            flat = torch.empty(here.numel(), dtype=here.dtype, device=here.device)
        return flat.as_strided(here.shape, self._strides[id(parameter)])

    def put(self, parameter: Tensor, value: Tensor) -> None:
        if isinstance(parameter, DTensor):
            parameter._local_tensor = value
            return
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = value

    def drop(self, parameter: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            # The first time, these are the strides that the program has made it with.
            self._strides.setdefault(id(parameter), local(parameter).stride())
            self.put(parameter, _stub(local(parameter)))
        block = self._blocks.pop(id(parameter), None)
        if block is not None:
            self._pool.give(block)


def _stub(parameter: Tensor) -> Tensor:
    """A tensor of the parameter's shape in the memory of one element."""
    value = float("nan") if parameter.is_floating_point() else 0
    return torch.full((1,), value, dtype=parameter.dtype, device=parameter.device).expand(
        parameter.shape
    )


class _Pool:
    """Blocks of CPU memory by size. Only what nothing else refers to is used again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept_bytes = 0
        self._blocks: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A block of ``nbytes`` uninitialised bytes."""
        blocks = self._blocks.get(nbytes)
        if blocks:
            self._kept_bytes -= nbytes
            return blocks.pop()
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, block: Tensor) -> None:
        """Takes a block back, unless a tensor outside still uses it: then that tensor has it from
        now on."""
        nbytes = block.numel()
        if self._kept_bytes + nbytes <= self._limit and _is_ours_alone(block):
            self._kept_bytes += nbytes
            self._blocks.setdefault(nbytes, []).append(block)


def _is_ours_alone(block: Tensor) -> bool:
    # The block, and the storage object that is asked here.
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata) == 2
