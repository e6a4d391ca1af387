"""Brings this worker to a version of the model that it has not made, or has just made."""

from __future__ import annotations

from typing import Generic

from .buffers import SharedBuffers
from .gather import Gatherer
from .job import ModelJob
from .rank_steps import RankSteps
from .tensors import T


class Versions(Generic[T]):
    """What this worker holds of a version: resident and gathered parameters, buffers, and the
    settings of optimizers that run on the ranks."""

    def __init__(
        self,
        job: ModelJob[T],
        gatherer: Gatherer[T] | None,
        buffers: SharedBuffers[T],
        rank_steps: RankSteps[T] | None,
    ) -> None:
        self._job = job
        self._gatherer = gatherer
        self._buffers = buffers
        self._rank_steps = rank_steps

    def follow_step(self, resting: list[int]) -> None:
        """All ranks have made the current version together, but for ``resting``, and this one has
        received the resident parameters."""
        self._job.mark()
        if self._gatherer is not None:
            self._gatherer.new_version(together=True)
        self._buffers.receive(resting)
        self._buffers.settle()
        self._follow_ranks()

    def take(self, version: int) -> None:
        """Takes a version that this rank has not made. If this fails, the rank still has the
        earlier version, and may take this one again."""
        self._buffers.settle()
        entries = (entry for entry in self._job.trained if entry.resident)
        self._job.receive(entries, version=version)
        self._job.mark()
        self._job.version = version
        if self._gatherer is not None:
            self._gatherer.new_version()
        self._follow_ranks()

    def take_checkpoint(self) -> None:
        """Takes everything at the version to which the job was restored."""
        self._buffers.settle()
        self._buffers.follow()
        self._job.receive_resident()
        self._job.mark()
        self._follow_ranks()

    def _follow_ranks(self) -> None:
        if self._rank_steps is not None:
            self._rank_steps.follow()
