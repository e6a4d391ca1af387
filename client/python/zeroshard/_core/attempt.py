"""Attempts at a step, which begin with the same gradients and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic

from ..errors import InvalidArgumentError
from . import reducer, sharded_models
from .job import ModelJob
from .sharding import Sharding
from .tensors import T
from .writes import written


class Attempt(Generic[T]):
    """A sharded model at the beginning of a step that may be aborted."""

    def __init__(self, model: Sharding[T]) -> None:
        # Weak: the job ends with the model.
        self._sharding = weakref.ref(model)
        self._steps = model.steps
        #: A parameter with a gradient that no step has used.
        self._unused = model.gradients.begin()
        self._events = _events(model)
        self._restore_buffers: Callable[[], None] = model.job.framework.record_buffers(
            model.job.model
        )

    @property
    def has_stepped(self) -> bool:
        """Returns whether the model has made a step since."""
        model = self._sharding()
        return model is not None and model.steps != self._steps

    def restore(self) -> None:
        """Drops the gradients of the aborted step, and restores the buffers.

        Raises :class:`~zeroshard.InvalidArgumentError` if there were gradients before the attempt,
        the program has written to parameters, or ranks communicate with each other in the step.
        """
        model = self._sharding()
        if model is None:
            return
        if self._unused is not None and _events(model) == self._events:
            # The program has left these gradients before, and the step does not train the model.
            self._restore_buffers()
            return
        self._check(model)
        model.recovery.abandon()
        self._restore_buffers()
        # The program has not written these values.
        model.job.mark()

    def _check(self, model: Sharding[T]) -> None:
        if self._unused is not None:
            raise InvalidArgumentError(
                f"parameter {self._unused.name!r} had a gradient before the block of the step that "
                "was aborted, which cannot be computed again; put all backward passes of a step "
                "into its block, and call zero_grad() or clear_grad() at the end of the block"
            )
        shared = _communicates(model.job)
        if shared is not None:
            raise InvalidArgumentError(
                f"a step was aborted, and the model has {shared}; zeroshard.steps cannot run the "
                "step again, because other ranks may not have been aborted: start all ranks again "
                "from a checkpoint"
            )
        changed = written(model.job)
        if changed:
            raise InvalidArgumentError(
                f"parameter {changed[0].name!r} was written to since the last step, and the step "
                "that was aborted cannot be run again from the values before; write to parameters "
                "outside of the training loop, or catch StepAbortedError in the program"
            )


def _communicates(job: ModelJob[Any]) -> str | None:
    """What makes the ranks communicate in a forward or a backward pass, if anything does."""
    if job.distributed is not None:
        return f"parameter {job.distributed.name!r}, which is distributed over ranks"
    names = {type(module).__name__ for module in job.framework.modules(job.model)}
    return "SyncBatchNorm" if "SyncBatchNorm" in names and job.group.size > 1 else None


def _events(model: Sharding[Any]) -> tuple[int, int]:
    """The number of gradients that were computed, and of steps that began again."""
    return model.backward.computed, model.gradients.restarts


def attempts() -> list[Attempt[Any]]:
    """Attempts at the next step of each sharded model of this process."""
    return [Attempt(model) for model in sharded_models.all_open()]


def check_restorable(begun: Iterable[Attempt[Any]]) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` if what happened since the attempts have
    begun cannot be run again."""
    if any(attempt.has_stepped for attempt in begun):
        raise InvalidArgumentError(
            "a block of zeroshard.steps was aborted after an optimizer.step(), which cannot be "
            "undone; make one step in each block, and call nothing after it that needs the servers"
        )
    if reducer.any_averages():
        raise InvalidArgumentError(
            "a step was aborted, and zeroshard.steps does not restore models of DataParallel, or "
            "gradients of fused_allreduce_gradients; use group_sharded_parallel, or catch "
            "StepAbortedError in the program"
        )
