"""What the program gets when it looks at a gradient: the mean over the ranks, which the servers
have when all ranks have sent theirs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from .._native import Box
from ..errors import InvalidArgumentError, TimeoutError
from .entry import Entry
from .job import ModelJob
from .mean import MeanGradient, OpenGradients
from .means import Means
from .outside import LOOK_TOGETHER, average_gradient
from .shown import ShownGradients
from .step_state import Step
from .tensors import T


@dataclass(frozen=True)
class Clip:
    """A call of the program that clips the open step."""

    max_norm: float
    #: The factor by which the step will therefore multiply gradients.
    factor: float


class Looks(OpenGradients[T]):
    """The values of the mean gradients of the open step, and their scale."""

    def __init__(
        self,
        job: ModelJob[T],
        step: Step,
        means: Means[T],
        *,
        stay_here: bool,
        run: Callable[[Callable[[], Any]], Any],
        send_rest: Callable[[], None],
    ) -> None:
        """``stay_here``: every rank keeps its own gradients until the program drops them. ``run``
        calls a function that looks at gradients; if it fails, the step begins again."""
        self._job = job
        self._framework: ShownGradients[T] = job.framework
        self._step = step
        self._means = means
        self._stay_here = stay_here
        self._run = run
        self._send_rest = send_rest
        #: The factor by which the loss was multiplied, as far as the program has said so.
        self.loss_scale = 1.0
        #: ``True`` if gradients that the program sets are divided by it already.
        self.is_unscaled = False
        #: How the program clips the open step.
        self.clip: Clip | None = None
        #: The norms of the mean gradients; with them came the ranks that rest, and the indices of
        #: the parameters of which no rank has a gradient.
        self._norms: list[float] | None = None
        self.resting: list[int] = []
        self.absent: set[int] = set()

    # ---- for mean gradients

    def average_later(self) -> Callable[[T, T], None]:
        """Returns :func:`average_gradient` for the ranks of this object, which it does not keep."""
        return functools.partial(average_gradient, self._framework, self._job.group)

    @property
    def stay_here(self) -> bool:
        """Returns whether every rank keeps its own gradients until the program drops them."""
        return self._stay_here

    @property
    def is_alone(self) -> bool:
        """Returns whether there is only one rank."""
        return self._job.group.size == 1

    def is_open(self, mean: MeanGradient[T]) -> bool:
        """Returns whether the mean gradient belongs to the open step."""
        return self._means.is_open(mean)

    def is_sent(self, mean: MeanGradient[T]) -> bool:
        """Returns whether this rank's contribution to it was sent."""
        return self._means.is_open(mean) and mean.entry.index in self._step.progress.sent

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward pass is running."""
        return self._framework.in_backward()

    def already_sent(self, entry: Entry[T]) -> InvalidArgumentError:
        """The error for a gradient that is computed after it was sent."""
        remedy = (
            "look at gradients after the last backward pass of a step"
            if self._norms is not None or self.is_clipped
            else "pass accumulation_steps to group_sharded_parallel"
        )
        return InvalidArgumentError(
            f"backward pass {self._step.progress.passes[entry.index] + 1} of step "
            f"{self._job.version} on rank {self._job.group.rank} has computed a gradient of "
            f"parameter {entry.name!r}, whose gradient was already sent to the servers; {remedy}, "
            "or run all forwards but the last of a step under model.no_sync(), and after an "
            "interrupted step (Ctrl-C) call optimizer.zero_grad() first"
        )

    # ---- values

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

    def _reduce(self) -> list[float]:
        self._send_rest()
        with self._job.connection.activity.waiting("commit"):
            norms, self.resting, absent = self._job.job.reduce(self._job.version, 1.0)
        self.absent = set(absent)
        return norms

    def fetch(self, entry: Entry[T]) -> tuple[T, float]:
        """The sum of the gradients over the ranks as a host tensor, and the number by which the
        step divides it."""
        host = self._framework.host(entry.shape)
        array = self._framework.array(host, Box.whole(entry.shape))

        def receive() -> None:
            with self._job.connection.activity.waiting("pull"):
                self._job.job.gradient_sums(self._job.version, [(entry.index, array)])

        self._run(receive)
        divisor = self._job.job.divisor(entry.index)
        if self._step.excludes_resting:
            return host, divisor * self._active / self._job.group.size
        return host, divisor

    @property
    def _active(self) -> int:
        return self._job.group.size - len(self.resting)

    def as_contribution(self, mean: T) -> T:
        """A mean gradient as values that every rank that does not rest sends: their mean over all
        ranks is the same again."""
        if self._step.excludes_resting or not self.resting:
            return mean
        scaled: T = cast(Any, mean) * (self._job.group.size / self._active)
        return scaled

    @property
    def contributed(self) -> set[int]:
        """The indices of the parameters whose gradient this rank has sent in the open step."""
        return set(self._step.progress.contributed)

    # ---- scale

    def unscale(self, loss_scale: float) -> None:
        """The program has divided its gradients by the loss scale."""
        self.loss_scale, self.is_unscaled = loss_scale, True

    def shown_scale(self, entry: Entry[T]) -> float:
        """The factor of a mean gradient in what the program sees: it removes the loss scale, and
        clips the gradient if the program has called for it."""
        clips = self.clip is not None and self._framework.clips(entry.tensor)
        return (self.clip.factor if self.clip is not None and clips else 1.0) / self.loss_scale

    @property
    def is_clipped(self) -> bool:
        """Returns whether the program has told the servers to clip the open step."""
        return self.clip is not None

    def changed_after_clipping(self, entry: Entry[T]) -> InvalidArgumentError:
        """The error for a gradient that the program changes after the servers were told to clip."""
        return InvalidArgumentError(
            f"the gradient of parameter {entry.name!r} was changed after clip_grad_norm_ of "
            "ZeroShard; change gradients before it, or use torch.nn.utils.clip_grad_norm_"
        )

    @contextlib.contextmanager
    def scaled_as_before(self) -> Iterator[None]:
        """A context after which the gradients of the open step are unscaled and clipped as before
        it, although it restarts the step."""
        before = self.loss_scale, self.is_unscaled, self.clip
        yield
        self.loss_scale, self.is_unscaled, self.clip = before

    # ---- the end of an attempt

    def resend(self) -> None:
        """Other gradients are sent in a new attempt, of which no norms are known."""
        self._norms = None

    def restart(self) -> None:
        """The step begins again."""
        if self.is_unscaled:
            self.loss_scale = 1.0
        self.end_step()

    def end_step(self) -> None:
        """The step was made. Nothing is known of the next one."""
        self.clip, self.is_unscaled = None, False
        self._norms, self.resting, self.absent = None, [], set()
