"""One wrapped model and its optimizer: what happens before a forward, at a step, and when something
is changed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

from .._native import Report
from .._session import Session
from ..errors import InvalidArgumentError, StepAbortedError, StepMismatchError
from .framework import Framework, Optimizer, Place, T
from .gather import Gatherer
from .gradients import Gradients
from .job import Entry, ModelJob, State
from .options import Options

#: The wrapped models of this process, to find the one that a parameter belongs to.
_all: weakref.WeakSet[Sharding[Any]] = weakref.WeakSet()


class Sharding(Generic[T]):
    """The state that the wrapper of a model and its optimizer share."""

    def __init__(
        self,
        session: Session,
        framework: Framework[T],
        model: Any,
        optimizer: Optimizer[T],
        place: Place,
        options: Options,
        *,
        states: Mapping[int, State[T]],
        max_norm: float | None,
    ) -> None:
        """``states``: the optimizer state that there is, by the ``id`` of its parameter;
        ``max_norm``: clip to it."""
        self.level = options.level
        self._sync_buffers = options.sync_buffers
        self._max_norm = max_norm
        self._clip_once: float | None = None
        self._interrupted = False
        self._holding = False
        #: Gradients are those of the loss times this, at the next step.
        self.loss_scale = 1.0
        self.last_report: Report | None = None
        is_large = options.is_large(framework, model)
        bucket_numel = options.bucket_numel(framework, model)
        self.job = ModelJob(session, framework, "sharded", model, optimizer, place, bucket_numel)
        self.job.open(states)
        self.gatherer: Gatherer[T] | None = None
        if self.level == "p_g_os":
            self.gatherer = Gatherer(self.job, model, is_large, not options.sync_comm)
        accumulated = self.gatherer.accumulated if self.gatherer is not None else _nothing
        self.gradients = Gradients(
            self.job, self.level != "os", options.accumulation_steps, accumulated
        )
        _all.add(self)
        weakref.finalize(self, self.job.retire).atexit = False

    # ---- what the program does

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        if self._holding:
            self.gradients.announce()
        self.gradients.hold = self._holding
        self.follow_changes()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """The backward passes of forwards inside are not the last of their step."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    @contextlib.contextmanager
    def all_here(self) -> Iterator[None]:
        """All parameters are here inside; what is written to them is taken over."""
        if self.gatherer is not None:
            self.gatherer.gather_all()
        try:
            yield
        finally:
            self.follow_changes()
            if self.gatherer is not None:
                self.gatherer.settle()

    def check_movable(self) -> None:
        """Refuses to have parameters moved or cast that come and go."""
        if self.gatherer is not None and self.gatherer.units:
            raise InvalidArgumentError(
                "a model at level p_g_os cannot be moved or cast; move or cast it before group_sharded_parallel"
            )

    def fetches(self, parameter: T) -> bool:
        """Whether it is on this worker only while its module runs."""
        if self.gatherer is None:
            return False
        return any(
            parameter is tensor
            for unit in self.gatherer.units
            for tensor in unit.parameters.values()
        )

    def whole(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Parameters of the model, whole, as f32 in host memory, by the names that are given."""
        entries = {name: self.job.entry(parameter) for name, parameter in parameters.items()}
        for entry in entries.values():
            if entry.modified:
                raise InvalidArgumentError(
                    f"parameter {entry.name!r} was written to and the servers do not know it yet; it must be saved after "
                    "the next forward or step"
                )
        found = self.job.whole({entry.name: entry for entry in entries.values()}.values())
        return {name: found[entry.name] for name, entry in entries.items()}

    def follow_changes(self) -> None:
        """Goes on with another job if the program has changed what this one is, or written to the
        parameters."""
        if self._interrupted:
            self._end_interrupted_step()
        # Gradients that are on their way belong to the job as it is: the next step will see the
        # change.
        if not self.gradients.any_sent and self.job.changed():
            self.reopen(None)

    def reopen(self, states: Mapping[int, State[T]] | None) -> None:
        """Goes on with another job; with ``states`` as its optimizer state."""
        self.discard()
        self.job.reopen(self._resident(), states)
        self.gradients.watch()
        if self.gatherer is not None:
            self.gatherer.new_version()

    def step(self) -> None:
        """Sends what was not sent, has the servers step, and receives the parameters."""
        self.follow_changes()
        self._sent(self.gradients.send_rest)
        version, job = self.job.version, self.job.job
        if self._sync_buffers:
            self._send_buffers()
        received = [(entry.index, entry.incoming()) for entry in self._resident() if entry.trained]
        max_norm = self._clip_once if self._clip_once is not None else self._max_norm
        self.last_report = self._sent(
            lambda: job.commit(
                version,
                self.job.groups(),
                loss_scale=self.loss_scale,
                max_norm=max_norm,
                targets=[(index, incoming.array) for index, incoming in received],
            )
        )
        for _, incoming in received:
            incoming.finish()
        self._end_step()
        if self._sync_buffers:
            self.job.receive(entry for entry in self.job.received if entry.buffer)

    def unwind(self) -> None:
        """A forward of the whole model has ended in an error, or by Ctrl-C."""
        if self.gatherer is not None:
            self.gatherer.unwind()

    def clip(self, max_norm: float) -> float:
        """The global norm of the mean gradient; the step clips to ``max_norm``."""
        self.follow_changes()
        self._sent(self.gradients.send_rest)
        self._clip_once = max_norm
        return float(self._sent(lambda: self.job.job.reduce(self.job.version, self.loss_scale)))

    def discard(self) -> None:
        """Has the servers drop the gradients that were sent for the open step, if any were. Every
        rank must do the same."""
        if not self.gradients.any_sent:
            return
        try:
            self._sent(lambda: self.job.job.discard(self.job.version))
        except StepAbortedError:
            pass  # the servers have dropped them already
        self.gradients.restart(learn=False)
        self._clip_once = None

    # ---- how it does that

    def _end_step(self) -> None:
        self.job.version += 1
        self._clip_once = None
        self.gradients.restart(learn=True)
        self.job.mark()
        if self.gatherer is not None:
            self.gatherer.new_version()

    def _sent(self, work: Callable[[], Any]) -> Any:
        """Does something that sends; if it fails, the step begins again, from nothing."""
        try:
            return work()
        except BaseException as error:
            self.job.job.forget()
            self.gradients.restart(learn=False)
            self._clip_once = None
            # An aborted step is gone from the servers. Of one that failed otherwise, or was
            # interrupted (Ctrl-C), they may have a part.
            self._interrupted = not isinstance(error, StepAbortedError)
            raise

    def _end_interrupted_step(self) -> None:
        """Has the servers drop what they have of it: it must not be mixed with what comes now."""
        try:
            self.job.job.discard(self.job.version)
        except StepAbortedError:
            pass  # they have dropped it already
        except StepMismatchError:
            # It had been decided before the interruption: the next step starts from its result.
            self.job.version += 1
            self.job.receive(entry for entry in self._resident() if entry.trained)
            self.job.mark()
            if self.gatherer is not None:
                self.gatherer.new_version()
        self._interrupted = False

    def _resident(self) -> list[Entry[T]]:
        """The entries whose tensors are on this worker between uses."""
        if self.gatherer is None:
            return list(self.job.entries)
        large = {id(tensor) for unit in self.gatherer.units for tensor in unit.parameters.values()}
        return [entry for entry in self.job.entries if id(entry.tensor) not in large]

    def _send_buffers(self) -> None:
        # All of them: what batch norm writes is not counted as a change.
        arrays = [(entry.index, entry.outgoing()) for entry in self.job.uploaded if entry.buffer]
        if arrays:
            self.job.job.buffers(self.job.version, arrays)


def _nothing(parameter: Any) -> None:
    pass


def sharding_of(parameters: Iterable[Any]) -> Sharding[Any] | None:
    """The wrapped model that trains these parameters; None if there is none.

    Raises :class:`~zeroshard.InvalidArgumentError` where some are and some are not.
    """
    given = {id(parameter) for parameter in parameters}
    for sharding in _all:
        trained = {id(entry.tensor) for entry in sharding.job.trained}
        if trained & given:
            if trained - given:
                missing = next(
                    entry.name for entry in sharding.job.trained if id(entry.tensor) not in given
                )
                raise InvalidArgumentError(
                    f"parameters do not include {missing!r}; they must be all that the sharded optimizer trains: its "
                    "global norm is over all of them"
                )
            return sharding
    return None
