"""The policy of a job on spikes: steps whose gradient norm or loss is far above those before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidArgumentError

_ACTIONS = ("skip", "rewind", "stop")


@dataclass(frozen=True)
class SpikePolicy:
    """When a step counts as a spike, and what happens then, for ``spikes`` of
    :func:`zeroshard.shard`.

    The coordinator judges each step before the servers apply it. The event that it logs, and the
    error of a job that stops, name the tensor with the largest gradient and the rank that
    contributed most to it. Steps are compared with the median of the ``window`` applied steps
    before them, which checkpoints keep, so that a run that is resumed judges as one that went on.
    """

    #: ``"skip"``: the step is skipped, and training goes on with the next batch. ``"rewind"``: the
    #: job returns to its newest checkpoint that is at least ``rewind_steps`` back, and loops over
    #: :func:`zeroshard.steps` skip the batches of the last ``rewind_steps`` steps; it needs
    #: ``checkpoints``. ``"stop"``: the job fails, and every rank gets a ``JobFailedError``.
    action: Literal["skip", "rewind", "stop"] = "skip"
    #: A step is a spike if the norm of its gradient is more than this factor times the median.
    #: None: norms are not compared.
    norm_factor: float | None = 10.0
    #: The same for the mean loss of the ranks, which ``loss`` returns. A loss is compared only with
    #: a positive median. None: losses are not compared.
    loss_factor: float | None = None
    #: Returns the loss of this rank at the step that ``optimizer.step()`` makes. It is called
    #: there, on every rank. A loss with inf or NaN counts for ``nonfinite_steps``.
    loss: Callable[[], float] | None = None
    #: The number of steps of which the median is taken, 1 to 1000. No step is judged before there
    #: are as many.
    window: int = 100
    #: A step is a spike if it is the last of this many steps in a row with inf or NaN; 0: they are
    #: not counted.
    nonfinite_steps: int = 0
    #: With ``"rewind"``: the number of steps to go back, at least.
    rewind_steps: int = 100
    #: The job stops at a spike if it has had this many within the last ``limit_batches`` batches.
    limit: int = 3
    #: The number of batches for which ``limit`` counts.
    limit_batches: int = 1000

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise InvalidArgumentError(
                f"action of a SpikePolicy is {self.action!r}; it must be one of "
                f"{', '.join(map(repr, _ACTIONS))}"
            )
        if (self.loss_factor is None) != (self.loss is None):
            raise InvalidArgumentError(
                "a SpikePolicy has only one of loss_factor and loss; it needs both to compare "
                "losses, and neither otherwise"
            )
        for name, least in (
            ("window", 1),
            ("nonfinite_steps", 0),
            ("rewind_steps", 1),
            ("limit", 0),
            ("limit_batches", 1),
        ):
            number = getattr(self, name)
            if type(number) is not int or not least <= number < 1 << 32:
                raise InvalidArgumentError(
                    f"{name} of a SpikePolicy is {number!r}; it must be a whole number, {least} or "
                    "more"
                )

    def as_tuple(
        self,
    ) -> tuple[str, float | None, float | None, int, int, int, int, int]:
        """The numbers, as the extension module takes them."""
        return (
            self.action,
            self.norm_factor,
            self.loss_factor,
            self.window,
            self.nonfinite_steps,
            self.rewind_steps,
            self.limit,
            self.limit_batches,
        )

    def loss_of_step(self) -> float | None:
        """The loss of this rank, if the policy compares losses."""
        return None if self.loss is None else float(self.loss())


def policy_of(spikes: object) -> SpikePolicy | None:
    """The policy that a program has passed.

    Raises:
        InvalidArgumentError: it is not a policy.
    """
    if spikes is None or isinstance(spikes, SpikePolicy):
        return spikes
    raise InvalidArgumentError(
        f"spikes is {spikes!r}; it must be a zeroshard.SpikePolicy, or None for no policy"
    )


def warn_of_spike(step: int, why: str) -> None:
    """Tells the program that a step was skipped."""
    warnings.warn(f"step {step} was skipped by the policy on spikes, because {why}", stacklevel=2)
