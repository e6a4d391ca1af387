"""How steps clip mean gradients: to a global norm, or sets of parameters to norms of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic

from .entry import Entry
from .job import ModelJob
from .looks import Clip, Looks
from .means import Means
from .tensors import T


class Clipping(Generic[T]):
    """How the steps of a model clip gradients."""

    def __init__(self, job: ModelJob[T], means: Means[T], looks: Looks[T]) -> None:
        self._job = job
        self._means = means
        self._looks = looks
        self._max_norm: float | None = None
        self._sets: Sequence[tuple[Sequence[T], float]] = ()

    def set(self, max_norm: float | None, sets: Sequence[tuple[Sequence[T], float]] = ()) -> None:
        """How all steps are clipped from now on. ``max_norm``: the global norm; None: any.
        ``sets``: sets of parameters, each of which is clipped to a norm of its own."""
        self._max_norm = max_norm
        self._sets = sets

    def clip(self, max_norm: float) -> float:
        """The open step will clip the gradients to ``max_norm``. Returns their global norm."""
        factors = self._factors()
        clipped = self._clipped()
        norms = self._looks.norms()
        squares = [(norms[entry.index] * factors[entry.index]) ** 2 for entry in clipped]
        norm = math.sqrt(math.fsum(squares)) / self._looks.loss_scale
        clip = Clip(max_norm, max_norm / max(norm, max_norm))
        self._looks.clip = clip
        for entry in clipped:
            mean = self._means.find(entry)
            if mean is not None:
                mean.clip(clip.factor)
        return norm

    def of_step(self) -> tuple[list[float], float | None]:
        """How the open step changes mean gradients: their factors, for each tensor of the job
        (empty: all are 1), and the global norm to which they are clipped. Every rank must call
        it."""
        once = self._looks.clip
        limits = [] if once is None else [once.max_norm]
        limits += [] if self._max_norm is None else [self._max_norm]
        factors = self._means.factors()
        if self._sets:
            factors = self._clip_sets()
        return factors, min(limits, default=None)

    def _clip_sets(self) -> list[float]:
        """The factors that clip the mean gradients of each set to its norm, multiplied by those of
        the program."""
        factors = self._factors()
        norms = self._looks.norms()
        indices = {id(entry.tensor): entry.index for entry in self._clipped()}
        for parameters, max_norm in self._sets:
            own = [indices[id(each)] for each in parameters if id(each) in indices]
            norm = math.hypot(*(factors[index] * norms[index] for index in own))
            norm /= self._looks.loss_scale
            if max_norm < norm < math.inf:
                for index in own:
                    factors[index] *= max_norm / norm
        return factors

    def _factors(self) -> list[float]:
        return self._means.factors() or [1.0] * len(self._job.entries)

    def _clipped(self) -> list[Entry[T]]:
        """The trained parameters that take part in clipping."""
        framework = self._job.framework
        return [entry for entry in self._job.trained if framework.clips(entry.tensor)]
