"""The tensors of a job, and whether the program has written to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .. import _native
from .._native import Array, TensorSpec
from ..errors import InvalidArgumentError
from .layout import JobLayout
from .parameters import Parameters
from .tensors import Incoming, T

#: Bytes of values that are hashed at a time.
_CHUNK = 1 << 28

_Found = TypeVar("_Found")


@dataclass
class Entry(Generic[T]):
    """One tensor of the manifest."""

    framework: Parameters[T]
    name: str
    tensor: T
    #: ``True`` if the servers update it. It may be frozen now: then no rank has a gradient of it.
    trained: bool
    #: ``True`` if it is a buffer of the model.
    buffer: bool
    #: Its parameter group.
    group: int
    #: Its index in the manifest.
    index: int
    #: ``True`` if it is transferred as raw words, because the servers do not support its dtype.
    raw: bool
    #: Its layout on one of the job's meshes.
    layout: JobLayout | None = None
    #: ``True`` if it is on this worker at all times.
    resident: bool = True
    #: ``True`` if it is a parameter of the optimizer.
    optimized: bool = False
    #: ``True`` if it is state of an optimizer that runs on the ranks. No rank has its values.
    kept: bool = False
    #: The only rank that sends new values of it with a step; None: the one that uploads it.
    replaced_by: int | None = None
    #: ``True`` if it takes part in clipping by the global norm.
    clips: bool = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    #: The shape of the local tensor.
    local_shape: tuple[int, ...] = field(init=False)
    #: The framework's name of its dtype.
    dtype: str = field(init=False)
    #: ``True`` if backward computes gradients for it, according to the last forward.
    differentiable: bool = field(init=False)
    #: ``True`` if its values are compared to find out whether the program has written to it. The
    #: framework does not count all writes.
    _compared: bool = field(init=False, default=False)
    #: Its values as far as they are compared, and the framework's counter of changes, when it was
    #: last marked.
    _seen: object = field(init=False)
    #: The memory of a parameter whose address is compared, which no other values may get; or the
    #: memory in which servers show its values.
    _memory: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape = self.framework.shape(self.tensor)
        self.local_shape = self.framework.local_shape(self.tensor)
        self.dtype = self.framework.dtype_text(self.tensor)
        self.clips = self.framework.clips(self.tensor)
        self.follow_freezing()
        self._seen = self._counted()

    def follow_freezing(self) -> None:
        """Called before a forward, after which the program may have frozen or unfrozen it."""
        self.differentiable = self.framework.trains(self.tensor)

    def expose(self) -> None:
        """From now on the program may write to it in ways that the framework does not count."""
        if not self._compared and not self.modified:
            self._compared = True
            _see([self])

    def hide(self) -> None:
        """Its memory has changed. The framework counts all writes of the program to the new one."""
        self._compared = False
        _see([self])

    @property
    def modified(self) -> bool:
        """Returns whether the program has written to it since it was last marked."""
        if self._compared:
            return bool(modified([self]))
        return self._counted() != self._seen

    def _differs(self, look: Any) -> bool:
        """Returns whether the program has written to it, as it looks now."""
        if look == self._seen:
            return False
        if not self._compared or self._memory is None or look[0]:
            return True
        # The program has moved the values. Servers show the earlier ones, which have no hash yet.
        before = self.framework.outgoing(self._memory)
        return _native.looks([before]) != [self._seen] or _native.hashes([before]) != [look[1]]

    def _counted(self) -> object:
        return self.framework.changes(self.tensor), self.framework.memory(self.tensor)

    def replace(self, tensor: T) -> None:
        """The program has replaced it by another tensor, which must have its shape and dtype."""
        self._check_kind_of(tensor)
        self.tensor = tensor

    def check_kind(self) -> None:
        """Raises an error if the program has changed its shape or dtype."""
        self._check_kind_of(self.tensor)

    def _check_kind_of(self, tensor: T) -> None:
        shape = self.framework.local_shape(tensor)
        dtype = self.framework.dtype_text(tensor)
        if (shape, dtype) != (self.local_shape, self.dtype):
            kind = "buffer" if self.buffer else "parameter"
            raise InvalidArgumentError(
                f"{kind} {self.name!r} was changed from {self.dtype} of shape "
                f"{list(self.local_shape)} to {dtype} of shape {list(shape)} after "
                "group_sharded_parallel; change the model before this call"
            )

    @property
    def wire_shape(self) -> tuple[int, ...]:
        """The shape in which the local tensor is transferred."""
        return (self.framework.words(self.tensor),) if self.raw else self.local_shape

    @property
    def text(self) -> str:
        """Its kind, for a comparison with other ranks."""
        kind = "a buffer" if self.buffer else "trained" if self.trained else "frozen"
        kind = "state of an optimizer" if self.kept else kind
        group = f" in parameter group {self.group}" if self.trained else ""
        return f"{self.dtype} of shape {list(self.shape)}, {kind}{group}"

    def continues(self, before: Entry[T] | None) -> bool:
        """Returns whether its values are those that the servers hold for ``before``, its entry in
        the previous job.

        (Batch norm's updates of its buffers do not count as modifications.)
        """
        return (
            before is not None
            and not self.buffer
            # Not all writes to a parameter that did not train were seen.
            and (before.trained or not self.trained or not before.resident)
            and not before.modified
            and before.shape == self.shape
            and before.raw == self.raw
        )

    def outgoing(self, value: T | None = None) -> Array:
        """Its values, or ``value`` instead of them, for a push."""
        values = self.tensor if value is None else value
        return (
            self.framework.outgoing_words(values) if self.raw else self.framework.outgoing(values)
        )

    def incoming(self) -> Incoming:
        """Memory that receives its values."""
        return (
            self.framework.incoming_words(self.tensor)
            if self.raw
            else self.framework.incoming(self.tensor)
        )

    def spec(self, whole: bool) -> TensorSpec:
        """Its entry in the manifest."""
        dtype = (
            "f32" if self.raw else self.framework.dtype_of(f"parameter {self.name!r}", self.tensor)
        )
        return TensorSpec(
            self.name,
            self.wire_shape if self.raw else self.shape,
            dtype,
            frozen=not self.trained and not self.buffer and not self.kept,
            buffer=self.buffer or self.kept,
            group=self.group,
            whole=whole and self.trained,
            no_clip=not self.clips,
            layout=self.layout,
            replaced_by=self.replaced_by,
        )


def mark(entries: Sequence[Entry[T]]) -> None:
    """Records the state of the tensors, to detect changes by the program."""
    for entry in entries:
        entry.follow_freezing()
        entry._compared = entry.trained and entry.resident
    _see(entries)


def modified(entries: Sequence[Entry[T]]) -> list[Entry[T]]:
    """The entries that the program has written to since they were last marked."""
    looks = _look(entries)
    return [entry for entry, look in zip(entries, looks, strict=True) if entry._differs(look)]


def _see(entries: Sequence[Entry[T]]) -> None:
    for entry, look in zip(entries, _look(entries), strict=True):
        entry._seen = look
        is_shown = entry._compared and look[0]
        is_compared_by_memory = not entry._compared and not entry.buffer
        is_kept = entry.resident and (is_shown or is_compared_by_memory)
        entry._memory = entry.framework.alias(entry.tensor) if is_kept else None


def _look(entries: Sequence[Entry[T]]) -> list[Any]:
    """What is compared of each entry: its values, or the framework's counter and the address of its
    memory."""
    looks = iter(_of_values([entry for entry in entries if entry._compared], _native.looks))
    return [next(looks) if entry._compared else entry._counted() for entry in entries]


def hashes_of(entries: Sequence[Entry[T]]) -> list[int]:
    """A hash of the values of each entry."""
    return _of_values(entries, _native.hashes)


def _of_values(
    entries: Sequence[Entry[T]], of: Callable[[list[Array]], list[_Found]]
) -> list[_Found]:
    """What ``of`` returns for the values of each entry."""
    found: list[_Found] = []
    arrays: list[Array] = []
    size = 0
    for entry in entries:
        # A copy, if the values are not contiguous in host memory.
        arrays.append(entry.outgoing())
        size += entry.framework.nbytes(entry.tensor)
        if size >= _CHUNK or entry is entries[-1]:
            found += of(arrays)
            arrays, size = [], 0
    return found
