"""Policies on spikes: steps whose gradient norm or loss is far larger than before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidArgumentError

_ACTIONS = ("skip", "rewind", "stop")


@dataclass(frozen=True)
class SpikePolicy:
    """Says when a step counts as a spike, and what happens then. Pass it as ``spikes`` to
    :func:`zeroshard.shard`.

    The coordinator judges each step before the servers apply it, by the median of the last
    ``window`` applied steps. Its log, and the error of a job that stops, name the tensor with the
    largest gradient and the rank that contributed most to it. Checkpoints store the figures, so a
    resumed run judges steps as the interrupted one would have.
    """

    #: ``"skip"`` skips the step, and training goes on with the next batch. ``"rewind"`` returns the
    #: job to the newest checkpoint that is at least ``rewind_steps`` back, and loops over
    #: :func:`zeroshard.steps` skip the batches of the last ``rewind_steps`` steps; you must pass
    #: ``checkpoints``, too. ``"stop"`` fails the job, and every rank raises ``JobFailedError``.
    action: Literal["skip", "rewind", "stop"] = "skip"
    #: A step is a spike if its gradient norm exceeds the median by this factor. None: the job does
    #: not compare norms.
    norm_factor: float | None = 10.0
    #: The same factor for the mean loss over the ranks, which ``loss`` returns. A median that is
    #: not positive allows any loss. None: the job does not compare losses.
    loss_factor: float | None = None
    #: Returns this rank's loss. ``optimizer.step()`` calls it on every rank. A loss with inf or NaN
    #: counts for ``nonfinite_steps``.
    loss: Callable[[], float] | None = None
    #: The median covers this many applied steps, 1 to 1000. The job judges no step before it has
    #: made as many.
    window: int = 100
    #: A step is a spike if it completes this many steps in a row with inf or NaN. 0: the job does
    #: not count them.
    nonfinite_steps: int = 0
    #: With ``"rewind"``, the job returns at least this many steps.
    rewind_steps: int = 100
    #: At the next spike after this many within the last ``limit_batches`` batches, the job stops.
    limit: int = 3
    #: The number of batches within which ``limit`` counts spikes.
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
        """Returns the fields in the order that the extension module expects."""
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
        """Returns the loss of this rank, if the policy compares losses."""
        return None if self.loss is None else float(self.loss())


def policy_of(spikes: object) -> SpikePolicy | None:
    """Returns the policy that your script has passed.

    Raises:
        InvalidArgumentError: the argument is not a policy.
    """
    if spikes is None or isinstance(spikes, SpikePolicy):
        return spikes
    raise InvalidArgumentError(
        f"spikes is {spikes!r}; it must be a zeroshard.SpikePolicy, or None for no policy"
    )


def warn_of_spike(step: int, why: str) -> None:
    """Warns that a step was skipped."""
    warnings.warn(f"step {step} was skipped by the policy on spikes, because {why}", stacklevel=2)
