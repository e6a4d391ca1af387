"""Follows what the program has changed in a model or its optimizer since the last step: gradients
that it has dropped, the specification of the job, the state of the optimizer, and loaded values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol

from ..errors import InvalidArgumentError
from .backward import Backward
from .gather import Gatherer
from .gradients import Gradients
from .interrupts import operation
from .job import ModelJob
from .opening import Opening
from .optimizer_spec import State
from .recovery import Recovery
from .step_state import Step
from .tensors import T
from .writes import check_written_alike


class StateEdits(Protocol):
    """The optimizer's state as the program sees it, which it may change between steps."""

    def edited(self) -> Mapping[int, State[Any]] | None:
        """The whole state after the program's changes since the last step, by the ``id`` of its
        parameter. None if there are none."""

    def settle(self) -> None:
        """Called when the servers have the changes."""


class ProgramChanges(Generic[T]):
    """Follows the changes of the program, with a new job where the current one cannot change."""

    def __init__(
        self,
        job: ModelJob[T],
        opening: Opening[T],
        step: Step,
        gradients: Gradients[T],
        backward: Backward[T],
        gatherer: Gatherer[T] | None,
        recovery: Recovery[T],
        *,
        has_checkpoints: bool,
        sends_early: bool,
    ) -> None:
        """``sends_early``: gradients that were sent are not on this worker any more."""
        self._job = job
        self._opening = opening
        self._step = step
        self._gradients = gradients
        self._backward = backward
        self._gatherer = gatherer
        self._recovery = recovery
        self._has_checkpoints = has_checkpoints
        self._sends_early = sends_early
        #: What the program changes in the state of the optimizer, if it can.
        self.state_edits: StateEdits | None = None

    def follow(self) -> None:
        """Continues with a new job if the program has changed the specification of the job."""
        self._job.check_not_rolled_back()
        self._recovery.settle()
        if self._gradients.means.were_dropped:
            self._recovery.discard()
        states = None if self.state_edits is None else self.state_edits.edited()
        if self.state_edits is not None and states is not None:
            self.reopen(states)
            self.state_edits.settle()
        # Gradients that were sent belong to the current job: the next step follows the change.
        if not self._gradients.any_sent and self.need_a_job:
            self._check_may_reopen()
            check_written_alike(self._job)
            self.reopen(None)

    @property
    def need_a_job(self) -> bool:
        """Returns whether the program has changed the specification of the job."""
        return self._job.optimizer.changed(self._job.entries, self._job.framework)

    @operation
    def before(self, work: Callable[[], Any]) -> Any:
        """Follows the changes and calls ``work``, which sends something or looks at gradients."""
        self._job.check_has_parameters("gradients are used")
        self.follow()
        return self._recovery.sending(work)

    @operation
    def take_values(self) -> None:
        """All ranks take the values of rank 0, after the program has loaded them. Every rank must
        call it."""
        self.follow()
        # Otherwise they become part of the open step.
        if not self._gradients.any_sent:
            self.begin_job(None)

    @operation
    def load(self, values: Iterable[tuple[T, T]]) -> None:
        """All ranks take new values, those of ``values`` on the ranks that upload them: see
        :meth:`Opening.reopen`. Every rank must call it."""
        self.follow()
        self._check_nothing_sent("weights are loaded", "load them")
        self.begin_job(None, values)

    @operation
    def reopen(self, states: Mapping[int, State[T]] | None) -> None:
        """Continues with a new job, with ``states`` as its optimizer state if given.

        Raises :class:`~zeroshard.InvalidArgumentError` if the job has checkpoints, or if gradients
        of the open step are on the servers only, which a new job does not take over.
        """
        self._check_may_reopen()
        self._check_nothing_sent("the state of the optimizer is loaded or changed", "change it")
        # The gradients are sent again, to the new job. What the program has said of them holds.
        with self._gradients.looks.scaled_as_before():
            self._recovery.discard()
        self.begin_job(states)

    def begin_job(
        self,
        states: Mapping[int, State[T]] | None,
        values: Iterable[tuple[T, T]] | None = None,
    ) -> None:
        """Continues with a new job: see :meth:`Opening.reopen`."""
        self._check_may_reopen()
        self._job.check_has_parameters("parameters or the optimizer are changed")
        self._step.reopens()
        if self._gatherer is not None:
            self._gatherer.free_shown()
        self._opening.reopen(states, values)
        self._backward.follow_job()
        if self._gatherer is not None:
            self._gatherer.new_version(together=True)

    def _check_nothing_sent(self, event: str, advice: str) -> None:
        if self._gradients.any_sent and self._sends_early:
            raise InvalidArgumentError(
                f"{event} between backward and step {self._job.version}, after gradients were sent "
                f"to the servers; {advice} before backward, or after optimizer.step() or "
                "zero_grad()"
            )

    def _check_may_reopen(self) -> None:
        if self._has_checkpoints:
            raise InvalidArgumentError(
                "the program has changed what the servers train (unfrozen parameters, parameter "
                "groups, a loaded state), which a job with checkpoints does not support; change it "
                "before group_sharded_parallel, or train without checkpoints"
            )
        if self._step.loop is None:
            return
        resting = self._job.connection.status_of(self._job.job).resting
        if resting:
            ranks = ", ".join(str(self._job.group.ranks[rank]) for rank in resting)
            raise InvalidArgumentError(
                "the program has changed what the servers train (unfrozen parameters, parameter "
                f"groups, a loaded state) while rank {ranks} has no more batches; change it before "
                "or after the loops under zeroshard.torch.join"
            )
