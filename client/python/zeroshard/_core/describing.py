"""The tensors of a model and its optimizer, as entries of a job."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .entry import Entry
from .framework import Framework
from .optimizer_spec import OptimizerSpec
from .tensors import T


def describe(
    framework: Framework[T],
    model: Any,
    optimizer: OptimizerSpec[T],
    kept: Collection[int],
    fetched: Collection[int],
) -> list[Entry[T]]:
    """The entries of the next job, in manifest order: parameters, buffers, and the state of
    optimizers that run on the ranks.

    ``kept``: the ids of the parameters that have state on the servers, which they keep while they
    are frozen. ``fetched``: the ids of those that are on this worker only while they are used.
    """
    groups = optimizer.settings.parameters()
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group}
    named = {id(parameter): (name, parameter) for name, parameter in framework.parameters(model)}
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group):
            # The optimizer may have parameters outside of the model: those of a loss, for example.
            named.setdefault(id(parameter), (f"optimizer.{number}.{position}", parameter))
    entries: list[Entry[T]] = []

    def add(name: str, tensor: T, trained: bool, buffer: bool, is_state: bool = False) -> None:
        dtype = framework.dtype(tensor)
        raw = not trained and dtype is None or (buffer or is_state) and dtype != "f32"
        group = group_of.get(id(tensor), 0)
        entry = Entry(framework, name, tensor, trained, buffer, group, len(entries), raw)
        entry.optimized, entry.kept = id(tensor) in group_of, is_state
        entry.resident = not is_state and id(tensor) not in fetched
        entries.append(entry)

    for key, (name, parameter) in named.items():
        trained = key in group_of and (key in kept or framework.is_stepped(parameter))
        add(name, parameter, trained, False)
    for name, tensor in framework.buffers(model):
        add(name, tensor, False, True)
    if optimizer.on_ranks is not None:
        names = {key: name for key, (name, _) in named.items()}
        for name, tensor in optimizer.on_ranks.slots(names):
            add(name, tensor, False, False, is_state=True)
    return entries
