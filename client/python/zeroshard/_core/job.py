"""A model's tensors as a job of the cluster.

What a job is never changes: which tensors it has, which of them train, the optimizer's kind. Where
a program changes one of these (unfreezes a parameter, adds a parameter group, loads a state), or
writes to the parameters itself, the next job takes over from the last version of the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from .._native import Array, Job, Mesh, TensorSpec
from .._session import Session
from . import kinds
from .framework import Area, Framework, Incoming, Optimizer, Place, T
from .layout import JobLayout, agree

#: Bytes of host memory that the move from one job to the next takes at a time, for each part of the
#: state.
_CHUNK = 1 << 30

#: One parameter's optimizer state: steps applied, and host tensors by name.
State = tuple[int, Mapping[str, T]]


@dataclass
class Entry(Generic[T]):
    """One tensor of the manifest."""

    framework: Framework[T]
    name: str
    tensor: T
    #: Whether the servers step it.
    trained: bool
    #: A buffer of the model.
    buffer: bool
    #: Its parameter group.
    group: int
    #: Its number in the manifest.
    index: int
    #: Travels as raw words, because its dtype is none that is computed with.
    raw: bool
    #: How it lies on one of the job's meshes.
    layout: JobLayout | None = None
    shape: tuple[int, ...] = field(init=False)
    #: Of what this rank has.
    local_shape: tuple[int, ...] = field(init=False)
    #: Whether backward made gradients for it, as of the last step.
    differentiable: bool = field(init=False)
    #: The framework's counter of changes, as of the last step.
    changes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.framework.shape(self.tensor)
        self.local_shape = self.framework.local_shape(self.tensor)
        self.mark()

    def mark(self) -> None:
        """Remembers what the tensor is now, to notice what the program writes."""
        self.differentiable = self.framework.trains(self.tensor)
        self.changes = self.framework.changes(self.tensor)

    @property
    def modified(self) -> bool:
        """Whether the program has written to it since the last step."""
        return self.framework.changes(self.tensor) != self.changes

    @property
    def travelling_shape(self) -> tuple[int, ...]:
        """The shape of what this rank has of it, on the servers."""
        return (self.framework.words(self.tensor),) if self.raw else self.local_shape

    def outgoing(self) -> Array:
        """Its values, to be sent."""
        return (
            self.framework.outgoing_words(self.tensor)
            if self.raw
            else self.framework.outgoing(self.tensor)
        )

    def incoming(self) -> Incoming:
        """Where its values are received."""
        return (
            self.framework.incoming_words(self.tensor)
            if self.raw
            else self.framework.incoming(self.tensor)
        )

    def spec(self, whole: bool) -> TensorSpec:
        """What the servers must know of it."""
        dtype = (
            "f32" if self.raw else self.framework.dtype_of(f"parameter {self.name!r}", self.tensor)
        )
        return TensorSpec(
            self.name,
            self.travelling_shape if self.raw else self.shape,
            dtype,
            frozen=not self.trained and not self.buffer,
            buffer=self.buffer,
            group=self.group,
            whole=whole and self.trained,
            no_clip=not self.framework.clips(self.tensor),
            layout=self.layout,
        )


class ModelJob(Generic[T]):
    """The job of one model and its optimizer, as one rank sees it."""

    def __init__(
        self,
        session: Session,
        framework: Framework[T],
        kind: str,
        model: Any,
        optimizer: Optimizer[T],
        place: Place,
        bucket_numel: int,
    ) -> None:
        self.framework = framework
        self._session = session
        self._kind = kind
        self._model = model
        self._optimizer = optimizer
        self.rank, self.world, self._ranks = place
        self._bucket_numel = bucket_numel
        self.optimizer_kind = optimizer.kind()
        self.entries: list[Entry[T]] = []
        self._by_tensor: dict[int, Entry[T]] = {}
        self.job: Job
        self.version = 0

    def entry(self, tensor: T) -> Entry[T]:
        """The entry of a tensor of the model."""
        return self._by_tensor[id(tensor)]

    @property
    def trained(self) -> Iterator[Entry[T]]:
        """What the servers step, in manifest order."""
        return (entry for entry in self.entries if entry.trained)

    @property
    def buffers(self) -> Iterator[Entry[T]]:
        """The model's buffers."""
        return (entry for entry in self.entries if entry.buffer)

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        """The optimizer's hyperparameters as they are now."""
        return self._optimizer.groups(self.optimizer_kind)

    def changed(self) -> bool:
        """Whether the program has changed what the job is, or written to what it trains."""
        return self._shape_of_job() != self._opened_as or any(
            entry.differentiable != self.framework.trains(entry.tensor)
            or (entry.trained and entry.modified)
            for entry in self.entries
        )

    def _shape_of_job(self) -> list[tuple[int, tuple[str, ...]]]:
        groups = zip(self._optimizer.parameters(), self.groups(), strict=True)
        return [(len(parameters), kinds.state_names(*values)) for parameters, values in groups]

    @property
    def uploaded(self) -> list[Entry[T]]:
        """What this rank uploads: on rank 0 what it has of everything; on the others the boxes that
        are theirs first."""
        return [entry for entry in self.entries if self.job.uploads(entry.index)]

    @property
    def received(self) -> list[Entry[T]]:
        """What another rank uploads."""
        return [entry for entry in self.entries if not self.job.uploads(entry.index)]

    def open(self, states: Mapping[int, State[T]]) -> None:
        """Makes the first job. Parameters and buffers become on every rank those of the first that
        has them.

        ``states``: the optimizer state that there is, by the ``id`` of its parameter.
        """
        self._start()
        uploaded = self.uploaded
        ours = {
            entry.index: states[id(entry.tensor)]
            for entry in uploaded
            if id(entry.tensor) in states
        }
        self._upload([(entry, entry.outgoing()) for entry in uploaded], ours, "uploading")
        self.job.initialised()
        self.receive(self.received, label="receiving")
        self.mark()

    def reopen(
        self, resident: Iterable[Entry[T]], states: Mapping[int, State[T]] | None = None
    ) -> None:
        """Goes on with another job from where this one is.

        Parameters that the program has written to are taken from the first rank that has them, the
        others from the servers; optimizer state is ``states`` if given, else what the servers have,
        where it still fits. ``resident`` tensors get their values on the other ranks.
        """
        old, before, version = self.job, {entry.name: entry for entry in self.entries}, self.version
        here = {id(entry.tensor) for entry in resident}
        had = self._opened_as
        source = _Old(self.framework, old, version)
        self._start()
        for chunk in _chunks(self.uploaded):
            carried = [before.get(entry.name) for entry in chunk]
            values = source.values(chunk, carried)
            if states is None:
                moved = self._carried_states(source, chunk, carried, had)
            else:
                moved = {
                    entry.index: states[id(entry.tensor)]
                    for entry in chunk
                    if id(entry.tensor) in states
                }
            self._upload(values, moved, "uploading")
        self.job.initialised()
        self.receive(entry for entry in self.received if id(entry.tensor) in here)
        self.mark()
        self._session.retire(old)

    def _start(self) -> None:
        self.optimizer_kind = self._optimizer.kind()
        self.entries = self._describe()
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        name = self._session.name(self._kind, self._ranks)
        meshes = self._place_entries(name)
        specs = [entry.spec(self.optimizer_kind == "lamb") for entry in self.entries]
        self._opened_as = self._shape_of_job()
        place = self.rank, self.world
        self.job = self._session.open(
            name, specs, self.groups(), place, self._bucket_numel, meshes=meshes
        )
        self.version = 0

    def _place_entries(self, name: str) -> list[Mesh]:
        """Agrees with the other ranks on the layouts of the entries; the job's meshes."""
        named = {entry.name: entry for entry in self.entries}
        agreed = agree(
            {name: self.framework.layout(entry.tensor) for name, entry in named.items()},
            lambda name: named[name].trained,
            self._ranks,
            lambda value: self._session.exchange(name, value, self._ranks),
        )
        for entry in self.entries:
            entry.layout = agreed.layouts[entry.name]
        return agreed.meshes

    def _describe(self) -> list[Entry[T]]:
        framework, groups = self.framework, self._optimizer.parameters()
        group_of = {
            id(parameter): number for number, group in enumerate(groups) for parameter in group
        }
        named = {
            id(parameter): (name, parameter)
            for name, parameter in framework.parameters(self._model)
        }
        for number, group in enumerate(groups):
            for position, parameter in enumerate(group):
                # What the optimizer has besides the model's: a loss with parameters of its own.
                named.setdefault(id(parameter), (f"optimizer.{number}.{position}", parameter))
        entries: list[Entry[T]] = []

        def add(name: str, tensor: T, trained: bool, buffer: bool) -> None:
            dtype = framework.dtype(tensor)
            raw = not trained and dtype is None or buffer and dtype != "f32"
            group = group_of.get(id(tensor), 0)
            entries.append(
                Entry(framework, name, tensor, trained, buffer, group, len(entries), raw)
            )

        for key, (name, parameter) in named.items():
            add(name, parameter, key in group_of and framework.trains(parameter), False)
        for name, tensor in framework.buffers(self._model):
            add(name, tensor, False, True)
        return entries

    def _upload(
        self,
        values: list[tuple[Entry[T], Array]],
        states: Mapping[int, State[T]],
        label: str | None,
    ) -> None:
        """Optimizer state first: with the last parameter the job begins."""
        by_part: dict[tuple[str, int], list[tuple[int, Array]]] = {}
        for index, (applied, tensors) in states.items():
            for part, tensor in tensors.items():
                by_part.setdefault((part, applied), []).append(
                    (index, self.framework.array(tensor))
                )
        for (part, applied), arrays in by_part.items():
            self.job.initialise(arrays, part=part, applied=applied, label=label)
        by_applied: dict[int, list[tuple[int, Array]]] = {}
        for entry, value in values:
            applied = states[entry.index][0] if entry.index in states else 0
            by_applied.setdefault(applied, []).append((entry.index, value))
        for applied, arrays in by_applied.items():
            self.job.initialise(arrays, applied=applied, label=label)

    def _carried_states(
        self,
        old: _Old[T],
        chunk: list[Entry[T]],
        carried: list[Entry[T] | None],
        old_names: list[tuple[int, tuple[str, ...]]],
    ) -> dict[int, State[T]]:
        """The optimizer state of what trained before and trains on, where the optimizer still has
        the same."""
        pairs = []
        for entry, before in zip(chunk, carried, strict=True):
            if (
                before is not None
                and before.trained
                and entry.trained
                and before.shape == entry.shape
            ):
                names = self._opened_as[entry.group][1]
                if names == old_names[before.group][1]:
                    pairs.append((entry, before, names))
        return {entry.index: state for entry, state in old.states(pairs)}

    def receive(self, entries: Iterable[Entry[T]], label: str | None = None) -> None:
        """Fetches entries at the current version into their tensors."""
        targets = [(entry.index, entry.incoming()) for entry in entries]
        if not targets:
            return
        self.job.fetch(
            self.version, [(index, incoming.array) for index, incoming in targets], label=label
        )
        for _, incoming in targets:
            incoming.finish()

    def states(self) -> Iterator[tuple[Entry[T], int, dict[str, T]]]:
        """The whole optimizer state of everything that trains: steps applied, and host tensors."""
        old = _Old(self.framework, self.job, self.version)
        for chunk in _chunks(list(self.trained)):
            pairs = [(entry, entry, self._opened_as[entry.group][1]) for entry in chunk]
            for entry, (applied, tensors) in old.states(pairs, whole=True):
                yield entry, applied, dict(tensors)

    def whole(self, entries: Iterable[Entry[T]]) -> dict[str, T]:
        """Tensors by their names, whole, as f32 in host memory, at the current version."""
        hosts = {entry.name: (entry, self.framework.host(entry.shape)) for entry in entries}
        arrays = [
            (entry.index, self.framework.array(host, _whole(entry)))
            for entry, host in hosts.values()
        ]
        self.job.fetch(self.version, arrays, part="", label="fetching parameters")
        return {name: host for name, (_, host) in hosts.items()}

    def state_hash(self) -> str:
        """The hash of all state at the current version."""
        return self._session.cluster.state_hash(self.job.name)

    def retire(self) -> None:
        """Gives the servers' memory back, in the background: nobody can use the model any more."""
        self._session.retire(self.job, wait=False)

    def mark(self) -> None:
        """Remembers what the tensors are now, to notice what the program writes."""
        for entry in self.entries:
            entry.mark()


