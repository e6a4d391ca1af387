"""The part of a step that optimizers on the ranks make, in the same attempt as the gradients.

Each parameter has one rank that updates it. When the gradients of all ranks have arrived, this rank
fetches their sum, the master weights and the state, and sends new values and new state, while other
ranks do the same for theirs. All of them count only if all ranks commit the attempt: an aborted
attempt leaves nothing behind, and whoever makes the step again starts from what the servers have
committed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Generic

from ..errors import InvalidArgumentError
from .entry import Entry
from .job import ModelJob
from .looks import Looks
from .rank_optimizer import Due, RankOptimizer, mixed
from .tensors import T


class RankSteps(Generic[T]):
    """The steps of the optimizers of one model that run on the ranks."""

    def __init__(self, job: ModelJob[T], gradients: Looks[T], optimizer: RankOptimizer[T]) -> None:
        self._job = job
        self._gradients = gradients
        self._optimizer = optimizer
        self.follow()

    def runs(self, entry: Entry[T]) -> bool:
        """Returns whether the entry is a parameter that ranks update."""
        return entry.trained and self._optimizer.runs(entry.tensor)

    def follow(self) -> None:
        """Called when this rank has a new version."""
        self._optimizer.follow(self._job)

    def hashes(self, written: list[int]) -> list[int]:
        """Adds the hyperparameters to the hashes of written values, which servers compare between
        ranks. ``written``: one hash for each entry of the job; empty: all are 0."""
        hashes = written or [0] * len(self._job.entries)
        of_groups = self._optimizer.hyperparameter_hashes()
        for entry in self._job.trained:
            if self._optimizer.runs(entry.tensor):
                own = of_groups.get(id(entry.tensor), 0)
                hashes[entry.index] = mixed(own, hashes[entry.index])
        return hashes

    def send(
        self, written: Collection[Entry[T]], factors: Sequence[float], max_norm: float | None
    ) -> None:
        """Makes this rank's part of the open step, and sends it.

        Args:
            written: the parameters that the program has written to.
            factors: those of the mean gradients, for each entry of the job; empty: all are 1.
            max_norm: the global norm to which the step is clipped.
        """
        job = self._job
        owned = [one for one in job.trained if self.runs(one) and job.job.replaces(one.index)]
        if not owned:
            return
        norms = self._gradients.norms()
        scaled = [norm * factor for norm, factor in zip(norms, factors)] if factors else norms
        coefficient = self._clipping(scaled, max_norm) / self._gradients.loss_scale
        absent = self._gradients.absent
        # The servers skip the step of all parameters if one gradient is inf or NaN.
        is_skipped = not all(map(math.isfinite, norms))
        changed = {entry.index for entry in written}
        due, untouched = [], []
        for entry in owned:
            if not is_skipped and entry.index not in absent:
                of_clipping = coefficient if entry.clips else 1.0 / self._gradients.loss_scale
                of_program = factors[entry.index] if factors else 1.0
                factor = of_clipping * of_program / job.job.divisor(entry.index)
                due.append(Due(entry, factor, entry.index in changed))
            elif entry.index in changed:
                untouched.append(entry)
        if untouched:
            arrays = [(entry.index, entry.outgoing()) for entry in untouched]
            job.job.replace(job.version, arrays)
        if due:
            self._optimizer.step(job, due)

    def _clipping(self, norms: Sequence[float], max_norm: float | None) -> float:
        """The clip coefficient, as the coordinator computes it."""
        if max_norm is None:
            return 1.0
        squares = (norms[entry.index] ** 2 for entry in self._job.trained if entry.clips)
        norm = math.sqrt(math.fsum(squares)) / self._gradients.loss_scale
        return max_norm / max(norm, max_norm)

    def check_join(self) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError`: ranks must make the same steps."""
        raise InvalidArgumentError(
            "the model has an optimizer that runs on the ranks, which therefore must have the same "
            "number of batches; train without zeroshard.torch.join, or with an optimizer that the "
            "servers have"
        )
