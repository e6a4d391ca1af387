"""Reads of a model at any time: by the thread that trains, by a signal handler in it, and by other
threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from ..errors import InvalidArgumentError, VersionGoneError
from .entry import Entry
from .interrupts import between_operations, is_within_operation
from .job import ModelJob
from .step_state import Step
from .stored import whole
from .tensors import T

R = TypeVar("R")

#: The number of versions of which a read is tried. Another thread may make steps meanwhile.
_READS = 20
#: Seconds to wait until the servers have decided a step, before a read takes the version before it.
_DECISION_TIME = 2.0


class Reads(Generic[T]):
    """What a caller may read of a model now, and at which version."""

    def __init__(self, job: ModelJob[T], step: Step, *, gathers: bool) -> None:
        """``gathers``: parameters are gathered when they are used."""
        self._job = job
        self._step = step
        self._gathers = gathers
        #: The thread that trains.
        self._thread = threading.get_ident()

    def trains_here(self) -> None:
        """The thread that calls this trains the model."""
        self._thread = threading.get_ident()

    # ---- what the caller may read

    @property
    def is_undecided(self) -> bool:
        """Returns whether this rank has voted for the open step, which the servers may have
        made."""
        return self._step.voted == self._job.version

    @property
    def is_other_thread(self) -> bool:
        """Returns whether another thread than the caller trains the model."""
        return threading.get_ident() != self._thread

    @property
    def sees_writes(self) -> bool:
        """Returns whether the caller can tell what the program has written on this worker since the
        last step: no step is being decided, and no other thread is training."""
        if self.is_undecided:
            return False
        return not self.is_other_thread or between_operations() is not None

    @property
    def needs_copies(self) -> bool:
        """Returns whether the caller must not read the parameters on this worker: it is a signal
        handler or another thread, or a step was interrupted while it was decided."""
        if not self._gathers:
            return self.is_undecided
        return self.is_undecided or self.is_other_thread or is_within_operation()

    @property
    def is_between_steps(self) -> bool:
        """Returns whether the caller is the thread that trains, and no step is open on the servers:
        all ranks that read now read the same version, until the next step."""
        return self.keeps_version and not self.is_undecided and not is_within_operation()

    @property
    def keeps_version(self) -> bool:
        """Returns whether the servers make no step, besides one that is being decided, before the
        caller returns: it is the thread that trains, also in a signal handler."""
        return not self.is_other_thread and self._step.knows_version

    # ---- reads

    def read(self, fetch: Callable[[int], R]) -> R:
        """Calls ``fetch`` with the version of the servers, again if a later one replaces it."""
        for _ in range(_READS - 1):
            with contextlib.suppress(VersionGoneError):
                return fetch(self._decided_version())
        return fetch(self._decided_version())

    def _decided_version(self) -> int:
        """The version that the servers have when the open step is decided, or when that takes too
        long, because other ranks have left: several reads get the same one."""
        if not self._step.knows_version:
            return self._job.current_version()
        end = time.monotonic() + _DECISION_TIME
        while (version := self._job.version) == self._step.voted:
            version = max(version, self._job.current_version())
            if version != self._step.voted or time.monotonic() > end:
                break
            time.sleep(0.01)
        return version

    def whole(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Whole parameters of the model, as f32 in host memory, by the given names."""
        entries = {name: self._job.entry(parameter) for name, parameter in parameters.items()}
        self.check_not_written(entries.values())
        unique = {entry.name: entry for entry in entries.values()}.values()
        found = self.read(lambda version: whole(self._job, unique, version))
        return {name: found[entry.name] for name, entry in entries.items()}

    def check_not_written(self, entries: Iterable[Entry[T]]) -> None:
        """Raises an error if the program has written to parameters, which are to be read from the
        servers, since the last step."""
        may_compare = self.sees_writes and not (self._gathers and is_within_operation())
        for entry in entries:
            if may_compare and entry.modified:
                raise InvalidArgumentError(
                    f"parameter {entry.name!r} was modified after the last step; save the model "
                    "after the next step, which sends the change to the servers"
                )
