"""A sharded model and its optimizer: the actions before a forward, and in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

from .._checkpoints import Checkpoints
from .._connection import Connection
from .._native import Report
from .._rendezvous import ProcessGroup
from .._spikes import warn_of_spike
from ..errors import InvalidArgumentError
from .averaged import Averaged
from .backward import Backward
from .buffers import SharedBuffers
from .clipping import Clipping
from .committing import Commit
from .entry import Entry
from .exchanges import exchanges
from .framework import Framework
from .gather import Gatherer
from .gradients import Gradients
from .interrupts import operation
from .job import ModelJob
from .opening import JobSettings, Opening
from .optimizer_spec import OptimizerSpec, State
from .optimizer_settings import Optimizer
from .options import Options
from .program_changes import ProgramChanges
from .rank_optimizer import RankOptimizer
from .rank_steps import RankSteps
from .reading import Reads
from .recovery import Recovery
from .replaced import ReplacedGradients
from .step_state import Step
from .tensors import T
from .traffic import Traffic
from .uneven_loops import UnevenLoops
from .versions import Versions
from .weak_calls import of_model
from .writes import written


class Sharding(Generic[T]):
    """The state shared by the wrapper of a model and its optimizer. It builds the parts of a
    sharded model, none of which refers to it, and makes steps with them."""

    def __init__(
        self,
        connection: Connection,
        framework: Framework[T],
        model: Any,
        optimizer: Optimizer[T],
        group: ProcessGroup,
        options: Options,
        *,
        states: Mapping[int, State[T]],
        max_norm: float | None,
        clip_sets: Sequence[tuple[Sequence[T], float]] = (),
        initial: Callable[[Collection[int]], Iterable[Sequence[T]]] | None = None,
        checkpoints: Checkpoints | None = None,
        on_ranks: RankOptimizer[T] | None = None,
    ) -> None:
        """``states``: existing optimizer state, by the ``id`` of its parameter. ``max_norm``: clip
        every step to this global norm. ``clip_sets``: sets of parameters, each of which is clipped
        to a norm of its own. ``initial``: called with the ids of the parameters that are fetched;
        returns the ``initial`` of :meth:`Opening.open`. ``on_ranks``: the part of the optimizer
        that runs on the ranks."""
        self.level = options.level
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.check_unused()
        #: ``True`` under :meth:`no_sync`.
        self._holding = False
        self.last_report: Report | None = None
        #: The number of steps so far.
        self.steps = 0
        fetched = options.fetched(framework, model)
        of_group = exchanges(framework, options.group_size, group, connection.timeout)
        self.job = ModelJob(connection, framework, model, OptimizerSpec(optimizer, on_ranks), group)
        self.traffic = Traffic(self.job, of_group)
        settings = JobSettings(
            bucket_numel=options.bucket_numel(framework, model),
            offload=options.offload,
            state_dtype=options.state_dtype,
            averages=options.averages,
            spikes=options.spikes,
            saving=None if checkpoints is None else checkpoints.saving,
        )
        self._opening = Opening(self.job, self.traffic, settings)
        self._opening.open(states, fetched, () if initial is None else initial(fetched))
        self.gatherer: Gatherer[T] | None = None
        if self.level == "p_g_os":
            self.gatherer = Gatherer(self.job, self.traffic, model, not options.sync_comm)
        self._build(options, on_ranks)
        self.clipping.set(max_norm, clip_sets)
        if checkpoints is not None:
            checkpoints.bind(self)

    def _build(self, options: Options, on_ranks: RankOptimizer[T] | None) -> None:
        """Creates the parts, each with those before it that it needs."""
        job, traffic, gatherer = self.job, self.traffic, self.gatherer
        early = self.level != "os"
        self._step = step = Step()
        self.buffers = SharedBuffers(
            job,
            step,
            are_shared=options.sync_buffers,
            are_saved=self._checkpoints is not None,
        )
        self.reads = Reads(job, step, gathers=gatherer is not None)
        self.gradients = gradients = Gradients(job, traffic, step, early, lambda work: before(work))
        self.clipping = Clipping(job, gradients.means, gradients.looks)
        self.backward = Backward(
            job,
            step,
            gradients,
            options.accumulation_steps,
            _nothing if gatherer is None else gatherer.accumulated,
        )
        ranks = None if on_ranks is None else RankSteps(job, gradients.looks, on_ranks)
        self._versions = Versions(job, gatherer, self.buffers, ranks)
        self.recovery = Recovery(
            job, traffic, step, gradients, gatherer, self.buffers, self._versions
        )
        self.changes = ProgramChanges(
            job,
            self._opening,
            step,
            gradients,
            self.backward,
            gatherer,
            self.recovery,
            has_checkpoints=self._checkpoints is not None,
            sends_early=early,
        )
        self._replaced = ReplacedGradients(
            job, traffic, step, gradients, self.changes, sends_early=early
        )
        self._commit = Commit(
            job, traffic, step, gradients, self.clipping, self.buffers, ranks, options.spikes
        )
        self.uneven_loops = UnevenLoops(
            job,
            traffic,
            step,
            gradients,
            self.recovery,
            self.changes,
            self._versions,
            self.buffers,
            ranks,
        )
        self.averaged = Averaged(job, options.averages, self.reads, self.changes, gatherer)
        # The parameters refer to the gradients, and must not keep the other parts alive.
        before = of_model(self.changes.before)

    # ---- forward

    @operation
    def before_forward(self) -> None:
        """Called when a forward of the whole model begins."""
        self.reads.trains_here()
        self.job.check_has_parameters("a forward records gradients")
        if self._holding:
            self.backward.announce()
        self.backward.hold = self._holding
        self.changes.follow()
        for entry in self.job.entries:
            entry.follow_freezing()
        self.backward.follow_hooks()

    @operation
    def share_buffers(self, trains: bool) -> None:
        """Called when a forward of the whole model begins; ``trains``: whether it is one of a
        training pass. If ranks share buffers, they take those of rank 0 after a step, and here
        after a training forward that no step has followed."""
        self.buffers.before_forward(trains and not self._holding)

    def unwind(self) -> None:
        """Called when a forward of the whole model has raised an exception."""
        if self.gatherer is not None:
            self.gatherer.unwind()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards have backward passes that are not the last of their step."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    # ---- gathered parameters

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are gathered."""
        self.gather_all()
        try:
            yield
        finally:
            self.changes.follow()
            if self.gatherer is not None:
                self.gatherer.settle()

    @operation
    def gather_all(self) -> None:
        """Fetches all parameters, and keeps them until the next forward or step."""
        if self.gatherer is not None:
            self.gatherer.gather_all()

    @property
    def has_units(self) -> bool:
        """Returns whether the model has parameters that are on the servers."""
        return self.gatherer is not None and bool(self.gatherer.units)

    def check_movable(self, change: str) -> None:
        """Raises an error if the model has parameters that are on the servers, which cannot be
        changed in this way."""
        if self.has_units:
            raise InvalidArgumentError(
                f"a model at level p_g_os cannot be {change}; "
                "do it before calling group_sharded_parallel"
            )

    def fetches(self, parameter: T) -> bool:
        """Returns whether the parameter is on the servers, and on this worker only while its module
        is running."""
        return self.gatherer is not None and self.gatherer.has(parameter)

    def bytes_here(self) -> tuple[int, int]:
        """Bytes of parameters and of gradients that are on this worker."""
        resident = [entry for entry in self.job.entries if entry.resident and not entry.buffer]
        nbytes = sum(self.job.framework.nbytes(entry.tensor) for entry in resident)
        gathered = 0 if self.gatherer is None else self.gatherer.holdings.nbytes
        return nbytes + gathered, self.gradients.bytes_here()

    # ---- step

    @operation
    def clip(self, max_norm: float) -> float:
        """Clips the open step to ``max_norm``. Returns the global norm of the mean gradient."""
        self.changes.before(self._replaced.send)
        return self.clipping.clip(max_norm)

    @operation
    def step(self) -> None:
        """Sends the remaining gradients, commits the step and receives the new parameters."""
        self.job.check_open()
        self.job.check_has_parameters("optimizer.step() is called")
        if self._holding and self.job.group.size > 1:
            raise InvalidArgumentError(
                "optimizer.step() is called inside no_sync(), and the servers cannot make a step "
                "of one rank alone; call it outside of no_sync(), or train with DataParallel, "
                "whose optimizer runs on each rank, for local steps (LocalSGD)"
            )
        self._step.check_trains("optimizer.step() is called")
        self.reads.trains_here()
        self.changes.follow()
        data = (None, False) if self._checkpoints is None else self._checkpoints.data()
        sending = self.recovery.sending
        sending(self._replaced.send)
        self.job.optimizer.begin_step()
        sending(self.gradients.send_rest)
        changed = written(self.job)
        sending(lambda: self._commit.send_values(changed))
        sending(lambda: self._make_step(changed, data))

    def _make_step(self, changed: list[Entry[T]], data: tuple[bytes | None, bool]) -> None:
        """Commits the step and follows it. ``data``: that of this rank for a checkpoint, and
        whether it follows."""
        report = self.last_report = self._commit.commit(changed, data)
        self.job.version += 1
        self.steps += 1
        self.job.connection.activity.steps += 1
        if report.spike is not None and self.job.group.rank == 0:
            warn_of_spike(report.version - 1, report.spike)
        self.backward.learn()
        self.gradients.end_step(report.clip_coefficient)
        self._versions.follow_step(report.resting)
        self._step.made()

    def check_applied(self) -> None:
        """Raises an error if the last step was skipped."""
        report = self.last_report
        if report is not None and report.overflow is not None:
            index, rank = report.overflow
            where = "in the sum over the ranks" if rank is None else f"on rank {rank}"
            raise InvalidArgumentError(
                f"the gradient of parameter {self.job.entries[index].name!r} contains inf or NaN "
                f"{where}, and step {report.version - 1} was skipped, which has changed nothing; "
                "lower the learning rate or clip gradients, or use a loss scaler, with which such "
                "steps are skipped without an error: pass a GradScaler to group_sharded_parallel, "
                "or choose fp16 precision if a Trainer calls that function for you"
            )

    def roll_back(self) -> None:
        """Follows the job to the checkpoint from which it was restored, if it was, and drops
        everything of the steps after it."""
        self.recovery.roll_back()


def _nothing(parameter: Any) -> None:
    pass
