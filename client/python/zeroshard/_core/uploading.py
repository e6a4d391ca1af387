"""Uploads what a new job begins with: parameters, buffers, and existing optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._native import Array
from .entry import Entry
from .heap import Heap
from .job import ModelJob
from .optimizer_spec import State
from .tensors import T

#: Bytes of optimizer state that are uploaded at a time.
_UPLOAD = 1 << 25


def upload_initial(
    job: ModelJob[T], states: Mapping[int, State[T]], initial: Iterable[Sequence[T]]
) -> None:
    """Uploads everything, in the first job. For the arguments see :meth:`Opening.open`."""
    # The states come first, because the job begins when the last parameter has arrived.
    _upload_states(job, states)
    sent: set[int] = set()
    heap = Heap(job.framework.nbytes(entry.tensor) for entry in job.uploaded)
    for tensors in initial:
        heap.settle()  # the tensors before these are free now
        entries = [job.entry(tensor) for tensor in tensors]
        _upload(job, [one for one in entries if job.job.uploads(one.index)], [], states)
        sent.update(entry.index for entry in entries)
    _upload(job, [one for one in job.uploaded if one.index not in sent], [], states)


def upload_changed(
    job: ModelJob[T],
    before: Mapping[str, Entry[T]],
    states: Mapping[int, State[T]],
    values: Iterable[tuple[T, T]],
) -> None:
    """Uploads everything that the servers cannot copy from the previous job, whose entries are
    ``before``, by name. For the other arguments see :meth:`Opening.reopen`."""
    _upload_states(job, states)
    sent: set[int] = set()
    for tensor, value in values:
        entry = job.entry(tensor)
        job.job.initialise([(entry.index, entry.outgoing(value))], label="uploading")
        sent.add(entry.index)
    ours = [entry for entry in job.uploaded if entry.index not in sent]
    kept = [entry for entry in ours if _continues(job, entry, before.get(entry.name))]
    indices = {entry.index for entry in kept}
    uploaded = [entry for entry in ours if entry.index not in indices]
    _upload(job, uploaded, kept, states)


def _continues(job: ModelJob[T], entry: Entry[T], before: Entry[T] | None) -> bool:
    ranks = job.optimizer.on_ranks
    if entry.kept and ranks is not None and ranks.is_given(entry.name):
        return False
    return entry.continues(before)


def _upload(
    job: ModelJob[T],
    entries: list[Entry[T]],
    kept: list[Entry[T]],
    states: Mapping[int, State[T]],
) -> None:
    """Uploads ``entries``, and confirms the servers' copies of ``kept``. ``states``: the optimizer
    state of both, by the ``id`` of its parameter, which has been uploaded."""
    ranks = job.optimizer.on_ranks
    if ranks is not None:
        for entry in (entry for entry in entries if entry.kept):
            values = entry.outgoing(ranks.initial(entry.name))
            job.job.initialise([(entry.index, values)])
        entries = [entry for entry in entries if not entry.kept]
    for applied, some in _by_applied(entries, states).items():
        arrays = [(entry.index, entry.outgoing()) for entry in some]
        job.job.initialise(arrays, applied=applied, label="uploading")
    for applied, some in _by_applied(kept, states).items():
        job.job.keep([entry.index for entry in some], applied=applied)


def _upload_states(job: ModelJob[T], states: Mapping[int, State[T]]) -> None:
    """Uploads the optimizer state of this rank's parameters, a few tensors at a time: they may come
    into being when they are read."""
    batch: dict[tuple[str, int, tuple[float, ...]], list[tuple[int, Array]]] = {}
    size = 0

    def send() -> None:
        for (part, applied, scalars), arrays in batch.items():
            job.job.initialise(arrays, part=part, applied=(applied, scalars), label="uploading")
        batch.clear()

    for entry in job.trained:
        if id(entry.tensor) not in states:
            continue
        applied, scalars, tensors = states[id(entry.tensor)]
        uploads = job.job.uploads(entry.index)
        for part in tensors if uploads or is_joint(tensors) else ():
            tensor = tensors[part]
            if uploads:
                array = job.framework.array(tensor)
                batch.setdefault((part, applied, tuple(scalars)), []).append((entry.index, array))
                size += 4 * job.framework.numel(tensor)
            if size >= _UPLOAD:
                send()
                size = 0
    send()


def is_joint(tensors: Mapping[str, Any]) -> bool:
    """Returns whether all ranks must read the tensors of a state together, in the same order, since
    each of them has a part."""
    return bool(getattr(tensors, "is_joint", False))


def _by_applied(
    entries: list[Entry[T]], states: Mapping[int, State[T]]
) -> dict[tuple[int, tuple[float, ...]], list[Entry[T]]]:
    """The entries, grouped by the steps that were applied to their state: the number, and the
    scalar state after them."""
    by_applied: dict[tuple[int, tuple[float, ...]], list[Entry[T]]] = {}
    for entry in entries:
        applied, scalars, _ = states.get(id(entry.tensor), (0, (), {}))
        by_applied.setdefault((applied, tuple(scalars)), []).append(entry)
    return by_applied
