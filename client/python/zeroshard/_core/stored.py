"""Reads what the servers have of a job at a version: optimizer state, and whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._native import Array, Box
from .entry import Entry
from .job import ModelJob
from .optimizer_spec import State
from .tensors import T

#: Bytes of host memory that are used at a time when the optimizer's state is fetched, for each
#: state tensor.
_CHUNK = 1 << 30


def stored_states(
    job: ModelJob[T],
    version: int,
    only: T | None = None,
    box: Callable[[Entry[T], str], Box] | None = None,
) -> Iterator[tuple[Entry[T], State[T]]]:
    """The optimizer state at a version, of all trained entries that were updated, or of one of
    them. ``box``: the part of each state tensor; by default the whole."""
    job.check_open()
    job.check_not_rolled_back()
    applied = job.job.applied_steps(version)
    updated = [
        entry
        for entry in job.trained
        if applied[entry.index][0] and (only is None or entry.tensor is only)
    ]
    for chunk in _chunks(updated):
        fetched: dict[str, list[tuple[int, Array]]] = {}
        states: list[dict[str, T]] = []
        for entry in chunk:
            names = job.optimizer.state_names(entry)
            boxes = {
                name: Box.whole(entry.shape) if box is None else box(entry, name) for name in names
            }
            tensors = {name: job.framework.host(one.size) for name, one in boxes.items()}
            for name, tensor in tensors.items():
                if boxes[name].numel:
                    array = job.framework.array(tensor, boxes[name])
                    fetched.setdefault(name, []).append((entry.index, array))
            states.append(tensors)
        for name, arrays in fetched.items():
            job.fetch(arrays, version=version, part=name, label=f"fetching {name}")
        for entry, tensors in zip(chunk, states, strict=True):
            yield entry, (*applied[entry.index], tensors)


def whole(job: ModelJob[T], entries: Iterable[Entry[T]], version: int) -> dict[str, T]:
    """Whole tensors by name, as f32 in host memory, at a version."""
    hosts = {entry.name: (entry, job.framework.host(entry.shape)) for entry in entries}
    arrays = [
        (entry.index, job.framework.array(host, Box.whole(entry.shape)))
        for entry, host in hosts.values()
    ]
    job.fetch(arrays, version=version, part="", label="fetching parameters")
    return {name: host for name, (_, host) in hosts.items()}


def _chunks(entries: list[Entry[Any]]) -> Iterator[list[Entry[Any]]]:
    chunk: list[Entry[Any]] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        size += 4 * entry.framework.numel(entry.tensor)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
