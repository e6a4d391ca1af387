"""Buffers that all ranks take from rank 0, such as the running statistics of batch norm."""

from __future__ import annotations

from typing import Generic

from .broadcast import offer
from .entry import Entry
from .job import ModelJob
from .step_state import Step
from .tensors import T


class SharedBuffers(Generic[T]):
    """The buffers of a model, as far as ranks share them."""

    def __init__(self, job: ModelJob[T], step: Step, *, are_shared: bool, are_saved: bool) -> None:
        """``are_saved``: checkpoints have them."""
        self._job = job
        self._are_saved = are_saved
        self._step = step
        #: ``True`` if all ranks take the buffers of rank 0.
        self.are_shared = are_shared
        #: ``True`` if the last training forward may have changed them, and the number of such
        #: forwards since the last step.
        self._differ = False
        self._changes = 0

    def before_forward(self, may_change: bool) -> None:
        """Takes the buffers of rank 0 after a training forward that no step has followed.
        ``may_change``: the forward that begins may change them."""
        # Rank 0 may be evaluating the model alone: the other ranks follow in their next forward,
        # or in the step.
        if self._differ and self._step.loop is None:
            self._offer()
        self._differ = self.are_shared and may_change
        self._changes += self._differ

    def _offer(self) -> None:
        """The ranks that call this take the buffers of rank 0, which does not wait for them."""
        job = self._job
        self.follow()
        job.end_others()
        name = f"{job.job.name}/buffers-{job.version}-{self._changes}"
        if job.job.restored is not None:
            name += f"-{job.job.restored[0]}"  # versions repeat
        named = [(entry.name, entry.tensor) for entry in job.buffers]
        offered = offer(job.connection, job.framework, job.group, 0, named, name)
        if offered is not None:
            # No rank takes them any more when the next ones are offered, or it takes them soon.
            job.add_ending(offered)

    def follow(self) -> None:
        """Finds the tensors by which the program has replaced buffers (``self.count = self.count +
        1``).

        Raises :class:`~zeroshard.InvalidArgumentError` if one has another shape or dtype.
        """
        named = dict(self._job.framework.buffers(self._job.model))
        for entry in self._job.buffers:
            tensor = named.get(entry.name)
            if tensor is not None and tensor is not entry.tensor:
                self._job.replace(entry, tensor)

    def to_send(self) -> list[Entry[T]]:
        """The buffers that go with a step: all, since batch norm's updates of them do not count as
        modifications, if ranks share them or checkpoints have them."""
        if not self.are_shared and not self._are_saved:
            return []
        self.follow()
        return list(self._job.buffers)

    def receive(self, resting: list[int]) -> None:
        """Takes the buffers of rank 0 in the step that the servers have made last, in which these
        ranks rested."""
        # Rank 0 sends none while it rests: the other ranks keep their own.
        if self.are_shared and 0 not in resting:
            self._job.receive(entry for entry in self._job.received if entry.buffer)

    def settle(self) -> None:
        """The buffers are those of a new version."""
        self._differ, self._changes = False, 0
        self._job.end_others()
