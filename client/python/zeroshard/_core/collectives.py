"""Transfers between the ranks of a group, by means of the framework."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Literal, TypeAlias

from .._rendezvous import ProcessGroup
from ..errors import InvalidArgumentError, UnavailableError
from .tensors import T

#: The number of ranks of a group, or "host": the ranks that a launcher has started on this host.
GroupSize: TypeAlias = int | Literal["host"]


class Collectives(ABC, Generic[T]):
    """Collective operations of a group on contiguous f32 tensors in host memory, whose words are
    transferred as they are. All ranks call the same operations in the same order."""

    #: The errors of the framework's operations.
    errors: ClassVar[tuple[type[Exception], ...]] = (RuntimeError,)

    def __init__(self, ranks: Sequence[int]) -> None:
        #: The ranks of the group, as ranks of the program.
        self.ranks = tuple(ranks)

    def run(self, operation: Callable[[], object]) -> None:
        """Runs an operation of the framework.

        Raises :class:`~zeroshard.UnavailableError` if it fails.
        """
        try:
            operation()
        except self.errors as error:
            ranks = ", ".join(map(str, self.ranks))
            raise UnavailableError(
                f"ranks {ranks} could not exchange gradients or parameters ({error}); if one of "
                "them has ended, start all ranks of the group again"
            ) from error

    @abstractmethod
    def all_gather_numbers(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The numbers that each rank has passed: equally many, each of at most 64 bits."""

    @abstractmethod
    def all_gather(self, part: T, parts: T) -> None:
        """Fills ``parts`` with the ``part`` of each rank, all of which have the same size."""

    @abstractmethod
    def all_to_all(
        self,
        sent: T,
        sent_words: Sequence[int],
        received: T,
        received_words: Sequence[int],
    ) -> None:
        """Sends a part of ``sent`` to each rank, and fills ``received`` with the parts from each of
        them. ``sent_words`` and ``received_words`` have the sizes of the parts by rank."""


def group_of(size: GroupSize, ranks: ProcessGroup) -> tuple[int, ...]:
    """The group of this rank, as ranks of the program. ``size`` ranks that follow each other in
    ``ranks`` form a group.

    Raises :class:`~zeroshard.InvalidArgumentError` if the size does not divide the number of ranks.
    """
    size = _on_host(os.environ) if size == "host" else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidArgumentError(
            f"group_size is {size!r}; it must be a number of ranks, 1 or more, or 'host'"
        )
    if ranks.size % size:
        raise InvalidArgumentError(
            f"group_size is {size}, which does not divide the number of ranks, {ranks.size}; pass "
            "a size with which all groups have the same number of ranks"
        )
    first = ranks.rank - ranks.rank % size
    return ranks.ranks[first : first + size]


def _on_host(environment: Mapping[str, str]) -> int:
    for name in ("LOCAL_WORLD_SIZE", "PADDLE_LOCAL_SIZE"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    raise InvalidArgumentError(
        "group_size is 'host', and no launcher has set LOCAL_WORLD_SIZE or PADDLE_LOCAL_SIZE; "
        "start the program with torchrun or paddle.distributed.launch, or pass the number of ranks "
        "of a group"
    )
