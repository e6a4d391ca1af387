"""The gradients of the open step: which are complete, which are on their way.

A gradient is complete when its parameter has had all the backward passes of the step. At level
``os`` that is known when the optimizer steps. At ``os_g`` and ``p_g_os`` it is sent, and freed, as
soon as it is complete: after as many passes as were announced (``accumulation_steps``,
``no_sync``), or as the steps before had at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

from ..errors import InvalidArgumentError
from .framework import T
from .job import Entry, ModelJob


class Gradients(Generic[T]):
    """Gradients of what a job trains."""

    def __init__(
        self,
        job: ModelJob[T],
        early: bool,
        accumulation_steps: int | None,
        accumulated: Callable[[T], None],
    ) -> None:
        """``accumulated`` is called after each backward pass of a parameter."""
        self._job = job
        self._early = early
        self._announced = accumulation_steps
        self._accumulated = accumulated
        #: Set by the forward: the backward that follows it is not the last of its step.
        self.hold = False
        #: Backward passes of the open step, and the most that a step had, by number in the
        #: manifest.
        self._passes: Counter[int] = Counter()
        self._most: dict[int, int] = {}
        self._sent: set[int] = set()
        #: Of those, what had no gradient, and the servers do not know it yet.
        self._absent: list[int] = []
        self._unwatch: list[Callable[[], None]] = []
        self.watch()

    def watch(self) -> None:
        """Follows the tensors of the job as it is now."""
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch = [
            self._job.framework.after_gradient(entry.tensor, self._hook(entry))
            for entry in self._job.trained
        ]
        self._passes.clear()
        self._most.clear()

    @property
    def any_sent(self) -> bool:
        """Whether the servers have gradients of the open step from this rank."""
        return bool(self._sent)

    def announce(self) -> None:
        """Some passes are held back: the one that is not is the last of its step."""
        if self._announced is None:
            self._announced = 1

    def _hook(self, entry: Entry[T]) -> Callable[[T], None]:
        def accumulated(parameter: T) -> None:
            self._count(entry)
            self._accumulated(parameter)

        return accumulated

    def _count(self, entry: Entry[T]) -> None:
        if self.hold:
            return
        self._passes[entry.index] += 1
        if not self._early:
            return
        if entry.index in self._sent:
            raise InvalidArgumentError(
                f"parameter {entry.name!r} has a gradient from one more backward pass (number "
                f"{self._passes[entry.index]}) of step {self._job.version} on rank {self._job.rank}, after its gradient "
                "was sent to the servers: say accumulation_steps= to group_sharded_parallel, or run every forward but "
                "the step's last under model.no_sync()"
            )
        expected = self._announced if self._announced is not None else self._most.get(entry.index)
        if expected is not None and self._passes[entry.index] >= expected:
            self._send(entry)

    def _send(self, entry: Entry[T]) -> None:
        """Sends a gradient, or notes that there is none."""
        framework = self._job.framework
        gradient = framework.gradient(entry.tensor)
        if gradient is None:
            self._absent.append(entry.index)
        else:
            if self._early:
                framework.set_gradient(entry.tensor, None)
            self._job.job.gradient(self._job.version, entry.index, framework.outgoing(gradient))
        self._sent.add(entry.index)

    def send_rest(self) -> None:
        """Sends what is here, and says what is not. Parameters without a gradient are not
        stepped."""
        for entry in self._job.trained:
            if entry.index not in self._sent:
                self._send(entry)
        if self._absent:
            self._job.job.absent(self._job.version, self._absent)
            self._absent = []

    def restart(self, *, learn: bool) -> None:
        """Begins the next step, or the same one again; learns from a step that was whole."""
        if learn:
            for index, passes in self._passes.items():
                self._most[index] = max(passes, self._most.get(index, 0))
        self._passes.clear()
        self._sent.clear()
        self._absent.clear()
