"""Gradients that the program has changed after they were sent: all are sent again."""

from __future__ import annotations

import json
from typing import Generic

from .._agreement import agree, share
from .._native import hashes
from .entry import Entry
from .gradients import Gradients
from .job import ModelJob
from .program_changes import ProgramChanges
from .step_state import Step
from .tensors import T
from .traffic import Traffic


class ReplacedGradients(Generic[T]):
    """Brings the servers the gradients that the program has made of those that they have."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        step: Step,
        gradients: Gradients[T],
        changes: ProgramChanges[T],
        *,
        sends_early: bool,
    ) -> None:
        """``sends_early``: gradients that were sent are not on this worker any more."""
        self._job = job
        self._traffic = traffic
        self._step = step
        self._gradients = gradients
        self._changes = changes
        self._sends_early = sends_early

    def send(self) -> None:
        """If the program has changed gradients after they were sent, or what the job consists of,
        sends all gradients again, in which all ranks must take part."""
        gradients, in_loop = self._gradients, self._step.loop is not None
        if in_loop:
            gradients.send_replaced()
        changed = gradients.changed()
        if changed and gradients.looks.is_clipped:
            raise gradients.looks.changed_after_clipping(changed[0])
        moved = gradients.any_sent and self._changes.need_a_job
        if not changed and not moved:
            return
        if changed and in_loop:
            gradients.looks.norms()  # the answer has the ranks that rest
        resting, size = set(gradients.looks.resting), self._job.group.size
        active = [self._job.group.ranks[rank] for rank in range(size) if rank not in resting]
        current = {id(entry.tensor): gradients.current(entry) for entry in self._job.trained}
        contributed = gradients.looks.contributed
        if moved:
            self._changes.begin_job(None)
            for entry in self._job.trained:
                # A parameter that was not trained before has a gradient of this rank.
                if id(entry.tensor) not in current:
                    current[id(entry.tensor)] = gradients.current(entry)
        else:
            self._traffic.discard()
        of_ranks = share("optimizer.step", json.dumps(sorted(contributed)), active)
        gradients.means.drop_unused(contributed.union(*map(json.loads, of_ranks)), current)
        agree("optimizer.step", self._texts(changed, current), active)
        for entry in self._job.trained if self._sends_early else changed:
            mean = current.get(id(entry.tensor))
            if mean is not None:
                current[id(entry.tensor)] = gradients.looks.as_contribution(mean)
        gradients.resend(current)

    def _texts(self, changed: list[Entry[T]], current: dict[int, T | None]) -> dict[str, str]:
        """What ranks must have alike: the gradients that the program has changed. ``current``: all
        gradients, by the id of the parameter."""
        texts = {}
        for entry in changed:
            text, gradient = "none", current.get(id(entry.tensor))
            if gradient is not None:
                [value] = hashes([self._job.framework.outgoing(gradient)])
                text = f"values with the hash {value:016x}"
            texts[f"the gradient of parameter {entry.name!r}"] = text
        if self._sends_early:
            # Each rank sends the mean of all, which only counts as such if every rank sends it.
            for entry in self._job.trained:
                has = "a gradient" if current.get(id(entry.tensor)) is not None else "none"
                texts.setdefault(f"the gradient of parameter {entry.name!r}", has)
        return texts
