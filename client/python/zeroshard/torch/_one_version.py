"""One version of a model and its optimizer state, for those who read it tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from .._core.job import ModelJob
from .._core.sharding import Sharding
from .._native import Array
from ..errors import OutOfMemoryError, VersionGoneError

R = TypeVar("R")

#: Fills arrays with tensors of one version, which are given by their indices, or with a part of
#: their state: see :meth:`zeroshard._native.Job.pull`.
Fetch = Callable[[list[tuple[int, Array]], str | None], None]
#: Seconds for which servers keep a version while steps are made: the longest possible.
_PIN_TIME = 600.0


@dataclass(frozen=True)
class OneVersion:
    """A version that stays available."""

    number: int
    #: The number of steps that were applied to each tensor of the job, and the scalar state of the
    #: optimizer after them.
    applied: list[tuple[int, list[float]]]
    fetch: Fetch


def fetch_at(job: ModelJob[Tensor], version: int) -> Fetch:
    """Fetches from the servers as long as they have the version."""

    def fetch(arrays: list[tuple[int, Array]], part: str | None) -> None:
        job.fetch(arrays, version=version, part=part, label="fetching parameters")

    return fetch


def read_one_version(sharding: Sharding[Tensor], read: Callable[[OneVersion], R]) -> R:
    """Calls ``read`` with the latest version, again if it does not stay available.

    The servers make no step without this rank, so that they keep the version for the thread that
    trains, and for a signal handler in it. For another thread they pin it.

    Raises :class:`~zeroshard.errors.OutOfMemoryError` if the servers have no room for the pin, and
    make steps meanwhile.
    """
    job = sharding.job
    job.check_open()

    def read_unpinned(version: int) -> R:
        job.check_not_rolled_back()
        return read(OneVersion(version, job.job.applied_steps(version), fetch_at(job, version)))

    if sharding.reads.keeps_version:
        return sharding.reads.read(read_unpinned)
    cluster = job.connection.cluster
    try:
        pinned = cluster.pin(job.job.name, optimizer_state=True, seconds=_PIN_TIME)
    except OutOfMemoryError as error:
        try:
            return sharding.reads.read(read_unpinned)
        except VersionGoneError:
            raise error from None

    def fetch(arrays: list[tuple[int, Array]], part: str | None) -> None:
        for some, of in job.parts(arrays, part):
            pinned.pull(some, part=of)

    try:
        return read(OneVersion(pinned.version, pinned.applied_steps(), fetch))
    finally:
        pinned.close()
