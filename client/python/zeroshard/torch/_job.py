"""A model's tensors as a job of the cluster.

What a job is never changes: which tensors it has, which of them train, the optimizer's kind. Where a program changes
one of these (unfreezes a parameter, adds a parameter group, loads a state), or writes to the parameters itself, the
next job takes over from the last version of the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._native import Array, Job, TensorSpec
from .._session import Session
from . import kinds
from ._tensors import DTYPES, Incoming, array, dtype_name, from_words, outgoing, to_words, words

#: Bytes of host memory that the move from one job to the next takes at a time, for each part of the state.
_CHUNK = 1 << 30

#: One parameter's optimizer state: steps applied, and tensors by name.
State = tuple[int, Mapping[str, Tensor]]


@dataclass
class Entry:
    """One tensor of the manifest."""

    name: str
    tensor: Tensor
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
    shape: tuple[int, ...] = field(init=False)
    requires_grad: bool = field(init=False)
    #: torch's counter of in-place changes, as of the last step.
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.tensor.shape)
        self.requires_grad = self.tensor.requires_grad
        self.version = self.tensor._version

    @property
    def modified(self) -> bool:
        """Whether the program has written to it since the last step."""
        return self.tensor._version != self.version

    def spec(self, whole: bool) -> TensorSpec:
        """What the servers must know of it."""
        shape = (words(self.tensor),) if self.raw else self.shape
        dtype = "f32" if self.raw else dtype_name(f"parameter {self.name!r}", self.tensor)
        return TensorSpec(
            self.name,
            shape,
            dtype,
            frozen=not self.trained and not self.buffer,
            buffer=self.buffer,
            group=self.group,
            whole=whole and self.trained,
            no_clip=getattr(self.tensor, "need_clip", True) is False,
        )


class ModelJob:
    """The job of one model and its optimizer, as one rank sees it."""

    def __init__(
        self,
        session: Session,
        kind: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        place: tuple[int, int, tuple[int, ...]],
        bucket_numel: int,
    ) -> None:
        self._session = session
        self._kind = kind
        self._model = model
        self._optimizer = optimizer
        self.rank, self.world, self._ranks = place
        self._bucket_numel = bucket_numel
        self.optimizer_kind = kinds.kind(optimizer)
        self.entries: list[Entry] = []
        self._by_tensor: dict[int, Entry] = {}
        self.job: Job
        self.version = 0

    def entry(self, tensor: Tensor) -> Entry:
        """The entry of a tensor of the model."""
        return self._by_tensor[id(tensor)]

    @property
    def trained(self) -> Iterator[Entry]:
        """What the servers step, in manifest order."""
        return (entry for entry in self.entries if entry.trained)

    @property
    def buffers(self) -> Iterator[Entry]:
        """The model's buffers."""
        return (entry for entry in self.entries if entry.buffer)

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        """The optimizer's hyperparameters as they are now."""
        kind = self.optimizer_kind
        return [(kind, kinds.hyperparameters(kind, group)) for group in self._optimizer.param_groups]

    def changed(self) -> bool:
        """Whether the program has changed what the job is, or written to what it trains."""
        return self._shape_of_job() != self._opened_as or any(
            entry.requires_grad != entry.tensor.requires_grad or (entry.trained and entry.modified)
            for entry in self.entries
        )

    def _shape_of_job(self) -> list[tuple[int, tuple[str, ...]]]:
        groups = zip(self._optimizer.param_groups, self.groups(), strict=True)
        return [(len(group["params"]), kinds.state_names(*values)) for group, values in groups]

    def open(self, states: Mapping[Tensor, State]) -> None:
        """Makes the first job. Parameters and buffers become rank 0's on every rank."""
        self._start()
        if self.rank == 0:
            values = [(entry, entry.tensor) for entry in self.entries]
            self._upload(values, {self.entry(tensor).index: state for tensor, state in states.items()}, "uploading")
        else:
            self.receive(self.entries, label="receiving")
        self.mark()

    def reopen(self, resident: Iterable[Entry], states: Mapping[Tensor, State] | None = None) -> None:
        """Goes on with another job from where this one is.

        Parameters that the program has written to are taken from rank 0, the others from the servers; optimizer
        state is ``states`` if given, else what the servers have, where it still fits. ``resident`` tensors get their
        values on the other ranks.
        """
        old, before, version = self.job, {entry.name: entry for entry in self.entries}, self.version
        here = {id(entry.tensor) for entry in resident}
        had = self._opened_as
        source = _Old(old, version)
        self._start()
        if self.rank == 0:
            for chunk in _chunks(self.entries):
                carried = [before.get(entry.name) for entry in chunk]
                values = source.values(chunk, carried)
                if states is None:
                    moved = self._carried_states(source, chunk, carried, had)
                else:
                    moved = {entry.index: states[entry.tensor] for entry in chunk if entry.tensor in states}
                self._upload(values, moved, "uploading")
        else:
            self.receive([entry for entry in self.entries if id(entry.tensor) in here])
        self.mark()
        self._session.retire(old)

    def _start(self) -> None:
        self.optimizer_kind = kinds.kind(self._optimizer)
        self.entries = self._describe()
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        name = self._session.name(self._kind, self._ranks)
        specs = [entry.spec(self.optimizer_kind == "lamb") for entry in self.entries]
        self._opened_as = self._shape_of_job()
        self._session.cluster.create_job(name, specs, self.groups(), self.world)
        self.job = self._session.join(name, self.rank, self._bucket_numel)
        self.version = 0

    def _describe(self) -> list[Entry]:
        group_of = {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        named: dict[int, tuple[str, Tensor]] = {}
        for name, own in self._model.named_parameters():
            named[id(own)] = (name, own)
        for number, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                # What the optimizer has besides the model's: a loss with parameters of its own.
                named.setdefault(id(parameter), (f"optimizer.{number}.{position}", parameter))
        entries: list[Entry] = []

        def add(name: str, tensor: Tensor, trained: bool, buffer: bool) -> None:
            raw = not trained and tensor.dtype not in DTYPES or buffer and tensor.dtype != torch.float32
            group = group_of.get(id(tensor), 0)
            entries.append(Entry(name, tensor, trained, buffer, group, len(entries), raw))

        for key, (name, parameter) in named.items():
            add(name, parameter, key in group_of and parameter.requires_grad, False)
        for name, tensor in self._model.named_buffers():
            add(name, tensor, False, True)
        return entries

    def _upload(self, values: list[tuple[Entry, Tensor]], states: Mapping[int, State], label: str | None) -> None:
        """Optimizer state first: with the last parameter the job begins."""
        by_part: dict[tuple[str, int], list[tuple[int, Array]]] = {}
        for index, (applied, tensors) in states.items():
            for part, tensor in tensors.items():
                by_part.setdefault((part, applied), []).append((index, array(tensor)))
        for (part, applied), arrays in by_part.items():
            self.job.initialise(arrays, part=part, applied=applied, label=label)
        by_applied: dict[int, list[tuple[int, Array]]] = {}
        for entry, tensor in values:
            sent = array(to_words(tensor)) if entry.raw and tensor is entry.tensor else outgoing(tensor)
            applied, _ = states.get(entry.index, (0, {}))
            by_applied.setdefault(applied, []).append((entry.index, sent))
        for applied, arrays in by_applied.items():
            self.job.initialise(arrays, applied=applied, label=label)

    def _carried_states(
        self, old: _Old, chunk: list[Entry], carried: list[Entry | None], old_names: list[tuple[int, tuple[str, ...]]]
    ) -> dict[int, State]:
        """The optimizer state of what trained before and trains on, where the optimizer still has the same."""
        pairs = []
        for entry, before in zip(chunk, carried, strict=True):
            if before is not None and before.trained and entry.trained and before.shape == entry.shape:
                names = self._opened_as[entry.group][1]
                if names == old_names[before.group][1]:
                    pairs.append((entry, before, names))
        return {entry.index: state for entry, state in old.states(pairs)}

    def receive(self, entries: Iterable[Entry], label: str | None = None) -> None:
        """Fetches entries at the current version into their tensors."""
        entries = list(entries)
        plain = [(entry.index, Incoming(entry.tensor)) for entry in entries if not entry.raw]
        raw = [(entry, torch.empty(words(entry.tensor))) for entry in entries if entry.raw]
        arrays = [(index, incoming.array) for index, incoming in plain]
        arrays += [(entry.index, array(received)) for entry, received in raw]
        self.job.fetch(self.version, arrays, label=label)
        for _, incoming in plain:
            incoming.finish()
        for entry, received in raw:
            from_words(received, entry.tensor)

    def states(self) -> Iterator[tuple[Entry, int, dict[str, Tensor]]]:
        """The optimizer state of everything that trains: steps applied, and host tensors."""
        old = _Old(self.job, self.version)
        for chunk in _chunks(list(self.trained)):
            pairs = [(entry, entry, self._opened_as[entry.group][1]) for entry in chunk]
            for entry, (applied, tensors) in old.states(pairs):
                yield entry, applied, dict(tensors)

    def state_hash(self) -> str:
        """The hash of all state at the current version."""
        return self._session.cluster.state_hash(self.job.name)

    def retire(self) -> None:
        """Gives the servers' memory back, in the background: nobody can use the model any more."""
        self._session.retire(self.job, wait=False)

    def mark(self) -> None:
        """Remembers what the tensors are now, to notice what the program writes."""
        for entry in self.entries:
            entry.version = entry.tensor._version
            entry.requires_grad = entry.tensor.requires_grad


class _Old:
    """Reads from a job at a version."""

    def __init__(self, job: Job, version: int) -> None:
        self._job = job
        self._version = version

    def values(self, chunk: list[Entry], carried: list[Entry | None]) -> list[tuple[Entry, Tensor]]:
        """What the entries begin with: the servers' master weights; but buffers, and what is new or modified, from here.

        (torch does not count what batch norm writes to its buffers.)
        """
        values: list[tuple[Entry, Tensor]] = []
        fetched: dict[str, list[tuple[int, Array]]] = {"": [], "master": []}
        for entry, before in zip(chunk, carried, strict=True):
            if before is None or entry.buffer or before.modified or before.shape != entry.shape or before.raw != entry.raw:
                values.append((entry, entry.tensor))
                continue
            host = torch.empty(words(entry.tensor) if entry.raw else entry.shape, dtype=torch.float32)
            fetched["master" if before.trained else ""].append((before.index, array(host)))
            values.append((entry, host))
        for part, arrays in fetched.items():
            self._job.fetch(self._version, arrays, part=part, label="fetching parameters")
        return values

    @functools.cached_property
    def _applied(self) -> list[int]:
        """How many steps each tensor has been updated by."""
        return self._job.applied_steps(self._version)

    def states(self, pairs: list[tuple[Entry, Entry, tuple[str, ...]]]) -> list[tuple[Entry, State]]:
        """The state tensors of ``(new, old, names)``."""
        if not pairs:
            return []
        applied = self._applied
        fetched: dict[str, list[tuple[int, Array]]] = {}
        states: list[tuple[Entry, State]] = []
        for entry, before, names in pairs:
            tensors: dict[str, Tensor] = {}
            for name in names if applied[before.index] else ():
                tensors[name] = torch.empty(entry.shape, dtype=torch.float32)
                fetched.setdefault(name, []).append((before.index, array(tensors[name])))
            states.append((entry, (applied[before.index], tensors)))
        for name, arrays in fetched.items():
            self._job.fetch(self._version, arrays, part=name, label=f"fetching {name}")
        return states


def _chunks(entries: list[Entry]) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        size += 4 * entry.tensor.numel()
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def optimizer_states(kind: str, optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> dict[Tensor, State]:
    """torch's state by parameter as the servers keep it; parameters that were never stepped are left out."""
    states: dict[Tensor, State] = {}
    for group in optimizer.param_groups:
        values = kinds.hyperparameters(kind, group)
        for parameter in group["params"]:
            if parameter in state and parameter.requires_grad:
                applied, tensors = kinds.from_torch(kind, values, state[parameter], parameter.shape)
                if applied:
                    states[parameter] = (applied, tensors)
    return states