class _Old(Generic[T]):
    """Reads from a job at a version."""

    def __init__(self, framework: Framework[T], job: Job, version: int) -> None:
        self._framework = framework
        self._job = job
        self._version = version

    def values(
        self, chunk: list[Entry[T]], carried: list[Entry[T] | None]
    ) -> list[tuple[Entry[T], Array]]:
        """What the entries begin with: the servers' master weights; but buffers, and what is new or
        modified, from here.

        (What batch norm writes to its buffers is not counted as a change.)
        """
        values: list[tuple[Entry[T], Array]] = []
        fetched: dict[str, list[tuple[int, Array]]] = {"": [], "master": []}
        for entry, before in zip(chunk, carried, strict=True):
            if (
                before is None
                or entry.buffer
                or before.modified
                or before.shape != entry.shape
                or before.raw != entry.raw
            ):
                values.append((entry, entry.outgoing()))
                continue
            host = self._framework.array(self._framework.host(entry.travelling_shape))
            fetched["master" if before.trained else ""].append((before.index, host))
            values.append((entry, host))
        for part, arrays in fetched.items():
            self._job.fetch(self._version, arrays, part=part, label="fetching parameters")
        return values

    @functools.cached_property
    def _applied(self) -> list[int]:
        """How many steps each tensor has been updated by."""
        return self._job.applied_steps(self._version)

    def states(
        self, pairs: list[tuple[Entry[T], Entry[T], tuple[str, ...]]], *, whole: bool = False
    ) -> list[tuple[Entry[T], State[T]]]:
        """The state tensors of ``(new, old, names)``: what this rank has of them, or the whole."""
        if not pairs:
            return []
        applied = self._applied
        fetched: dict[str, list[tuple[int, Array]]] = {}
        states: list[tuple[Entry[T], State[T]]] = []
        for entry, before, names in pairs:
            tensors: dict[str, T] = {}
            for name in names if applied[before.index] else ():
                tensors[name] = self._framework.host(entry.shape if whole else entry.local_shape)
                array = self._framework.array(tensors[name], _whole(before) if whole else None)
                fetched.setdefault(name, []).append((before.index, array))
            states.append((entry, (applied[before.index], tensors)))
        for name, arrays in fetched.items():
            self._job.fetch(self._version, arrays, part=name, label=f"fetching {name}")
        return states


def _whole(entry: Entry[T]) -> Area:
    return [0] * len(entry.shape), entry.shape


def _chunks(entries: list[Entry[T]]) -> Iterator[list[Entry[T]]]:
    chunk: list[Entry[T]] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        size += 4 * entry.framework.numel(entry.tensor)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
