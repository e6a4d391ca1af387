"""The gradients of the open step: which of them are complete, and which were sent.

A gradient is complete when its parameter has taken part in all backward passes of the step. At
level ``os`` all gradients are sent when the optimizer steps. At ``os_g`` and ``p_g_os`` a gradient
is sent and freed as soon as it is complete: after the number of passes that the program has
announced (``accumulation_steps``, ``no_sync``), or else the largest number of passes in an earlier
step. At every level all gradients are sent when the program looks at one.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, cast

from .._native import Box
from .._rendezvous import ProcessGroup
from ..errors import InvalidArgumentError, TimeoutError
from .entry import Entry
from .framework import Hook, T
from .interrupts import operation
from .job import ModelJob
from .mean import MeanGradient
from .outside import LOOK_TOGETHER, OutsideGradients


class Gradients(Generic[T]):
    """The gradients of the parameters that a job trains."""

    def __init__(
        self,
        job: ModelJob[T],
        early: bool,
        accumulation_steps: int | None,
        accumulated: Callable[[T], None],
        run: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``accumulated`` is called after each backward pass of a parameter. ``run`` calls a
        function that looks at gradients; if the function fails, the step begins again."""
        self._job = job
        #: Those of parameters that the job does not train.
        self.outside = OutsideGradients(job)
        self._early = early
        self._announced = accumulation_steps
        self._accumulated = accumulated
        self._run = run
        #: The factor by which the loss was multiplied, as far as the program has said so.
        self.loss_scale = 1.0
        #: ``True`` if gradients that the program sets are divided by it already.
        self._unscaled = False
        #: The factor by which the step will multiply gradients to clip them.
        self._clip_factor: float | None = None
        #: ``True`` if mean gradients are over the ranks that do not rest.
        self.excluding = False
        #: The ranks that rest, according to the last call that has asked for norms.
        self.resting: list[int] = []
        #: Set by a forward: the backward pass that follows is not the last of its step.
        self.hold = False
        #: Backward passes in the open step, by manifest index, and the maximum over the earlier
        #: steps.
        self._passes: Counter[int] = Counter()
        self._most: dict[int, int] = {}
        #: By the index of a parameter whose gradient was sent: the gradient that the program sees.
        self._sent: dict[int, object] = {}
        #: The indices in ``_sent`` of parameters whose gradient this rank has contributed.
        self._contributed: set[int] = set()
        #: The mean gradients that the program sees.
        self._means: dict[int, MeanGradient[T]] = {}
        self._norms: list[float] | None = None
        #: Indices in ``_sent`` of parameters without a gradient that were not reported yet.
        self._absent: list[int] = []
        #: By index, of the parameters that were not frozen.
        self._hooks: dict[int, Hook] = {}
        #: The last backward pass that has computed gradients.
        self._backward_pass: object = None
        #: The number of gradients that were computed, and of steps that began again.
        self.events = 0
        self.watch()

    def watch(self) -> None:
        """Registers hooks on the parameters that the job currently trains."""
        self._register_hooks()
        self._means.clear()
        framework = self._job.framework
        for entry in self._job.parameters:
            if entry.trained:
                framework.hide_outside(entry.tensor)
            mean = framework.shown_mean(entry.tensor)
            if mean is None:
                continue
            mean.entry = entry
            if entry.trained:
                self._means[entry.index] = mean
            else:
                self._keep_removed(mean)
        self._passes.clear()
        self._most.clear()

    def _keep_removed(self, mean: MeanGradient[T]) -> None:
        """A parameter that the script has removed from the optimizer keeps its gradient, which
        ``zero_grad`` of the optimizer no longer drops. If this worker has no values of it any more,
        reading it is an error."""
        if not mean.is_gone:
            self._job.framework.set_gradient(mean.entry.tensor, mean.remaining())
            self.outside.show_removed(mean.entry)

    def unwatch(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _register_hooks(self) -> None:
        self.unwatch()
        self._hooks = {
            entry.index: self._job.framework.after_gradient(entry.tensor, self._hook(entry))
            for entry in self._hooked()
        }

    def _hooked(self) -> Iterator[Entry[T]]:
        """The entries that have a hook. A frozen parameter takes none."""
        yield from (entry for entry in self._job.trained if entry.differentiable)
        yield from (entry for entry in self.outside.entries if entry.differentiable)

    def follow_hooks(self) -> None:
        """The program's hooks get a gradient before it is sent, also those that it has registered
        since. Parameters that the program has unfrozen get their hooks."""
        missing = (entry.index not in self._hooks for entry in self._hooked())
        if any(missing) or not all(hook.is_last for hook in self._hooks.values()):
            self._register_hooks()

    @property
    def any_sent(self) -> bool:
        """Returns whether this rank has sent gradients of the open step."""
        return bool(self._sent)

    @property
    def is_complete(self) -> bool:
        """Returns whether the open step has had no backward pass whose gradients are sent."""
        return not self._passes and not self._sent

    def announce(self) -> None:
        """Called when the program uses ``no_sync``: the pass outside of it is the last one of its
        step."""
        if self._announced is None:
            self._announced = 1

    def _hook(self, entry: Entry[T]) -> Callable[[T], None]:
        # Weak: the parameter has the hook, and Python cannot find a cycle through a parameter.
        of_gradients, of_entry = weakref.ref(self), weakref.ref(entry)

        def accumulated(parameter: T) -> None:
            gradients, entry = of_gradients(), of_entry()
            if gradients is not None and entry is not None:
                gradients._count(entry)
                gradients._accumulated(parameter)

        return accumulated

    @operation
    def _count(self, entry: Entry[T]) -> None:
        self.events += 1
        if self.hold:
            return
        if not self.is_alone:
            self._follow_backward()
        if not entry.trained:
            return
        mean = self._job.framework.shown_mean(entry.tensor)
        if mean is not None and mean.own is None and not self.is_open(mean):
            return  # it was added to a gradient of an earlier step, which is not sent again
        # Clipped gradients that are sent again to a new job were sent before.
        if entry.index in self._sent or self.is_clipped:
            raise self.already_sent(entry)
        self._passes[entry.index] += 1
        expected = self._announced if self._announced is not None else self._most.get(entry.index)
        is_complete = expected is not None and self._passes[entry.index] >= expected
        if self._early and is_complete and not self._job.framework.may_differentiate(entry.tensor):
            self._send(entry)
        else:
            self._show(entry)

    def _follow_backward(self) -> None:
        """Called in a backward pass. After it, the program sees the mean of every gradient, also of
        parameters that this rank has not used in the pass."""
        running = self._job.framework.backward_pass()
        if running == self._backward_pass:
            return
        self._backward_pass = running
        of_gradients = weakref.ref(self)

        def is_over() -> None:
            gradients = of_gradients()
            if gradients is not None:
                gradients._backward_pass = None
                gradients._show_unused()
                gradients.outside.show()

        self._job.framework.after_backward(is_over)

    def _show_unused(self) -> None:
        framework = self._job.framework
        for entry in self._job.trained:
            is_open = entry.index in self._sent or entry.index in self._means
            if is_open or not entry.differentiable or entry.layout is not None:
                continue
            mean = framework.shown_mean(entry.tensor)
            if mean is not None and not mean.is_absent:
                continue
            if mean is None and framework.given_gradient(entry.tensor) is not None:
                mean = self._show(entry)  # from a pass under `no_sync`
            elif mean is None:
                mean = framework.show_absent(self, entry)
            if mean is not None:
                self._means[entry.index] = mean

    def already_sent(self, entry: Entry[T]) -> InvalidArgumentError:
        """The error for a gradient that is computed after it was sent."""
        remedy = (
            "look at gradients after the last backward pass of a step"
            if self._norms is not None or self._clip_factor is not None
            else "pass accumulation_steps to group_sharded_parallel"
        )
        return InvalidArgumentError(
            f"backward pass {self._passes[entry.index] + 1} of step {self._job.version} on rank "
            f"{self._job.group.rank} has computed a gradient of parameter {entry.name!r}, whose "
            f"gradient was already sent to the servers; {remedy}, or run all forwards but the last "
            "of a step under model.no_sync(), and after an interrupted step (Ctrl-C) call "
            "optimizer.zero_grad() first"
        )

    def _show(self, entry: Entry[T], freed: bool = False) -> MeanGradient[T] | None:
        """Shows the mean gradient to the program, if the framework can. ``freed``: this rank's
        gradient is freed."""
        framework = self._job.framework
        mean = framework.shown_mean(entry.tensor)
        if mean is None:
            mean = framework.show_mean(self, entry, freed)
        if mean is not None:
            self._means[entry.index] = mean
        return mean

    def _send(self, entry: Entry[T]) -> None:
        """Sends the gradient, or records that the parameter has none."""
        framework = self._job.framework
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
            self._absent.append(entry.index)
        else:
            self._push(entry, gradient)
            mean = self._show(entry, self._early)
            if self._early:
                if mean is None:
                    framework.set_gradient(entry.tensor, None)
                else:
                    mean.own = None
                framework.order_writes(gradient)
        self._sent[entry.index] = framework.given_gradient(entry.tensor)

    def _push(self, entry: Entry[T], gradient: T) -> None:
        self._contributed.add(entry.index)
        with self._job.connection.activity.waiting("push"):
            self._job.send_gradient(entry, gradient)

    def bytes_here(self) -> int:
        """Bytes of gradients that are on this worker."""
        framework, total = self._job.framework, 0
        for entry in self._job.trained:
            mean = framework.shown_mean(entry.tensor)
            gradient = framework.gradient(entry.tensor) if mean is None else mean.own
            total += 0 if gradient is None else framework.nbytes(gradient)
        return total

    # ---- for mean gradients

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self._job.group

    @property
    def stay_here(self) -> bool:
        """Returns whether every rank keeps its own gradients until the program drops them."""
        return not self._early

    @property
    def is_alone(self) -> bool:
        """Returns whether there is only one rank."""
        return self._job.group.size == 1

    def is_open(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the mean gradient belongs to the open step."""
        entry = mean.entry
        shown = self._job.framework.shown_mean(entry.tensor)
        return shown is mean and self._means.get(entry.index) is mean

    def is_sent(self, mean: MeanGradient[T]) -> bool:
        """Returns whether this rank's contribution to it was sent."""
        return self.is_open(mean) and mean.entry.index in self._sent

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward pass is running."""
        return self._job.framework.in_backward()

    def norms(self) -> list[float]:
        """The norm of each tensor's mean gradient, which includes the loss scale. Sends the
        remaining gradients, and waits until those of all ranks have arrived."""
        if self._norms is None:
            if self.in_backward:
                raise InvalidArgumentError(
                    "a gradient is used during a backward pass after it was sent to the servers; "
                    "use it after backward(), or register hooks on the parameter before the "
                    "forward, which then get the gradient of this rank"
                )
            self._norms = self._run(self._reduce)
        return self._norms

    def norms_of_look(self) -> list[float]:
        """As :meth:`norms`, when the program looks at a gradient."""
        try:
            return self.norms()
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {LOOK_TOGETHER}") from error

    def shown_scale(self, entry: Entry[T]) -> float:
        """The factor of a mean gradient in what the program sees: it removes the loss scale, and
        clips the gradient if the program has called for it."""
        return self.clipping(entry) / self.loss_scale

    def _reduce(self) -> list[float]:
        self.send_rest()
        with self._job.connection.activity.waiting("commit"):
            _, norms, self.resting = self._job.job.reduce(self._job.version, 1.0)
        return norms

    def fetch(self, entry: Entry[T]) -> tuple[T, float]:
        """The sum of the gradients over the ranks as a host tensor, and the number by which the
        step divides it."""
        host = self._job.framework.host(entry.shape)
        array = self._job.framework.array(host, Box.whole(entry.shape))

        def receive() -> None:
            with self._job.connection.activity.waiting("pull"):
                self._job.job.gradient_sum(self._job.version, entry.index, array)

        self._run(receive)
        divisor = self._job.job.divisor(entry.index)
        return host, divisor * self._active / self._job.group.size if self.excluding else divisor

    @property
    def _active(self) -> int:
        return self._job.group.size - len(self.resting)

    def as_contribution(self, mean: T) -> T:
        """A mean gradient as values that every rank that does not rest sends: their mean over all
        ranks is the same again."""
        if self.excluding or not self.resting:
            return mean
        scaled: T = cast(Any, mean) * (self._job.group.size / self._active)
        return scaled

    def clipping(self, entry: Entry[T]) -> float:
        """The factor by which the step will multiply a gradient to clip it."""
        if self._clip_factor is None or not self._job.framework.clips(entry.tensor):
            return 1.0
        return self._clip_factor

    @property
    def is_clipped(self) -> bool:
        """Returns whether the step will clip the gradients."""
        return self._clip_factor is not None

    def changed_after_clipping(self, entry: Entry[T]) -> InvalidArgumentError:
        """The error for a gradient that the program changes after the servers were told to clip."""
        return InvalidArgumentError(
            f"the gradient of parameter {entry.name!r} was changed after clip_grad_norm_ of "
            "ZeroShard; change gradients before it, or use torch.nn.utils.clip_grad_norm_"
        )

    # ---- for the optimizer

    def clip(self, max_norm: float) -> float:
        """The step will clip the gradients to ``max_norm``. Returns their global norm."""
        factors = self.factors() or [1.0] * len(self._job.entries)
        clipped = [entry for entry in self._job.trained if self._job.framework.clips(entry.tensor)]
        norms = self.norms()
        squares = [(norms[entry.index] * factors[entry.index]) ** 2 for entry in clipped]
        norm = math.sqrt(math.fsum(squares)) / self.loss_scale
        self._clip_factor = max_norm / max(norm, max_norm)
        for entry in clipped:
            mean = self._means.get(entry.index)
            if mean is not None:
                mean.clip(self._clip_factor)
        return norm

    def clip_sets(self, sets: Iterable[tuple[Iterable[T], float]]) -> list[float]:
        """The factors of all tensors of the job that clip the mean gradients of each set of
        parameters to a norm of its own, multiplied by those of the program. Every rank must call
        it."""
        factors = self.factors() or [1.0] * len(self._job.entries)
        norms = self.norms()
        clipped = {
            id(entry.tensor): entry.index
            for entry in self._job.trained
            if self._job.framework.clips(entry.tensor)
        }
        for parameters, max_norm in sets:
            indices = [clipped[id(each)] for each in parameters if id(each) in clipped]
            norm = math.hypot(*(factors[index] * norms[index] for index in indices))
            norm /= self.loss_scale
            if max_norm < norm < math.inf:
                for index in indices:
                    factors[index] *= max_norm / norm
        return factors

    def unscale(self, loss_scale: float) -> None:
        """The program has divided its gradients by the loss scale."""
        self.loss_scale, self._unscaled = loss_scale, True

    def factors(self) -> list[float]:
        """The factors of all tensors of the job by which the program has multiplied their mean
        gradients. Empty if there are none."""
        scaled = [mean for mean in self._means.values() if mean.factor != 1.0]
        factors = [1.0] * len(self._job.entries) if scaled else []
        for mean in scaled:
            if self._job.framework.shown_mean(mean.entry.tensor) is mean:
                factors[mean.entry.index] = mean.factor
        return factors

    # ---- changes by the program

    @property
    def were_dropped(self) -> bool:
        """Returns whether the program has removed all gradients of the open step, as ``zero_grad``
        of a module does."""
        means = self._means.values()
        return any(map(self._is_dropped, means)) and all(map(self._has_nothing, means))

    def _is_dropped(self, mean: MeanGradient[T]) -> bool:
        tensor = mean.entry.tensor
        if self._job.framework.shown_mean(tensor) is mean:
            return mean.is_zeroed
        return self._job.framework.given_gradient(tensor) is None

    def _has_nothing(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the gradient was dropped, or this rank has none or has not sent its
        zeros."""
        is_unsent_zero = mean.is_zero and mean.entry.index not in self._sent
        is_none = mean.is_absent and not mean.is_edited
        return is_unsent_zero or is_none or self._is_dropped(mean)

    @property
    def contributed(self) -> set[int]:
        """The indices of the parameters whose gradient this rank has sent in the open step."""
        return set(self._contributed)

    def drop_unused(self, used: Collection[int], gradients: dict[int, T | None]) -> None:
        """Removes those of ``gradients``, by the id of the parameter, that no rank has contributed
        to. Without ZeroShard they are None, and the program has not written to them. ``used``: the
        indices of all others."""
        for entry in self._job.trained:
            mean = self._job.framework.shown_mean(entry.tensor)
            if entry.index not in used and mean is not None and mean.is_absent:
                mean.drop_edits()
                gradients[id(entry.tensor)] = None

    def send_replaced(self) -> None:
        """Sends this rank's own gradients where the program has replaced the gradient before they
        were sent, so that these count as changed."""
        for entry in self._job.trained:
            framework, mean = self._job.framework, self._means.get(entry.index)
            if mean is None or entry.index in self._sent:
                continue
            is_replaced = framework.shown_mean(entry.tensor) is not mean
            if is_replaced and not self._is_dropped(mean) and mean.own is not None:
                self._push(entry, mean.own)
                self._sent[entry.index] = mean

    def changed(self) -> list[Entry[T]]:
        """The parameters whose gradients the program has changed after they were sent."""
        return [entry for entry in self._job.trained if self._is_changed(entry)]

    def current(self, entry: Entry[T]) -> T | None:
        """A gradient as the program sees it, or this rank's contribution to it. None if the step
        does not apply it."""
        if not self._job.framework.is_stepped(entry.tensor):
            return None
        mean = self._job.framework.shown_mean(entry.tensor)
        if mean is not None and mean.is_absent and not self._early and not self._is_changed(entry):
            return None
        if mean is not None and (mean.own is None or mean.is_edited):
            return mean.to_send()
        gradient = self._job.framework.gradient(entry.tensor)
        if gradient is not None and mean is None and self._unscaled:
            scaled: T = cast(Any, gradient) * self.loss_scale
            return scaled
        return gradient

    def _is_changed(self, entry: Entry[T]) -> bool:
        if entry.index not in self._sent:
            return False
        is_stepped = self._job.framework.is_stepped(entry.tensor)
        if entry.index in self._contributed and not is_stepped:
            return True  # frozen since
        mean = self._job.framework.shown_mean(entry.tensor)
        given = self._job.framework.given_gradient(entry.tensor)
        if given is not self._sent[entry.index]:
            return True
        return mean is not None and (mean.is_edited or mean.is_zeroed)

    def resend(self, gradients: dict[int, T | None]) -> None:
        """Sends other gradients in a new attempt at the step. ``gradients``: by the id of the
        parameter."""
        self._sent.clear()
        self._contributed.clear()
        self._absent.clear()
        self._norms = None
        for entry in self._job.trained:
            gradient = gradients.get(id(entry.tensor))
            mean = self._job.framework.shown_mean(entry.tensor)
            if gradient is None:
                self._absent.append(entry.index)
            else:
                if mean is not None:
                    self._means[entry.index] = mean
                    mean.was_sent_again(gradient)
                self._push(entry, gradient)
            self._sent[entry.index] = self._job.framework.given_gradient(entry.tensor)

    def send_rest(self) -> None:
        """Sends the remaining gradients and reports the parameters without a gradient, which the
        step does not change."""
        for entry in self._job.trained:
            if entry.index not in self._sent:
                self._send(entry)
        if self._absent:
            self._job.send_absent(self._absent)
            self._absent = []
        with self._job.connection.activity.waiting("push"):
            self._job.finish_gradients()

    def restart(self, *, keep: bool = False) -> None:
        """Repeats the open step, without the gradients that were sent. ``keep``: parameters keep
        gradients of which this rank has no values, because the program sets them next."""
        framework = self._job.framework
        self.events += 1
        groups = self._job.optimizer.parameters() if self._means else ()
        stepped = {id(parameter) for group in groups for parameter in group}
        for mean in self._means.values():
            tensor = mean.entry.tensor
            is_shown = framework.shown_mean(tensor) is mean
            if not is_shown or not mean.is_absent and (mean.own is not None or keep):
                pass
            elif mean.is_absent or id(tensor) in stepped:
                framework.set_gradient(tensor, None)
            else:
                self._keep_removed(mean)
            mean.is_zeroed = False
        if self._unscaled:
            self.loss_scale = 1.0
        self._clear()

    @contextlib.contextmanager
    def scaled_as_before(self) -> Iterator[None]:
        """A context after which the gradients of the open step are unscaled and clipped as before
        it, although it restarts the step."""
        before = self.loss_scale, self._unscaled, self._clip_factor
        yield
        self.loss_scale, self._unscaled, self._clip_factor = before

    def begin(self) -> Entry[T] | None:
        """Drops the gradients of the last step. Does nothing if there are gradients that no step
        has used, as far as the framework can tell; returns one of their parameters."""
        framework = self._job.framework
        for entry in self._job.parameters:
            is_own = framework.shown_mean(entry.tensor) is None
            has_own = is_own and framework.gradient(entry.tensor) is not None
            if has_own or entry.trained and not self.is_complete:
                return entry
        self.drop()
        return None

    def drop(self) -> None:
        """Removes the gradients of all parameters."""
        for entry in self._job.parameters:
            self._job.framework.set_gradient(entry.tensor, None)

    def end_step(self, clip_factor: float) -> None:
        """The step was complete, so its number of backward passes counts. ``clip_factor``: the
        factor by which it has multiplied gradients to clip them."""
        for index, passes in self._passes.items():
            self._most[index] = max(passes, self._most.get(index, 0))
        for mean in self._means.values():
            tensor = mean.entry.tensor
            if mean.is_absent and self._job.framework.shown_mean(tensor) is mean:
                # Without it the rank still contributes nothing to what the others keep.
                self._job.framework.set_gradient(tensor, None)
            clips = self._job.framework.clips(tensor)
            mean.end_step((clip_factor if clips else 1.0) / self.loss_scale)
        self._clear()

    def _clear(self) -> None:
        self._passes.clear()
        self._sent.clear()
        self._contributed.clear()
        self._absent.clear()
        self._means.clear()
        self._norms, self._clip_factor, self._unscaled, self.resting = None, None, False, []
