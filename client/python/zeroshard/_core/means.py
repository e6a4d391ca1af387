"""The mean gradients that the program sees in the open step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

from .entry import Entry
from .job import ModelJob
from .mean import MeanGradient, OpenGradients
from .outside import OutsideGradients
from .shown import ShownGradients
from .step_state import Step
from .tensors import T


class Means(Generic[T]):
    """The mean gradients of the parameters that a job trains, as far as the program sees them."""

    def __init__(self, job: ModelJob[T], step: Step, outside: OutsideGradients[T]) -> None:
        self._job = job
        self._step = step
        self._framework: ShownGradients[T] = job.framework
        self._outside = outside
        #: By manifest index.
        self._open: dict[int, MeanGradient[T]] = {}

    def follow_job(self) -> None:
        """Adopts the means that parameters show when a job begins."""
        self._open.clear()
        for entry in self._job.parameters:
            if entry.trained:
                self._framework.hide_outside(entry.tensor)
            mean = self._framework.shown_mean(entry.tensor)
            if mean is None:
                continue
            mean.entry = entry
            if entry.trained:
                self._open[entry.index] = mean
            else:
                self._keep_removed(mean)

    def _keep_removed(self, mean: MeanGradient[T]) -> None:
        """A parameter that the script has removed from the optimizer keeps its gradient, which
        ``zero_grad`` of the optimizer no longer drops. If this worker has no values of it any more,
        reading it is an error."""
        if not mean.is_gone:
            self._framework.set_gradient(mean.entry.tensor, mean.remaining())
            self._outside.show_removed(mean.entry)

    def find(self, entry: Entry[T]) -> MeanGradient[T] | None:
        """The mean gradient of a parameter in the open step, whether or not the program has
        replaced it. None if there is none."""
        return self._open.get(entry.index)

    def is_open(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the mean gradient belongs to the open step."""
        entry = mean.entry
        shown = self._framework.shown_mean(entry.tensor)
        return shown is mean and self._open.get(entry.index) is mean

    def add(self, entry: Entry[T], mean: MeanGradient[T]) -> None:
        """The mean gradient of a parameter belongs to the open step."""
        self._open[entry.index] = mean

    def show(
        self, gradients: OpenGradients[T], entry: Entry[T], freed: bool = False
    ) -> MeanGradient[T] | None:
        """Shows a mean gradient to the program, if the framework can. ``freed``: this rank's
        gradient is freed."""
        mean = self._framework.shown_mean(entry.tensor)
        if mean is None:
            mean = self._framework.show_mean(gradients, entry, freed)
        if mean is not None:
            self.add(entry, mean)
        return mean

    def show_unused(self, gradients: OpenGradients[T]) -> None:
        """After a backward pass, shows the means also of parameters that this rank has not used in
        it."""
        framework = self._framework
        for entry in self._job.trained:
            is_open = entry.index in self._step.progress.sent or entry.index in self._open
            if is_open or not entry.differentiable or entry.layout is not None:
                continue
            mean = framework.shown_mean(entry.tensor)
            if mean is not None and not mean.is_absent:
                continue
            if mean is None and framework.given_gradient(entry.tensor) is not None:
                mean = self.show(gradients, entry)  # from a pass under `no_sync`
            elif mean is None:
                mean = framework.show_absent(gradients, entry)
            if mean is not None:
                self._open[entry.index] = mean

    # ---- changes by the program

    @property
    def were_dropped(self) -> bool:
        """Returns whether the program has removed all gradients of the open step, as ``zero_grad``
        of a module does."""
        means = self._open.values()
        return any(map(self.is_dropped, means)) and all(map(self._has_nothing, means))

    def is_dropped(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the program has removed the gradient or set it to zero."""
        tensor = mean.entry.tensor
        if self._framework.shown_mean(tensor) is mean:
            return mean.is_zeroed
        return self._framework.given_gradient(tensor) is None

    def _has_nothing(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the gradient was dropped, or this rank has none or has not sent its
        zeros."""
        is_unsent_zero = mean.is_zero and mean.entry.index not in self._step.progress.sent
        is_none = mean.is_absent and not mean.is_edited
        return is_unsent_zero or is_none or self.is_dropped(mean)

    def drop_unused(self, used: Collection[int], gradients: dict[int, T | None]) -> None:
        """Removes those of ``gradients``, by the id of the parameter, that no rank has contributed
        to. Without ZeroShard they are None, and the program has not written to them. ``used``: the
        indices of all others."""
        for entry in self._job.trained:
            mean = self._framework.shown_mean(entry.tensor)
            if entry.index not in used and mean is not None and mean.is_absent:
                mean.drop_edits()
                gradients[id(entry.tensor)] = None

    def factors(self) -> list[float]:
        """The factors of all tensors of the job by which the program has multiplied their mean
        gradients. Empty if there are none."""
        scaled = [mean for mean in self._open.values() if mean.factor != 1.0]
        factors = [1.0] * len(self._job.entries) if scaled else []
        for mean in scaled:
            if self._framework.shown_mean(mean.entry.tensor) is mean:
                factors[mean.entry.index] = mean.factor
        return factors

    # ---- the end of an attempt

    def restart(self, *, keep: bool) -> None:
        """The step begins again without the gradients that were sent. ``keep``: parameters keep
        gradients of which this rank has no values, because the program sets them next."""
        framework = self._framework
        groups = self._job.optimizer.settings.parameters() if self._open else ()
        stepped = {id(parameter) for group in groups for parameter in group}
        for mean in self._open.values():
            tensor = mean.entry.tensor
            is_shown = framework.shown_mean(tensor) is mean
            if not is_shown or not mean.is_absent and (mean.own is not None or keep):
                pass
            elif mean.is_absent or id(tensor) in stepped:
                framework.set_gradient(tensor, None)
            else:
                self._keep_removed(mean)
            mean.is_zeroed = False
        self._open.clear()

    def end_step(self, clip_factor: float, loss_scale: float) -> None:
        """The step was made. ``clip_factor``: the factor by which it has multiplied gradients to
        clip them."""
        for mean in self._open.values():
            tensor = mean.entry.tensor
            if mean.is_absent and self._framework.shown_mean(tensor) is mean:
                # Without it the rank still contributes nothing to what the others keep.
                self._framework.set_gradient(tensor, None)
            clips = self._framework.clips(tensor)
            mean.end_step((clip_factor if clips else 1.0) / loss_scale)
        self._open.clear()
