"""The heap of this process, and the memory in it that nothing uses.

glibc keeps freed blocks for later ones. The place of a freed gradient is often too small for the
next one of its size: blocks for tensors begin at multiples of 64 bytes, and small objects settle in
the gaps before them. So the heap spreads to many times what is used.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

#: Larger blocks never come from the heap: glibc maps each on its own (DEFAULT_MMAP_THRESHOLD_MAX).
_LARGEST = 32 << 20
#: The number of unused blocks that the heap may keep. A page that was returned costs a page fault
#: when it is used again, and a backward pass uses many places of the heap in turn: of 64 gradients
#: of 4 MiB, half get new pages if the heap keeps three or four, and a quarter if it keeps twelve.
_KEPT = 3


class Heap:
    """Returns memory of the heap to the system when too much of it is unused. Does nothing with
    other C libraries than glibc."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """``sizes``: the bytes of large tensors that are freed and allocated again and again."""
        self._block = max((size for size in sizes if size <= _LARGEST), default=0)
        #: :func:`_resident` when the heap was last examined, or the least since then.
        self._seen = 0
        #: The least of :func:`_unused` since the last trim. What the heap has beyond it is unused.
        self._least = 0
        self._end = 0
        libc = _libc()
        if libc is not None and self._block:
            self._trim(libc)

    def settle(self) -> None:
        """Called when a tensor was freed. Takes a few microseconds, unless the process has grown by
        a large tensor: to examine the heap, glibc visits each of its unused blocks."""
        libc = _libc()
        if libc is None or not self._block:
            return
        self._use_huge_pages(libc)
        resident = _resident()
        if resident - self._seen < self._block:
            self._seen = min(self._seen, resident)
            return
        unused = _unused(libc, resident)
        self._seen, self._least = resident, min(self._least, unused)
        if unused - self._least > _KEPT * self._block:
            self._trim(libc)

    def _trim(self, libc: Any) -> None:
        libc.malloc_trim(0)
        self._seen = _resident()
        self._least = _unused(libc, self._seen)

    def _use_huge_pages(self, libc: Any) -> None:
        """Pages that were returned come back two MiB at a time, where the system allows it, and not
        with a page fault for each 4 KiB."""
        start, end = _start(), libc.sbrk(0)
        if start is not None and end != self._end:
            libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)
            self._end = end


class _Info(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _libc() -> Any | None:
    """The C library. None if it is not glibc, from version 2.33 on."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Info
        libc.sbrk.restype = ctypes.c_size_t
        libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        _ = libc.malloc_trim, libc.mallinfo2()
    except (AttributeError, OSError, TypeError):
        return None
    return libc


@cache
def _start() -> int | None:
    """The address of the heap. None if the process has none."""
    found = re.search(
        r"^([0-9a-f]+)-.*\[heap\]$", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    return None if found is None else int(found[1], 16)


def _resident() -> int:
    """The private memory of this process that is resident, in bytes."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * mmap.PAGESIZE


def _unused(libc: Any, resident: int) -> int:
    """Private memory less the allocated blocks, in bytes: the unused memory of the heap, and all
    that is not of the heap."""
    info = libc.mallinfo2()
    return resident - int(info.uordblks) - int(info.hblkhd)
