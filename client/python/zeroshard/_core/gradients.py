"""The gradients of the open step: which of them are complete, and which were sent.

A gradient is complete when its parameter has taken part in all backward passes of the step. At
level ``os`` all gradients are sent when the optimizer steps. At ``os_g`` and ``p_g_os`` a gradient
is sent and freed as soon as it is complete: after the number of passes that the program has
announced (``accumulation_steps``, ``no_sync``), or else the largest number of passes in an earlier
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

from ..errors import InvalidArgumentError
from .framework import T
from .job import Entry, ModelJob


class Gradients(Generic[T]):
    """The gradients of the parameters that a job trains."""

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
        #: Set by a forward: the backward pass that follows is not the last of its step.
        self.hold = False
        #: Backward passes in the open step, by manifest index, and the maximum over the earlier
        #: steps.
        self._passes: Counter[int] = Counter()
        self._most: dict[int, int] = {}
        self._sent: set[int] = set()
        #: Indices in ``_sent`` of parameters without a gradient that were not reported yet.
        self._absent: list[int] = []
        self._unwatch: list[Callable[[], None]] = []
        self.watch()

    def watch(self) -> None:
        """Registers hooks on the parameters that the job currently trains."""
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
        """Whether this rank has sent gradients of the open step."""
        return bool(self._sent)

    def announce(self) -> None:
        """Called when the program uses ``no_sync``: the pass outside of it is the last one of its
        step."""
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
                f"backward pass {self._passes[entry.index]} of step {self._job.version} on rank "
                f"{self._job.group.rank} has computed a gradient of parameter {entry.name!r}, "
                "whose gradient was already sent to the servers; pass accumulation_steps to "
                "group_sharded_parallel, or run all forwards but the last of a step under "
                "model.no_sync()"
            )
        expected = self._announced if self._announced is not None else self._most.get(entry.index)
        if expected is not None and self._passes[entry.index] >= expected:
            self._send(entry)

    def _send(self, entry: Entry[T]) -> None:
        """Sends the gradient, or records that the parameter has none."""
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
        """Sends the remaining gradients and reports the parameters without a gradient, which the
        step does not change."""
        for entry in self._job.trained:
            if entry.index not in self._sent:
                self._send(entry)
        if self._absent:
            self._job.job.absent(self._job.version, self._absent)
            self._absent = []

    def restart(self, *, learn: bool) -> None:
        """Begins the next step, or repeats the open one. ``learn``: the step was complete, so its
        number of backward passes counts."""
        if learn:
            for index, passes in self._passes.items():
                self._most[index] = max(passes, self._most.get(index, 0))
        self._passes.clear()
        self._sent.clear()
        self._absent.clear()
