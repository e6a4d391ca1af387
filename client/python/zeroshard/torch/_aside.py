"""Gradients that wait in a file, and take no memory of this process until something reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref

import torch
from torch import Tensor

#: Smaller gradients stay in memory.
_SMALLEST = 1 << 20
#: The bytes of a file. Each open file has a descriptor, of which a process has a limited number.
_FILE = 256 << 20


class _File:
    """A mapped file without a name, which exists as long as a tensor uses it."""

    #: The one that was created last.
    last: weakref.ref[_File] | None = None

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if there is no room for it."""
        with tempfile.TemporaryFile() as file:
            # A write to a page for which there is no room would end the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._used = 0
        _File.last = weakref.ref(self)

    @staticmethod
    def with_room(nbytes: int) -> _File:
        """The last file if it has room for a part of this size, or a new one."""
        file = None if _File.last is None else _File.last()
        if file is None or len(file._map) - file._used < nbytes:
            file = _File(max(nbytes, _FILE))
        return file

    def part(self, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """The next bytes of the file."""
        at = self._used
        self._used += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        part = (ctypes.c_ubyte * nbytes).from_buffer(self._map, at)
        part.release = lambda: self._release(at, nbytes)  # type: ignore[attr-defined]
        weakref.finalize(part, self._release, at, nbytes).atexit = False
        return part

    def _release(self, at: int, nbytes: int) -> None:
        """Takes pages out of this process. They stay in the file."""
        self._map.madvise(mmap.MADV_DONTNEED, at, nbytes)


#: What tensors in files keep alive, by address.
_parts: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_ubyte]] = (
    weakref.WeakValueDictionary()
)


@torch.inference_mode(False)
@torch.no_grad()
def set_aside(gradient: Tensor) -> Tensor:
    """Returns a tensor with the same values in a file, in the folder for temporary files. Returns
    the gradient itself if it is in a file already, is small, is not plain memory of the host, or if
    there is no room."""
    if (
        type(gradient) is not Tensor
        or gradient.device.type != "cpu"
        or gradient.layout is not torch.strided
        or not gradient.is_contiguous()
        or gradient.nbytes < _SMALLEST
    ):
        return gradient
    part = _parts.get(gradient.data_ptr())
    if part is None:
        try:
            part = _File.with_room(gradient.nbytes).part(gradient.nbytes)
        except OSError:
            return gradient
        _parts[ctypes.addressof(part)] = part
        values = torch.frombuffer(part, dtype=gradient.dtype).view(gradient.shape)
        gradient = values.copy_(gradient)
    part.release()  # type: ignore[attr-defined]
    return gradient
