"""Gives all ranks the tensors of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _native
from .._connection import Connection
from .._rendezvous import ProcessGroup
from .averager import AVERAGE, Named
from .tensors import T, Tensors


def broadcast(
    connection: Connection,
    framework: Tensors[T],
    group: ProcessGroup,
    source: int,
    tensors: Sequence[Named[T]],
) -> None:
    """All ranks of ``group`` receive the tensors of its rank ``source``, bit for bit. Every rank
    must call it."""
    members = _members(group, source)
    if any(framework.numel(tensor) > 0 for _, tensor in tensors):
        name = connection.job_name("broadcast", members.ranks)
        job = offer(connection, framework, group, source, tensors, name)
        if job is not None:
            connection.leave(job)


def offer(
    connection: Connection,
    framework: Tensors[T],
    group: ProcessGroup,
    source: int,
    tensors: Sequence[Named[T]],
    name: str,
) -> _native.Job | None:
    """As :func:`broadcast`, in a job that the caller names. Rank ``source`` does not wait for the
    others, which receive its tensors when they call it, and need not. Returns its job, which it
    leaves when no other rank may call it any more. None on the other ranks, and without values."""
    members = _members(group, source)
    tensors = [named for named in tensors if framework.numel(named[1]) > 0]
    if not tensors:
        return None
    specs = [
        _native.TensorSpec(name, [framework.words(tensor)], buffer=True) for name, tensor in tensors
    ]
    job = connection.open(name, specs, [AVERAGE], members, 0)
    try:
        _transfer(job, framework, members, tensors)
    except BaseException:
        connection.leave(job)
        raise
    if members.rank == 0:
        return job
    connection.leave(job)
    return None


def _members(group: ProcessGroup, source: int) -> ProcessGroup:
    """The ranks of a broadcast. The first rank of a job uploads."""
    order = [source, *(rank for rank in range(group.size) if rank != source)]
    return ProcessGroup(order.index(group.rank), tuple(group.ranks[rank] for rank in order))


def _transfer(
    job: _native.Job, framework: Tensors[T], members: ProcessGroup, tensors: Sequence[Named[T]]
) -> None:
    if members.rank == 0:
        arrays = [framework.outgoing_words(tensor) for _, tensor in tensors]
        job.initialise(list(enumerate(arrays)))
        job.initialised()
    else:
        targets = [framework.incoming_words(tensor) for _, tensor in tensors]
        job.fetch(0, [(index, target.array) for index, target in enumerate(targets)], part="")
        for target in targets:
            target.finish()
