"""The gradients of the open step: which of them were sent, and which the program has changed.

At level ``os`` all gradients are sent when the optimizer steps. At ``os_g`` and ``p_g_os`` a
gradient is sent and freed as soon as it is complete. At every level all gradients are sent when the
program looks at one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, cast

from ..errors import InvalidArgumentError
from .entry import Entry
from .job import ModelJob
from .looks import Looks
from .means import Means
from .outside import OutsideGradients
from .shown import ShownGradients
from .step_state import Phase, Step
from .tensors import T
from .traffic import Traffic
from .weak_calls import of_model

#: The remedy of errors about several optimizers of one model.
STEP_TOGETHER = (
    "the servers make one step of all of them: call step() of each after the last backward pass of "
    "every step, or shard a model for each optimizer"
)


class Gradients(Generic[T]):
    """The gradients of the parameters that a job trains."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        step: Step,
        early: bool,
        run: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``early``: a gradient is sent when it is complete. ``run`` calls a function that looks at
        gradients; if the function fails, the step begins again."""
        self._job = job
        self._traffic = traffic
        self._framework: ShownGradients[T] = job.framework
        self._step = step
        self._early = early
        #: Those of parameters that the job does not train.
        self.outside = OutsideGradients(job, step)
        self.means = Means(job, step, self.outside)
        self.looks = Looks(
            job,
            step,
            self.means,
            stay_here=not early,
            run=run,
            send_rest=of_model(self.send_rest),
        )
        #: The number of attempts that were given up.
        self.restarts = 0
        #: Parameters by id that an optimizer has stepped, and its name, while another optimizer of
        #: the model has not, and the step is still to be made.
        self.stepped: dict[int, str] = {}

    # ---- sending

    def check_not_stepped(self, entry: Entry[T]) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError` if a gradient is computed after the step
        of its optimizer."""
        stepped = self.stepped.get(id(entry.tensor))
        if stepped is not None:
            raise InvalidArgumentError(
                f"a backward pass has computed a gradient of parameter {entry.name!r} after the "
                f"step of {stepped}, and another optimizer of the model has not stepped; "
                f"{STEP_TOGETHER}"
            )

    def add(self, entry: Entry[T], *, is_complete: bool) -> None:
        """A backward pass has computed a gradient of the parameter. ``is_complete``: it was the
        last one of the step."""
        # A forward that the model's wrapper does not see leaves an interrupted step as it is: the
        # servers would drop the gradient when the next step settles it.
        may_send = is_complete and self._step.phase is not Phase.INTERRUPTED
        if self._early and may_send and not self._framework.may_differentiate(entry.tensor):
            self._send(entry)
        else:
            self.means.show(self.looks, entry)

    def set_aside(self, entry: Entry[T]) -> None:
        """Nobody knows yet whether the gradient is complete, so it waits until the program steps.
        If gradients are otherwise sent early, it does not wait in the memory of this process."""
        mean = self._framework.shown_mean(entry.tensor)
        if self._early and mean is not None and mean.own is not None:
            aside = self._framework.set_aside(mean.own)
            if aside is not None:
                mean.own = aside

    def _send(self, entry: Entry[T]) -> None:
        """Sends the gradient, or records that the parameter has none."""
        framework, progress = self._framework, self._step.sending()
        mean = framework.shown_mean(entry.tensor)
        is_absent = mean is not None and mean.is_absent
        if (
            mean is not None
            and mean.own is None
            and not is_absent
            and framework.is_stepped(entry.tensor)
        ):
            raise InvalidArgumentError(
                f"parameter {entry.name!r} has the gradient of an earlier step, which was not "
                "zeroed and is no longer available; call optimizer.zero_grad() after each step"
            )
        gradient = None if is_absent else self.current(entry)
        if gradient is None:
            progress.absent.append(entry.index)
        else:
            self._push(entry, gradient)
            mean = self.means.show(self.looks, entry, self._early)
            if self._early:
                if mean is None:
                    framework.set_gradient(entry.tensor, None)
                else:
                    mean.own = None
                framework.order_writes(gradient)
        progress.sent[entry.index] = framework.given_gradient(entry.tensor)

    def _push(self, entry: Entry[T], gradient: T) -> None:
        self._step.sending().contributed.add(entry.index)
        with self._job.connection.activity.waiting("push"):
            self._traffic.send_gradient(entry, gradient)

    def send_rest(self) -> None:
        """Sends the remaining gradients and reports the parameters without a gradient, which the
        step does not change."""
        progress = self._step.sending()
        for entry in self._job.trained:
            if entry.index not in progress.sent:
                self._send(entry)
        if progress.absent:
            self._traffic.send_absent(progress.absent)
            progress.absent = []
        with self._job.connection.activity.waiting("push"):
            self._traffic.finish_gradients()

    def send_replaced(self) -> None:
        """Sends this rank's own gradients where the program has replaced the gradient before they
        were sent, so that these count as changed."""
        progress = self._step.sending()
        for entry in self._job.trained:
            mean = self.means.find(entry)
            if mean is None or entry.index in progress.sent:
                continue
            is_replaced = self._framework.shown_mean(entry.tensor) is not mean
            if is_replaced and not self.means.is_dropped(mean) and mean.own is not None:
                self._push(entry, mean.own)
                progress.sent[entry.index] = mean

    def resend(self, gradients: dict[int, T | None]) -> None:
        """Sends other gradients in a new attempt at the step. ``gradients``: by the id of the
        parameter."""
        passes = self._step.sending().passes
        self._step.restart()
        self.looks.resend()
        progress = self._step.progress
        progress.passes = passes
        for entry in self._job.trained:
            gradient = gradients.get(id(entry.tensor))
            mean = self._framework.shown_mean(entry.tensor)
            if gradient is None:
                progress.absent.append(entry.index)
            else:
                if mean is not None:
                    self.means.add(entry, mean)
                    mean.was_sent_again(gradient)
                self._push(entry, gradient)
            progress.sent[entry.index] = self._framework.given_gradient(entry.tensor)

    # ---- what the program sees and changes

    @property
    def any_sent(self) -> bool:
        """Returns whether this rank has sent gradients of the open step."""
        return self._step.progress.phase is Phase.SENT

    def changed(self) -> list[Entry[T]]:
        """The parameters whose gradients the program has changed after they were sent."""
        return [entry for entry in self._job.trained if self._is_changed(entry)]

    def current(self, entry: Entry[T]) -> T | None:
        """A gradient as the program sees it, or this rank's contribution to it. None if the step
        does not apply it."""
        if not self._framework.is_stepped(entry.tensor):
            return None
        mean = self._framework.shown_mean(entry.tensor)
        if mean is not None and mean.is_absent and not self._early and not self._is_changed(entry):
            return None
        if mean is not None and (mean.own is None or mean.is_edited):
            return mean.to_send()
        gradient = self._framework.gradient(entry.tensor)
        if gradient is not None and mean is None and self.looks.is_unscaled:
            scaled: T = cast(Any, gradient) * self.looks.loss_scale
            return scaled
        return gradient

    def _is_changed(self, entry: Entry[T]) -> bool:
        progress = self._step.progress
        if entry.index not in progress.sent:
            return False
        is_stepped = self._framework.is_stepped(entry.tensor)
        if entry.index in progress.contributed and not is_stepped:
            return True  # frozen since
        mean = self._framework.shown_mean(entry.tensor)
        given = self._framework.given_gradient(entry.tensor)
        if given is not progress.sent[entry.index]:
            return True
        return mean is not None and (mean.is_edited or mean.is_zeroed)

    def bytes_here(self) -> int:
        """Bytes of gradients that are on this worker."""
        framework, total = self._framework, 0
        for entry in self._job.trained:
            mean = framework.shown_mean(entry.tensor)
            gradient = framework.gradient(entry.tensor) if mean is None else mean.own
            total += 0 if gradient is None else framework.nbytes(gradient)
        return total

    # ---- the begin and the end of an attempt

    def begin(self) -> Entry[T] | None:
        """Drops the gradients of the last step. Does nothing if there are gradients that no step
        has used, as far as the framework can tell; returns one of their parameters."""
        framework = self._framework
        for entry in self._job.parameters:
            is_own = framework.shown_mean(entry.tensor) is None
            has_own = is_own and framework.gradient(entry.tensor) is not None
            if has_own or entry.trained and self._step.progress.phase is not Phase.IDLE:
                return entry
        self.drop()
        return None

    def drop(self) -> None:
        """Removes the gradients of all parameters."""
        for entry in self._job.parameters:
            self._framework.set_gradient(entry.tensor, None)

    def restart(self, *, keep: bool = False) -> None:
        """Repeats the open step, without the gradients that were sent. ``keep``: parameters keep
        gradients of which this rank has no values, because the program sets them next."""
        self.restarts += 1
        self.means.restart(keep=keep)
        self.looks.restart()
        self._step.restart()

    def end_step(self, clip_factor: float) -> None:
        """The step was made. ``clip_factor``: the factor by which it has multiplied gradients to
        clip them."""
        self.means.end_step(clip_factor, self.looks.loss_scale)
        self.looks.end_step()
