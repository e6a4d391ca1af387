"""Asynchronous copies between a device and host memory.

They run on streams of their own, one for each direction, while kernels run on others. An event
before a copy makes it wait for the work that its values depend on, and an event after it makes the
readers of the values wait. Host memory is pinned. torch keeps it, and the memory of a tensor that
is freed, until copies on other streams are complete (``Tensor.record_stream``).
"""

from __future__ import annotations

import functools
import sys
from typing import Protocol

import torch
from torch import Tensor

from ._private import can_count_users, memory_users


class CopyToHost(Protocol):
    """A copy of a tensor to host memory, which begins when it is made."""

    #: The memory.
    host: Tensor

    def wait(self) -> None:
        """Waits until the host memory has the values. Any thread may call it."""


class CopyToDevice(Protocol):
    """A copy from host memory to a tensor, whose values are not needed any more."""

    #: The memory, which is to be filled before the copy is started.
    host: Tensor

    def start(self) -> None:
        """Starts the copy. Any thread may call it, once."""

    def finish(self) -> None:
        """Work that is queued from now on finds the values. Copies them if the copy was not
        started."""


class Copies(Protocol):
    """The copies of one kind of devices."""

    def to_host(self, source: Tensor) -> CopyToHost:
        """Starts to copy a tensor, as it is after the work that was queued."""

    def to_device(self, target: Tensor) -> CopyToDevice:
        """A copy to a tensor. It waits for the work that is queued now."""

    def precede(self, device: torch.device) -> None:
        """Work that is queued from now on waits for the copies from the device."""


class _Cuda:
    """The copies of CUDA devices."""

    def to_host(self, source: Tensor) -> CopyToHost:
        return _CudaToHost(source)

    def to_device(self, target: Tensor) -> CopyToDevice:
        return _CudaToDevice(target)

    def precede(self, device: torch.device) -> None:
        stream, _ = _streams(device)
        torch.cuda.current_stream(device).wait_stream(stream)


#: By the type of the device. Other devices have no asynchronous copies.
COPIES: dict[str, Copies] = {"cuda": _Cuda()}


def host_copy(tensor: Tensor, *, pinned: bool) -> Tensor:
    """A contiguous host tensor like this one, without its values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


#: The numbers of references to a tensor, to its memory, and to the object of its memory.
_References = tuple[int, int, int]


def memory_references(tensor: Tensor) -> tuple[int, int]:
    """The numbers of references to the memory of a tensor, and to the object of its memory."""
    memory = tensor.untyped_storage()
    return memory_users(memory), sys.getrefcount(memory)


def _references(tensor: Tensor) -> _References:
    """The references to a plain tensor, with those of the callers."""
    return sys.getrefcount(tensor), *memory_references(tensor)


def is_held(tensor: Tensor) -> bool:
    """Returns whether something may refer to a tensor, or to its memory, besides one variable of
    this function's caller and one of the caller's caller."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        # The program may hold the local tensor of a distributed one.
        return True
    if not can_count_users():
        return True
    return any(now > alone for now, alone in zip(_references(tensor), _alone(), strict=True))


@functools.cache
def _alone() -> _References:
    # As many calls as between such a variable and the count. Versions of Python differ in what a
    # call counts.
    def caller(tensor: Tensor) -> _References:
        return as_is_held(tensor)

    def as_is_held(tensor: Tensor) -> _References:
        return _references(tensor)

    tensor = torch.empty(1, device="cpu")
    return caller(tensor)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a device for copies from it and to it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class _CudaToHost:
    def __init__(self, source: Tensor) -> None:
        self._device = source.device
        self.host = host_copy(source, pinned=True)
        stream, _ = _streams(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        # A thread that waits for it does not need a core.
        self._copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
            self._copied.record(stream)
        source.record_stream(stream)

    def wait(self) -> None:
        # The current device of a thread is the first one, which this rank may not use.
        with torch.cuda.device(self._device):
            self._copied.synchronize()


class _CudaToDevice:
    def __init__(self, target: Tensor) -> None:
        self._target = target
        self.host = host_copy(target, pinned=True)
        # Its memory may have been that of a tensor which kernels still read.
        self._free = torch.cuda.current_stream(target.device).record_event()
        self._copied: torch.cuda.Event | None = None

    def start(self) -> None:
        device = self._target.device
        _, stream = _streams(device)
        # As above. Without it the first device is also made current afterwards.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(self._free)
            self._target.copy_(self.host, non_blocking=True)
            self._copied = stream.record_event()
        self._target.record_stream(stream)

    def finish(self) -> None:
        if self._copied is None:
            self._target.copy_(self.host, non_blocking=True)
        else:
            torch.cuda.current_stream(self._target.device).wait_event(self._copied)
