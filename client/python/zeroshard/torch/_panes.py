"""Memory of tensors in which a server on this host shows parameters, without a copy."""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch
from torch import Tensor, nn

from .._native import Pane
from ._copies import memory_references
from ._private import can_count_users

#: What tensors keep alive, by address.
_memories: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_ubyte]] = (
    weakref.WeakValueDictionary()
)


def reserve(nbytes: int) -> Tensor | None:
    """A new tensor of bytes in a pane. None if the system has none, or it would be too small."""
    pane = Pane.reserve(nbytes)
    if pane is None:
        return None
    memory = (ctypes.c_ubyte * nbytes).from_address(pane.address)
    # The pane exists as long as the memory is used.
    memory.pane = pane  # type: ignore[attr-defined]
    _memories[pane.address] = memory
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)


def pane_of(tensor: Tensor) -> Pane | None:
    """The pane of which a contiguous tensor on the CPU is the memory."""
    memory = _memories.get(tensor.data_ptr())
    if memory is None or ctypes.sizeof(memory) != tensor.nbytes:
        return None
    pane: Pane = memory.pane  # type: ignore[attr-defined]
    return pane


def adopt(parameter: Tensor) -> None:
    """Moves a parameter to a pane, unless something else uses its memory, and would keep the old
    values."""
    if (
        type(parameter) not in (nn.Parameter, Tensor)
        or parameter.device.type != "cpu"
        or parameter.layout is not torch.strided
        or not parameter.is_contiguous()
        or parameter.is_shared()
        or parameter.is_inference()
        or parameter.untyped_storage().nbytes() != parameter.nbytes
        # Something else owns the memory: a NumPy array, for example.
        or not parameter.untyped_storage().resizable()
        or not can_count_users()
        or memory_references(parameter) != _alone()
        or pane_of(parameter) is not None
    ):
        return
    memory = reserve(parameter.nbytes)
    if memory is not None:
        values = memory.view(parameter.dtype).view(parameter.shape)
        parameter.data = values.copy_(parameter.detach())


@functools.cache
def _alone() -> tuple[int, int]:
    """The references to the memory of a tensor that only one variable has."""
    return memory_references(torch.empty(1, device="cpu"))
