"""Gives all ranks the tensors of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _native
from .._connection import Connection
from .._rendezvous import ProcessGroup
from .averager import AVERAGE, Named
from .framework import Framework, T


def broadcast(
    connection: Connection,
    framework: Framework[T],
    group: ProcessGroup,
    source: int,
    tensors: Sequence[Named[T]],
) -> None:
    """All ranks of ``group`` receive the tensors of its rank ``source``, bit for bit. Every rank
    must call it."""
    tensors = [named for named in tensors if framework.numel(named[1]) > 0]
    if not tensors:
        return
    # The first rank of a job uploads.
    order = [source, *(rank for rank in range(group.size) if rank != source)]
    members = ProcessGroup(order.index(group.rank), tuple(group.ranks[rank] for rank in order))
    specs = [
        _native.TensorSpec(name, [framework.words(tensor)], buffer=True) for name, tensor in tensors
    ]
    name = connection.job_name("broadcast", members.ranks)
    job = connection.open(name, specs, [AVERAGE], members, 0)
    try:
        _transfer(job, framework, members, tensors)
    finally:
        connection.leave(job)


def _transfer(
    job: _native.Job, framework: Framework[T], members: ProcessGroup, tensors: Sequence[Named[T]]
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
