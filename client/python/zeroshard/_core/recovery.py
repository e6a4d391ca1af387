"""Errors within a step, and how this rank continues after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from ..errors import RolledBackError, StepAbortedError, StepMismatchError
from .buffers import SharedBuffers
from .gather import Gatherer
from .gradients import Gradients
from .interrupts import operation
from .job import ModelJob
from .step_state import Phase, Step, StepStateError
from .tensors import T
from .traffic import Traffic
from .versions import Versions


class Recovery(Generic[T]):
    """Ends attempts at steps that cannot go on."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        step: Step,
        gradients: Gradients[T],
        gatherer: Gatherer[T] | None,
        buffers: SharedBuffers[T],
        versions: Versions[T],
    ) -> None:
        self._job = job
        self._traffic = traffic
        self._step = step
        self._gradients = gradients
        self._gatherer = gatherer
        self._buffers = buffers
        self._versions = versions

    def sending(self, work: Callable[[], Any], *, keep: bool = False) -> Any:
        """Calls ``work``, which sends something. If it fails, the step begins again without
        gradients. For ``keep`` see :meth:`Gradients.restart`."""
        try:
            return work()
        except StepStateError:
            raise  # it has sent nothing, and another call may be within the step
        except BaseException as error:
            self._traffic.forget()
            self._gradients.restart(keep=keep)
            # The servers have dropped an aborted step. After any other error, or Ctrl-C, they may
            # have a part of the step.
            self._step.failed(dropped=isinstance(error, (StepAbortedError, RolledBackError)))
            raise

    @operation
    def discard(self, *, keep: bool = False) -> None:
        """Makes the servers drop the gradients that were sent for the open step. Every rank must
        call it. For ``keep`` see :meth:`Gradients.restart`."""
        if self._gradients.any_sent:
            try:
                self.sending(self._traffic.discard, keep=keep)
            except StepAbortedError:
                pass  # the servers have already dropped them
        self._gradients.restart(keep=keep)

    def settle(self) -> None:
        """Takes the version that other ranks may have made meanwhile, and makes the servers drop
        their part of an interrupted step, so that it is not mixed with the next attempt."""
        if self._step.phase is Phase.BEHIND:
            version = self._job.current_version()
            if version != self._job.version:
                self._versions.take(version)
            self._step.caught_up()
        if self._step.phase is Phase.INTERRUPTED:
            made = self._decided()
            if made is not None:
                self._versions.take(made)
                if self._step.loop is None:
                    self._buffers.receive(resting=[])
            self._step.settled()

    def _decided(self) -> int | None:
        """Makes the servers drop their part of an interrupted step. Returns the version that they
        have made if it was decided before the interruption: the next step starts from it."""
        voted = self._step.voted
        if voted is not None and voted < self._job.version:
            return self._job.version  # this rank was taking it
        try:
            self._traffic.discard()
        except StepAbortedError:
            pass  # the servers have already dropped it
        except StepMismatchError:
            return self._job.version + 1
        return None

    def abandon(self) -> None:
        """Drops everything that this worker has of the open step, which the servers have
        dropped."""
        self._traffic.forget()
        self._gradients.restart()
        self._gradients.drop()
        self._step.abandon()
        if self._gatherer is not None:
            self._gatherer.restart()

    @operation
    def roll_back(self) -> None:
        """Follows the job to the checkpoint to which it has returned, if it has, and drops
        everything of the steps after it."""
        while self._job.is_rolled_back:
            try:
                self._job.follow_restored()
                self.abandon()
                self._step.rolled_back()
                self._versions.take_checkpoint()
            except RolledBackError:
                # Another server was lost meanwhile.
                if not self._job.is_rolled_back:
                    raise
