"""The tensors of a model and its optimizer as a job of the cluster.

The specification of a job is immutable: its tensors, which of them are trained, and the optimizer.
When the program changes it (unfreezes a parameter, adds a parameter group, loads a state), a new
job continues from the last version of the previous one: see :mod:`zeroshard._core.opening`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic

from .._averages import by_part
from .._connection import Connection
from .._native import Array, Job
from .._rendezvous import ProcessGroup
from ..errors import InvalidArgumentError, NotInitialisedError, RolledBackError
from .entry import Entry, mark
from .framework import Framework
from .optimizer_spec import OptimizerSpec
from .tensors import T


class ModelJob(Generic[T]):
    """The job of one model and its optimizer, on one rank."""

    def __init__(
        self,
        connection: Connection,
        framework: Framework[T],
        model: Any,
        optimizer: OptimizerSpec[T],
        group: ProcessGroup,
    ) -> None:
        self.connection = connection
        self.framework = framework
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.entries: list[Entry[T]] = []
        self._by_tensor: dict[int, Entry[T]] = {}
        self._by_name: dict[str, int] = {}
        #: The open job, and jobs that end before it, in a list for those who must not keep this
        #: object.
        self._current: list[Job] = []
        self.version = 0
        #: The average that this worker has instead of the parameters that train. None: it has the
        #: parameters.
        self.average: str | None = None
        #: The version of the checkpoint from which the job was started or restored last; 0: none.
        self.started_at = 0
        #: :attr:`Job.restored`, as far as this rank has followed.
        self._followed: tuple[int, int] | None = None

    # ---- tensors

    def describe(self, entries: list[Entry[T]]) -> None:
        """The next job consists of these tensors."""
        self.entries = entries
        self._by_tensor = {id(entry.tensor): entry for entry in entries}
        self._by_name = {entry.name: entry.index for entry in entries}

    def replace(self, entry: Entry[T], tensor: T) -> None:
        """The program has replaced a tensor by another one, which must have its shape and dtype."""
        entry.replace(tensor)
        self._by_tensor[id(tensor)] = entry

    def entry(self, tensor: T) -> Entry[T]:
        """The entry of a tensor of the model."""
        return self._by_tensor[id(tensor)]

    def find(self, tensor: T) -> Entry[T] | None:
        """The entry of a tensor. None if the job does not have the tensor."""
        return self._by_tensor.get(id(tensor))

    def index_of(self, name: str) -> int:
        """The index of the entry with this name."""
        return self._by_name[name]

    @property
    def trained(self) -> Iterator[Entry[T]]:
        """The entries that the servers update, in manifest order."""
        return (entry for entry in self.entries if entry.trained)

    @property
    def buffers(self) -> Iterator[Entry[T]]:
        """The entries of the model's buffers."""
        return (entry for entry in self.entries if entry.buffer)

    @property
    def parameters(self) -> Iterable[Entry[T]]:
        """The entries of the parameters, also of those that are not trained."""
        return (entry for entry in self.entries if not entry.buffer and not entry.kept)

    @property
    def distributed(self) -> Entry[T] | None:
        """The first tensor that is distributed over ranks. None if there is none."""
        return next((entry for entry in self.entries if entry.layout is not None), None)

    @property
    def uploaded(self) -> list[Entry[T]]:
        """The entries that this rank uploads: on rank 0 all replicated tensors, on every rank the
        boxes of which it is the first owner."""
        return [entry for entry in self.entries if self.job.uploads(entry.index)]

    @property
    def received(self) -> list[Entry[T]]:
        """The entries that another rank uploads, and those that are rounded on the way: all ranks
        compute with the same values, whoever has uploaded them."""
        own = self.job.uploads
        rounds = self.job.rounds
        return [entry for entry in self.entries if not own(entry.index) or rounds(entry.index)]

    def mark(self) -> None:
        """Records the state of all tensors, to detect changes by the program."""
        mark(self.entries)

    # ---- values

    def fetch(
        self,
        arrays: list[tuple[int, Array]],
        *,
        version: int,
        part: str | None = None,
        label: str | None = None,
    ) -> None:
        """Fetches tensors at a version: see :meth:`zeroshard._native.Job.fetch`."""
        self.check_open()
        self.check_not_rolled_back()
        with self.connection.activity.waiting("pull"):
            for some, of in self.parts(arrays, part):
                self.job.fetch(version, some, part=of, label=label)

    def parts(
        self, arrays: list[tuple[int, Array]], part: str | None
    ) -> list[tuple[list[tuple[int, Array]], str | None]]:
        """The arrays by the part of the state that each receives: where the parameters are
        requested, and this worker has averages, those of the tensors that train."""
        if self.average is None or part:
            return [(arrays, part)]
        return by_part(arrays, lambda index: self.entries[index].trained, self.average, part)

    def check_has_parameters(self, event: str) -> None:
        """Raises an error if this worker has averages instead of the parameters."""
        if self.average is not None:
            raise InvalidArgumentError(
                f"{event} while the model has the values of its average {self.average!r}; do it "
                "outside of the block of `averaged`, and evaluate under no_grad()"
            )

    def receive(
        self,
        entries: Iterable[Entry[T]],
        label: str | None = None,
        version: int | None = None,
    ) -> None:
        """Fetches entries at a version, by default the current one."""
        targets = [(entry.index, entry.incoming()) for entry in entries]
        if not targets:
            return
        arrays = [(index, incoming.array) for index, incoming in targets]
        self.fetch(arrays, version=self.version if version is None else version, label=label)
        for _, incoming in targets:
            incoming.finish()

    def receive_resident(self) -> None:
        """Fetches everything that is on this worker at all times, at the current version."""
        self.receive((entry for entry in self.entries if entry.resident), label="receiving")

    def state_hash(self) -> str:
        """The hash of the whole state at the current version."""
        return self.connection.cluster.state_hash(self.job.name)

    # ---- the job of the cluster

    @property
    def job(self) -> Job:
        """The open job of the cluster."""
        return self._current[0]

    @job.setter
    def job(self, job: Job) -> None:
        self._current[:1] = [job]

    def add_ending(self, job: Job) -> None:
        """Another job, which ends at :meth:`end_others`, or else with this one."""
        self._current.append(job)

    def end_others(self) -> None:
        """Leaves the jobs of :meth:`add_ending`."""
        for job in self._current[1:]:
            self.connection.leave(job, wait=False)
        del self._current[1:]

    def current_version(self) -> int:
        """The version of the job, which other ranks may have made."""
        return self.connection.status_of(self.job).version or 0

    def exchange(self, what: str, value: str) -> list[str]:
        """Returns the value that each rank has passed for ``what``. Every rank must call it."""
        return self.connection.exchange(f"{self.job.name}/{what}", value, self.group.ranks)

    def check_open(self) -> None:
        """Raises :class:`~zeroshard.NotInitialisedError` if the session was closed."""
        if self.connection.closed:
            raise NotInitialisedError(
                "the session was closed by zeroshard.shutdown(), and with it the part of this "
                "model that was on the servers; read, save and train it before that, or create it "
                "again after zeroshard.init()"
            )

    def retire(self) -> None:
        """Leaves the job in the background."""
        _leave(self.connection, self._current)

    def retire_after(self, model: object) -> None:
        """Leaves the job in the background when ``model`` is deleted. Does not keep this object:
        the optimizer's hooks, which it reaches, may refer to the model."""
        weakref.finalize(model, _leave, self.connection, self._current).atexit = False

    # ---- checkpoints

    def start_at(self, version: int) -> None:
        """The values of the job are those of its checkpoint of this version."""
        self.version = self.started_at = version

    def join_restored(self) -> None:
        """Called before this rank has any values: it follows what was restored before."""
        self._followed = self.job.restored

    @property
    def is_rolled_back(self) -> bool:
        """Returns whether the job has returned to a checkpoint, and this rank has not followed."""
        return self.job.restored != self._followed

    def check_not_rolled_back(self) -> None:
        """Raises :class:`~zeroshard.RolledBackError` if the job has returned to a checkpoint, and
        this rank has not followed."""
        restored = self.job.restored
        if restored is not None and restored != self._followed:
            error = RolledBackError(
                f"job {self.job.name!r} has returned to its checkpoint of version {restored[1]}, "
                "because later state was lost or somebody has rewound the job; call "
                "Checkpoints.resume()"
            )
            error.version = restored[1]
            raise error

    def follow_restored(self) -> None:
        """Takes the version to which the job has returned."""
        restored = self.job.restored
        assert restored is not None, "the job was restored"
        self._followed = restored
        self.start_at(restored[1])


def _leave(connection: Connection, current: list[Job]) -> None:
    for job in current:
        connection.leave(job, wait=False, shown=job is current[0])
