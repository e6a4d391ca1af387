"""Loops that may have a different number of steps on each rank: a rank whose loop has ended rests
until the loops of all ranks have."""

from __future__ import annotations

import json
from typing import Generic

from ..errors import InvalidArgumentError
from .broadcast import broadcast
from .buffers import SharedBuffers
from .entry import Entry, hashes_of
from .gradients import Gradients
from .job import ModelJob
from .program_changes import ProgramChanges
from .rank_steps import RankSteps
from .recovery import Recovery
from .step_state import Phase, Step
from .tensors import T
from .traffic import Traffic
from .versions import Versions
from .writes import hashes_of_written, written


class UnevenLoops(Generic[T]):
    """The loops of a model under ``zeroshard.torch.join``. Its methods are called in their
    order."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        step: Step,
        gradients: Gradients[T],
        recovery: Recovery[T],
        changes: ProgramChanges[T],
        versions: Versions[T],
        buffers: SharedBuffers[T],
        rank_steps: RankSteps[T] | None,
    ) -> None:
        self._job = job
        self._traffic = traffic
        self._step = step
        self._gradients = gradients
        self._recovery = recovery
        self._changes = changes
        self._versions = versions
        self._buffers = buffers
        self._rank_steps = rank_steps

    def begin_join(self, excluding: bool) -> None:
        """Called before a loop. ``excluding``: mean gradients are over the ranks whose loop has not
        ended."""
        if self._rank_steps is not None:
            self._rank_steps.check_join()
        shared = self._job.distributed
        if shared is not None:
            raise InvalidArgumentError(
                f"parameter {shared.name!r} is distributed over ranks, which therefore must have "
                "the same number of batches; join supports models that every rank has as a whole"
            )
        if self._traffic.group_size > 1:
            raise InvalidArgumentError(
                "the ranks of a group add their gradients, and must have the same number of "
                "batches; use zeroshard.torch.join without group_size"
            )
        self._step.begin_loop(excluding)

    def check_complete(self) -> None:
        """Raises an error if the loop has ended within a step."""
        self._changes.follow()
        if self._step.phase is not Phase.IDLE:
            raise InvalidArgumentError(
                f"the loop has ended after a backward pass of step {self._job.version} and before "
                "the step; call optimizer.step() or zero_grad() before it ends"
            )

    def end_evenly(self) -> None:
        """Raises :class:`~zeroshard.DisagreementError` if another rank makes a further step."""

        def discard() -> None:
            # If the other rank waits for the norm of the gradient, it receives it.
            self._traffic.send_absent(entry.index for entry in self._job.trained)
            self._job.job.flush()
            self._traffic.discard()

        self._recovery.sending(discard)
        self._gradients.restart()

    def rest(self) -> None:
        """Contributes nothing more until every rank rests."""
        version, excludes = self._job.version, self._step.excludes_resting
        self._step.begin_rest()
        rest = self._recovery.sending(lambda: self._job.job.rest(version, excludes))
        self._step.rests(rest)

    def end_join(self) -> int:
        """Waits until every rank rests, and takes the parameters of the last step; with them the
        buffers of the rank that made it, if ranks share buffers, and the parameters that are not
        trained. Returns this rank."""
        rest = self._step.rest
        with self._job.connection.activity.waiting("commit"):
            version, last = self._recovery.sending(rest.wait)
        if version != self._job.version:
            self._versions.take(version)
        self._step.caught_up()
        self._share_written(last)
        self._buffers.settle()
        return int(last)

    def leave_join(self) -> None:
        """Called after a loop, whether or not it has raised an error."""
        self._step.end_loop()

    def exchange(self, what: str, value: str) -> list[str]:
        """Returns the value of each rank. Every rank must call it, once after each loop."""
        assert self._step.loop is not None, "a loop has just ended"
        return self._job.exchange(f"{what} after loop {self._step.loop.number}", value)

    def _share_written(self, source: int) -> None:
        """All ranks take the values that rank ``source`` has written to parameters after its last
        step, which become part of the next one; and its parameters that are not trained, and its
        buffers, if ranks share them."""
        own_hashes = hashes_of_written(self._job, written(self._job))
        self._buffers.follow()
        untrained = self._untrained()
        own = [
            {index: value for index, value in enumerate(own_hashes) if value},
            hashes_of(untrained),
        ]
        ranks = [json.loads(text) for text in self.exchange("written values", json.dumps(own))]
        differ = [
            entry
            for entry in self._job.entries
            if any(
                of[0].get(str(entry.index)) != ranks[source][0].get(str(entry.index))
                for of in ranks
            )
        ]
        for entry in differ:
            if not entry.resident:
                raise InvalidArgumentError(
                    f"rank {self._job.group.ranks[source]} has written to parameter {entry.name!r} "
                    "after its last step, and the parameter is on the servers; write to it before "
                    "a step, or after the loops under zeroshard.torch.join"
                )
        if any(of[1] != ranks[source][1] for of in ranks):
            differ += untrained
        named = [(entry.name, entry.tensor) for entry in differ]
        broadcast(self._job.connection, self._job.framework, self._job.group, source, named)

    def _untrained(self) -> list[Entry[T]]:
        """The parameters that are not trained and are on every rank, and the buffers, if ranks
        share them."""
        with_buffers = self._buffers.are_shared
        return [
            entry
            for entry in self._job.entries
            if (with_buffers if entry.buffer else entry.resident and not entry.trained)
        ]
