"""The gradients of trainable parameters that are not in the optimizer.

The servers do not step these parameters, but the program may look at their gradients: to clip, to
log, or to step them itself. They stay on the worker. When the program looks at one after a backward
pass, all of them become means over the ranks, in a job of their own: a program that never looks
sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._rendezvous import ProcessGroup
from ..errors import InvalidArgumentError, TimeoutError
from .entry import Entry
from .job import ModelJob
from .parameters import Parameters
from .reducer import average_now
from .shown import Outside, ShownGradients
from .step_state import Step
from .tensors import T

#: The hint for a rank that looks at a mean gradient alone.
LOOK_TOGETHER = (
    "parameter.grad is the mean over all ranks: before the next collective call, look at it on "
    "every rank or on none"
)


class OutsideGradients(Outside[T]):
    """The gradients of the trainable parameters of a model that are not in its optimizer."""

    def __init__(self, job: ModelJob[T], step: Step) -> None:
        self._job = job
        self._step = step
        self._framework: ShownGradients[T] = job.framework
        #: By the id of a parameter, which the job keeps alive.
        self._stand_ins: dict[int, T] = {}
        #: The ids of the parameters of which the program has seen means. They may be frozen now.
        self._shown: set[int] = set()

    @property
    def entries(self) -> Iterator[Entry[T]]:
        """The entries of these parameters. None if there is only one rank, whose gradients are the
        means."""
        if self._job.group.size == 1:
            return iter(())
        return (
            entry
            for entry in self._job.parameters
            if not entry.trained
            and (entry.differentiable or id(entry.tensor) in self._shown)
            and self._has_replicas(entry)
        )

    def _has_replicas(self, entry: Entry[T]) -> bool:
        """Returns False for a parameter that is distributed over all ranks: the framework's
        gradient of it is that of all ranks."""
        own = self._framework.layout(entry.tensor)
        return entry.layout is None or own is None or len(entry.layout[1]) > len(own.placements)

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward pass is running."""
        return self._framework.in_backward()

    def show(self) -> None:
        """Called after a backward pass: from now on the program sees means."""
        for entry in self.entries:
            if entry.differentiable:
                self._shown.add(id(entry.tensor))
                self._framework.show_outside(self, entry)

    def show_removed(self, entry: Entry[T]) -> None:
        """Called when the job no longer trains a parameter that has a gradient."""
        if any(entry is each for each in self.entries):
            self._shown.add(id(entry.tensor))
            self._framework.show_outside(self, entry)

    def average(self, looked_at: T) -> None:
        """Replaces the gradients that the program sees by their means, when it looks at that of a
        parameter. Every rank must call it."""
        framework, entry = self._framework, self._job.find(looked_at)
        if entry is None:
            return  # the program has taken it out of the model
        self._check_averages(entry)
        entries = [entry for entry in self.entries if self._averages(entry)]
        own = [framework.outside_gradient(entry.tensor) for entry in entries]
        stand_ins = [self._stand_in(entry) for entry in entries]
        means = mean_gradients(framework, stand_ins, own, self._job.group)
        for entry, mean in zip(entries, means, strict=True):
            framework.receive_outside(entry.tensor, mean)

    def _averages(self, entry: Entry[T]) -> bool:
        return entry.layout is None and self._framework.dtype(entry.tensor) is not None

    def _check_averages(self, entry: Entry[T]) -> None:
        if not self._averages(entry):
            kind = entry.dtype if entry.layout is None else "distributed over some of the ranks"
            raise InvalidArgumentError(
                f"parameter {entry.name!r} is not in the optimizer, and the servers cannot average "
                f"its gradient over the ranks, since it is {kind}; add it to the optimizer before "
                "group_sharded_parallel, or freeze it with requires_grad_(False)"
            )
        if self._step.loop is not None:  # ranks that rest do not take part in averaging
            raise InvalidArgumentError(
                f"parameter {entry.name!r} is not in the optimizer, and its gradient cannot be "
                "averaged inside zeroshard.torch.join, where ranks may have no more batches; add "
                "it to the optimizer before group_sharded_parallel, or freeze it with "
                "requires_grad_(False)"
            )

    def _stand_in(self, entry: Entry[T]) -> T:
        key = id(entry.tensor)
        if key not in self._stand_ins:
            self._stand_ins[key] = self._framework.stand_in(entry.tensor)
        return self._stand_ins[key]


def mean_gradients(
    framework: Parameters[T], stand_ins: Sequence[T], own: Sequence[T | None], group: ProcessGroup
) -> list[T | None]:
    """Returns the means over the ranks of gradients, all of which must call it.

    Args:
        framework: the framework of the parameters.
        stand_ins: a stand-in for each parameter, whose values may be on the servers.
        own: this rank's gradients, which may be overwritten. None: it contributes zeros.
        group: the ranks.

    Returns:
        The means. None where no rank has a gradient.
    """
    try:
        for stand_in, gradient in zip(stand_ins, own, strict=True):
            if gradient is not None:
                framework.set_gradient(stand_in, gradient)
        average_now(framework, stand_ins, group)
        return [framework.gradient(stand_in) for stand_in in stand_ins]
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {LOOK_TOGETHER}") from error
    finally:
        for stand_in in stand_ins:
            framework.set_gradient(stand_in, None)


def average_gradient(
    framework: Parameters[T], group: ProcessGroup, parameter: T, stand_in: T
) -> None:
    """Replaces the gradient of one parameter by its mean over the ranks, all of which must call
    it."""
    [mean] = mean_gradients(framework, [stand_in], [framework.gradient(parameter)], group)
    if mean is not None:
        framework.set_gradient(parameter, mean)
