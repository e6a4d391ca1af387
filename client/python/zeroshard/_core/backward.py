"""What happens in backward passes: they are counted for each parameter, and a gradient that is
complete is sent, or shown to the program as the mean over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic

from .entry import Entry
from .gradients import Gradients
from .interrupts import operation
from .job import ModelJob
from .parameters import Hook
from .shown import ShownGradients
from .step_state import Step
from .tensors import T
from .weak_calls import weakly


class Backward(Generic[T]):
    """The backward passes of a model.

    A gradient is complete after the number of passes that the program has announced
    (``accumulation_steps``, ``no_sync``), or else the largest number of passes in an earlier step.
    """

    def __init__(
        self,
        job: ModelJob[T],
        step: Step,
        gradients: Gradients[T],
        announced: int | None,
        accumulated: Callable[[T], None],
    ) -> None:
        """``announced``: the number of passes in each step, if the program has said so.
        ``accumulated`` is called after each pass of a parameter."""
        self._job = job
        self._framework: ShownGradients[T] = job.framework
        self._step = step
        self._gradients = gradients
        self._announced = announced
        self._accumulated = accumulated
        #: Set by a forward: the backward pass that follows is not the last of its step.
        self.hold = False
        #: The maximum of the numbers of passes in the earlier steps, by manifest index.
        self._most: dict[int, int] = {}
        #: By index, of the parameters that were not frozen.
        self._hooks: dict[int, Hook] = {}
        #: The last backward pass that has computed gradients.
        self._running: object = None
        #: The number of gradients that were computed.
        self.computed = 0
        self.follow_job()

    # ---- hooks

    def follow_job(self) -> None:
        """Registers hooks on the parameters that the job currently trains."""
        self._register_hooks()
        self._gradients.means.follow_job()
        self._step.progress.passes.clear()
        self._most.clear()

    def follow_hooks(self) -> None:
        """The program's hooks get a gradient before it is sent, also those that it has registered
        since. Parameters that the program has unfrozen get their hooks."""
        missing = (entry.index not in self._hooks for entry in self._hooked())
        if any(missing) or not all(hook.is_last for hook in self._hooks.values()):
            self._register_hooks()

    def unwatch(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _register_hooks(self) -> None:
        self.unwatch()
        self._hooks = {
            entry.index: self._framework.after_gradient(
                entry.tensor, weakly(self, Backward._has_computed, weakref.ref(entry))
            )
            for entry in self._hooked()
        }

    def _hooked(self) -> Iterator[Entry[T]]:
        """The entries that have a hook. A frozen parameter takes none."""
        yield from (entry for entry in self._job.trained if entry.differentiable)
        outside = self._gradients.outside
        yield from (entry for entry in outside.entries if entry.differentiable)

    # ---- passes

    def announce(self) -> None:
        """Called when the program uses ``no_sync``: the pass outside of it is the last one of its
        step."""
        if self._announced is None:
            self._announced = 1

    def learn(self) -> None:
        """The step was complete, so its numbers of passes count."""
        for index, passes in self._step.progress.passes.items():
            self._most[index] = max(passes, self._most.get(index, 0))

    def _has_computed(self, of_entry: weakref.ref[Entry[T]], parameter: T) -> None:
        entry = of_entry()
        if entry is not None:
            self._count(entry)
            self._accumulated(parameter)

    @operation
    def _count(self, entry: Entry[T]) -> None:
        self._job.check_has_parameters("backward computes a gradient")
        self.computed += 1
        if self.hold:
            return
        if not self._gradients.looks.is_alone:
            self._follow_pass()
        if entry.trained:
            self._count_trained(entry)

    def _count_trained(self, entry: Entry[T]) -> None:
        self._gradients.check_not_stepped(entry)
        looks = self._gradients.looks
        mean = self._framework.shown_mean(entry.tensor)
        if mean is not None and mean.own is None and not looks.is_open(mean):
            return  # it was added to a gradient of an earlier step, which is not sent again
        # Clipped gradients that are sent again to a new job were sent before.
        if entry.index in self._step.progress.sent or looks.is_clipped:
            raise looks.already_sent(entry)
        passes = self._step.computed(entry.index)
        expected = self._announced if self._announced is not None else self._most.get(entry.index)
        self._gradients.add(entry, is_complete=expected is not None and passes >= expected)
        if expected is None:
            self._gradients.set_aside(entry)

    def _follow_pass(self) -> None:
        """Called in a backward pass. After it, the program sees the mean of every gradient, also of
        parameters that this rank has not used in the pass."""
        running = self._framework.backward_pass()
        if running != self._running:
            self._running = running
            self._framework.after_backward(weakly(self, Backward._pass_is_over))

    def _pass_is_over(self) -> None:
        self._running = None
        self._gradients.means.show_unused(self._gradients.looks)
        self._gradients.outside.show()
