"""A sharded model and its optimizer: the actions before a forward, in a step, and after a change of
the model by the program."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from .._agreement import agree, share
from .._checkpoints import Checkpoints
from .._connection import Connection
from .._log import is_shown
from .._native import Array, Report, Rest, hashes
from .._rendezvous import ProcessGroup
from ..errors import (
    InvalidArgumentError,
    RolledBackError,
    StepAbortedError,
    StepMismatchError,
    VersionGoneError,
)
from .entry import Entry, hashes_of
from .exchanges import exchanges
from .framework import Framework, Incoming, Optimizer, T
from .gather import Gatherer
from .gradients import Gradients
from .interrupts import between_operations, is_within_operation, operation
from .job import ModelJob, State
from .options import Options
from .summary import log_start

R = TypeVar("R")

#: The number of versions of which a read is tried. Another thread may make steps meanwhile.
_READS = 20
#: Seconds to wait until the servers have decided a step, before a read takes the version before it.
_DECISION_TIME = 2.0

#: The sharded models of this process, to find the model of a parameter.
_all: weakref.WeakSet[Sharding[Any]] = weakref.WeakSet()


class StateEdits(Protocol):
    """The optimizer's state as the program sees it, which it may change between steps."""

    def edited(self) -> Mapping[int, State[Any]] | None:
        """The whole state after the program's changes since the last step, by the ``id`` of its
        parameter. None if there are none."""

    def settle(self) -> None:
        """Called when the servers have the changes."""


class Sharding(Generic[T]):
    """The state shared by the wrapper of a model and its optimizer."""

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
    ) -> None:
        """``states``: existing optimizer state, by the ``id`` of its parameter. ``max_norm``: clip
        every step to this global norm. ``clip_sets``: sets of parameters, each of which is clipped
        to a norm of its own. ``initial``: called with the ids of the parameters that are fetched;
        returns the ``initial`` of :meth:`ModelJob.open`."""
        self.level = options.level
        self._sync_buffers = options.sync_buffers
        #: ``True`` if the last training forward may have changed buffers that ranks share, and the
        #: number of such forwards since the last step.
        self._buffers_differ = False
        self._buffer_changes = 0
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.check_unused()
        self.set_clipping(max_norm, clip_sets)
        self._clip_once: float | None = None
        self._interrupted = False
        self._holding = False
        #: ``True`` if ranks may rest, the number of loops in which they might, and the rest of this
        #: rank.
        self._joining = False
        self._joins = 0
        self._rest: Rest | None = None
        #: ``True`` if this rank does not know the version of the job, since its rest was
        #: interrupted.
        self._is_behind = False
        self.last_report: Report | None = None
        #: What the program changes in the state of the optimizer, if it can.
        self.state_edits: StateEdits | None = None
        #: The step for which this rank has voted last, unless it knows that it was dropped.
        self._voted: int | None = None
        #: The thread that trains.
        self._thread = threading.get_ident()
        #: The number of steps so far.
        self.steps = 0
        fetched = options.fetched(framework, model)
        bucket_numel = options.bucket_numel(framework, model)
        self.job = ModelJob(
            connection,
            framework,
            model,
            optimizer,
            group,
            bucket_numel,
            checkpoints,
            exchanges(framework, options.group_size, group, connection.timeout),
            offload=options.offload,
        )
        self.job.open(states, fetched, () if initial is None else initial(fetched))
        self.gatherer: Gatherer[T] | None = None
        if self.level == "p_g_os":
            self.gatherer = Gatherer(self.job, model, not options.sync_comm)
        accumulated = self.gatherer.accumulated if self.gatherer is not None else _nothing
        # Weak: the parameters refer to the gradients, and must not keep this object alive.
        run = weakref.WeakMethod(self._run)
        self.gradients = Gradients(
            self.job,
            self.level != "os",
            options.accumulation_steps,
            accumulated,
            lambda work: _alive(run())(work),
        )
        if checkpoints is not None:
            checkpoints.bind(self)
        _all.add(self)
        self.job.retire_after(self)
        if group.rank == 0 and is_shown():
            log_start(self)
        connection.activity.begin()

    # ---- called by the program

    def set_clipping(
        self, max_norm: float | None, clip_sets: Sequence[tuple[Sequence[T], float]] = ()
    ) -> None:
        """How all steps are clipped from now on, as in the constructor."""
        self._max_norm = max_norm
        self._clip_sets = clip_sets

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss of the next step was multiplied."""
        return self.gradients.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.gradients.loss_scale = scale

    @operation
    def before_forward(self) -> None:
        """Called when a forward of the whole model begins."""
        self._thread = threading.get_ident()
        if self._holding:
            self.gradients.announce()
        self.gradients.hold = self._holding
        self.follow_changes()
        for entry in self.job.entries:
            entry.follow_freezing()
        self.gradients.follow_hooks()

    @operation
    def share_buffers(self, trains: bool) -> None:
        """Called when a forward of the whole model begins; ``trains``: whether it is one of a
        training pass. If ranks share buffers, they take those of rank 0 after a step, and here
        after a training forward that no step has followed."""
        # Rank 0 may be evaluating the model alone: the other ranks follow in their next forward,
        # or in the step.
        if self._buffers_differ and not self._joining:
            self.job.offer_buffers(self._buffer_changes)
        self._buffers_differ = self._sync_buffers and trains and not self._holding
        self._buffer_changes += self._buffers_differ

    def _receive_buffers(self) -> None:
        """Takes the buffers of rank 0 in the step that the servers have made last."""
        self.job.receive(entry for entry in self.job.received if entry.buffer)

    def _buffers_are_shared(self) -> None:
        """The buffers are those of a new version."""
        self._buffers_differ, self._buffer_changes = False, 0
        self.job.withdraw_buffers()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards have backward passes that are not the last of their step."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are gathered."""
        self.gather_all()
        try:
            yield
        finally:
            self.follow_changes()
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
        if self.gatherer is None:
            return False
        return any(
            parameter is tensor
            for unit in self.gatherer.units
            for tensor in unit.parameters.values()
        )

    def bytes_here(self) -> tuple[int, int]:
        """Bytes of parameters and of gradients that are on this worker."""
        resident = [entry for entry in self.job.entries if entry.resident and not entry.buffer]
        nbytes = sum(self.job.framework.nbytes(entry.tensor) for entry in resident)
        gathered = 0 if self.gatherer is None else self.gatherer.gathered_bytes
        return nbytes + gathered, self.gradients.bytes_here()

    def whole(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Whole parameters of the model, as f32 in host memory, by the given names."""
        entries = {name: self.job.entry(parameter) for name, parameter in parameters.items()}
        may_compare = self.sees_writes and (self.gatherer is None or not is_within_operation())
        for entry in entries.values():
            if may_compare and entry.modified:
                raise InvalidArgumentError(
                    f"parameter {entry.name!r} was modified after the last step; save the model "
                    "after the next step, which sends the change to the servers"
                )
        unique = {entry.name: entry for entry in entries.values()}.values()
        found = self.read(lambda version: self.job.whole(unique, version))
        return {name: found[entry.name] for name, entry in entries.items()}

    # ---- reads at any time

    @property
    def is_undecided(self) -> bool:
        """Returns whether this rank has voted for the open step, which the servers may have
        made."""
        return self._voted == self.job.version

    @property
    def is_other_thread(self) -> bool:
        """Returns whether another thread than the caller trains the model."""
        return threading.get_ident() != self._thread

    @property
    def sees_writes(self) -> bool:
        """Returns whether the caller can tell what the program has written on this worker since the
        last step: no step is being decided, and no other thread is training."""
        if self.is_undecided:
            return False
        return not self.is_other_thread or between_operations() is not None

    @property
    def needs_copies(self) -> bool:
        """Returns whether the caller must not read the parameters on this worker: it is a signal
        handler or another thread, or a step was interrupted while it was decided."""
        if self.gatherer is None:
            return self.is_undecided
        return self.is_undecided or self.is_other_thread or is_within_operation()

    def read(self, fetch: Callable[[int], R]) -> R:
        """Calls ``fetch`` with the version of the servers, again if a later one replaces it."""
        for _ in range(_READS - 1):
            with contextlib.suppress(VersionGoneError):
                return fetch(self._decided_version())
        return fetch(self._decided_version())

    def _decided_version(self) -> int:
        """The version that the servers have when the open step is decided, or when that takes too
        long, because other ranks have left: several reads get the same one."""
        if self._is_behind:
            return self.job.current_version()
        end = time.monotonic() + _DECISION_TIME
        while (version := self.job.version) == self._voted:
            version = max(version, self.job.current_version())
            if version != self._voted or time.monotonic() > end:
                break
            time.sleep(0.01)
        return version

    def follow_changes(self) -> None:
        """Continues with a new job if the program has changed the specification of the job."""
        self.job.check_not_rolled_back()
        if self._is_behind:
            self._catch_up()
        if self._interrupted:
            self._end_interrupted_step()
        if self.gradients.were_dropped:
            self.discard()
        states = None if self.state_edits is None else self.state_edits.edited()
        if self.state_edits is not None and states is not None:
            self.reopen(states)
            self.state_edits.settle()
        # Gradients that were sent belong to the current job: the next step follows the change.
        if not self.gradients.any_sent and self.job.changed():
            self._check_may_reopen()
            self.job.check_written()
            self.reopen(None)

    @operation
    def take_values(self) -> None:
        """All ranks take the values of rank 0, after the program has loaded them. Every rank must
        call it."""
        self.follow_changes()
        # Otherwise they become part of the open step.
        if not self.gradients.any_sent:
            self._reopen(None)

    @operation
    def load(self, values: Iterable[tuple[T, T]]) -> None:
        """All ranks take new values, those of ``values`` on the ranks that upload them: see
        :meth:`ModelJob.reopen`. Every rank must call it."""
        self.follow_changes()
        self._check_nothing_sent("weights are loaded", "load them")
        self._reopen(None, values)

    def _check_nothing_sent(self, event: str, advice: str) -> None:
        if self.gradients.any_sent and self.level != "os":
            raise InvalidArgumentError(
                f"{event} between backward and step {self.job.version}, after gradients were sent "
                f"to the servers; {advice} before backward, or after optimizer.step() or "
                "zero_grad()"
            )

    @operation
    def reopen(self, states: Mapping[int, State[T]] | None) -> None:
        """Continues with a new job, with ``states`` as its optimizer state if given.

        Raises :class:`~zeroshard.InvalidArgumentError` if the job has checkpoints, or if gradients
        of the open step are on the servers only, which a new job does not take over.
        """
        self._check_may_reopen()
        self._check_nothing_sent("the state of the optimizer is loaded or changed", "change it")
        # The gradients are sent again, to the new job. What the program has said of them holds.
        clip_once = self._clip_once
        with self.gradients.scaled_as_before():
            self.discard()
        self._clip_once = clip_once
        self._reopen(states)

    @operation
    def roll_back(self) -> None:
        """Follows the job to the checkpoint from which it was restored, if it was, and drops
        everything of the steps after it."""
        while self.job.is_rolled_back:
            try:
                self._take_checkpoint()
            except RolledBackError:
                # Another server was lost meanwhile.
                if not self.job.is_rolled_back:
                    raise

    def _take_checkpoint(self) -> None:
        self.job.follow_restored()
        self.abandon()
        self._rest = None
        self._interrupted = self._is_behind = False
        self._buffers_are_shared()
        self.job.follow_buffers()
        self.job.receive_resident()
        self.job.mark()

    def abandon(self) -> None:
        """Drops everything that this worker has of the open step, which the servers have
        dropped."""
        self.job.forget()
        self.gradients.restart()
        self.gradients.drop()
        self._clip_once = self._voted = None
        if self.gatherer is not None:
            self.gatherer.restart()

    def _check_may_reopen(self) -> None:
        if self._checkpoints is not None:
            raise InvalidArgumentError(
                "the program has changed what the servers train (unfrozen parameters, parameter "
                "groups, a loaded state), which a job with checkpoints does not support; change it "
                "before group_sharded_parallel, or train without checkpoints"
            )
        resting = self.job.connection.status_of(self.job.job).resting if self._joining else []
        if resting:
            ranks = ", ".join(str(self.job.group.ranks[rank]) for rank in resting)
            raise InvalidArgumentError(
                "the program has changed what the servers train (unfrozen parameters, parameter "
                f"groups, a loaded state) while rank {ranks} has no more batches; change it before "
                "or after the loops under zeroshard.torch.join"
            )

    def _reopen(
        self,
        states: Mapping[int, State[T]] | None,
        values: Iterable[tuple[T, T]] | None = None,
    ) -> None:
        self._check_may_reopen()
        self._voted = None  # the version of the new job is 0
        self.job.reopen(states, values)
        self.gradients.watch()
        if self.gatherer is not None:
            self.gatherer.new_version(together=True)

    @operation
    def step(self) -> None:
        """Sends the remaining gradients, commits the step and receives the new parameters."""
        self.job.check_open()
        if self._holding and self.job.group.size > 1:
            raise InvalidArgumentError(
                "optimizer.step() is called inside no_sync(), and the servers cannot make a step "
                "of one rank alone; call it outside of no_sync(), or train with DataParallel, "
                "whose optimizer runs on each rank, for local steps (LocalSGD)"
            )
        self._thread = threading.get_ident()
        self.follow_changes()
        data = (None, False) if self._checkpoints is None else self._checkpoints.data()
        self._sent(self._replace)
        self.job.begin_step()
        self._sent(self.gradients.send_rest)
        written = self.job.written()
        self._sent(lambda: self._replace_values(written))
        received = [(entry.index, entry.incoming()) for entry in self.job.trained if entry.resident]
        report: Report = self._sent(lambda: self._commit_and_pull(written, received, data))
        for _, incoming in received:
            incoming.finish()
        self.last_report = report
        self._end_step(report)
        # Rank 0 sends none while it rests: the other ranks keep their own.
        if self._sync_buffers and 0 not in report.resting:
            self._receive_buffers()
        self._buffers_are_shared()

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

    def begin_join(self, excluding: bool) -> None:
        """Called before a loop that may have a different number of steps on each rank.
        ``excluding``: mean gradients are over the ranks whose loop has not ended."""
        shared = next((entry for entry in self.job.entries if entry.layout is not None), None)
        if shared is not None:
            raise InvalidArgumentError(
                f"parameter {shared.name!r} is distributed over ranks, which therefore must have "
                "the same number of batches; join supports models that every rank has as a whole"
            )
        if self.job.exchanges is not None:
            raise InvalidArgumentError(
                "the ranks of a group add their gradients, and must have the same number of "
                "batches; use zeroshard.torch.join without group_size"
            )
        self._joining, self.gradients.excluding = True, excluding
        self.gradients.outside.is_joining = True
        self._joins += 1

    def leave_join(self) -> None:
        """Called after such a loop, whether or not it has raised an error."""
        self._joining = self.gradients.excluding = self.gradients.outside.is_joining = False
        self._rest = None

    def end_evenly(self) -> None:
        """Raises :class:`~zeroshard.DisagreementError` if another rank makes a further step."""

        def discard() -> None:
            # If the other rank waits for the norm of the gradient, it receives it.
            self.job.send_absent(entry.index for entry in self.job.trained)
            self.job.job.flush()
            self.job.discard()

        self._sent(discard)
        self.gradients.restart()

    def rest(self) -> None:
        """Contributes nothing more until every rank rests."""
        excluding = self.gradients.excluding
        self._is_behind = True
        self._rest = self._sent(lambda: self.job.job.rest(self.job.version, excluding))

    def check_complete(self) -> None:
        """Raises an error if the loop has ended within a step."""
        self.follow_changes()
        if not self.gradients.is_complete:
            raise InvalidArgumentError(
                f"the loop has ended after a backward pass of step {self.job.version} and before "
                "the step; call optimizer.step() or zero_grad() before it ends"
            )

    def end_join(self) -> int:
        """Waits until every rank rests, and takes the parameters of the last step; with them the
        buffers of the rank that made it, if ranks share buffers, and the parameters that are not
        trained. Returns this rank."""
        assert self._rest is not None, "the rank rests"
        with self.job.connection.activity.waiting("commit"):
            step, last = self._sent(self._rest.wait)
        self._is_behind = False
        if step != self.job.version:
            self._take_version(step)
        self._share_written(last)
        self._buffers_are_shared()
        return int(last)

    def _share_written(self, source: int) -> None:
        """All ranks take the values that rank ``source`` has written to parameters after its last
        step, which become part of the next one; and its parameters that are not trained, and its
        buffers, if ranks share them."""
        written = self.job.hashes(self.job.written())
        self.job.follow_buffers()
        untrained = self.job.untrained(with_buffers=self._sync_buffers)
        own = [{index: value for index, value in enumerate(written) if value}, hashes_of(untrained)]
        ranks = [json.loads(text) for text in self.exchange("written values", json.dumps(own))]
        differ = [
            entry
            for entry in self.job.entries
            if any(
                of[0].get(str(entry.index)) != ranks[source][0].get(str(entry.index))
                for of in ranks
            )
        ]
        for entry in differ:
            if not entry.resident:
                raise InvalidArgumentError(
                    f"rank {self.job.group.ranks[source]} has written to parameter {entry.name!r} "
                    "after its last step, and the parameter is on the servers; write to it before "
                    "a step, or after the loops under zeroshard.torch.join"
                )
        if any(of[1] != ranks[source][1] for of in ranks):
            differ += untrained
        self.job.broadcast(source, differ)

    def exchange(self, what: str, value: str) -> list[str]:
        """Returns the value of each rank. Every rank must call it, once after each loop."""
        return self.job.exchange(f"{what} after loop {self._joins}", value)

    def unwind(self) -> None:
        """Called when a forward of the whole model has raised an exception."""
        if self.gatherer is not None:
            self.gatherer.unwind()

    @operation
    def clip(self, max_norm: float) -> float:
        """Clips the open step to ``max_norm``. Returns the global norm of the mean gradient."""
        self.follow_changes()
        self._sent(self._replace)
        norm = self.gradients.clip(max_norm)
        self._clip_once = max_norm
        return norm

    @operation
    def discard(self, *, keep: bool = False) -> None:
        """Makes the servers drop the gradients that were sent for the open step. Every rank must
        call it. For ``keep`` see :meth:`Gradients.restart`."""
        if self.gradients.any_sent:
            try:
                self._sent(self.job.discard, keep=keep)
            except StepAbortedError:
                pass  # the servers have already dropped them
        self.gradients.restart(keep=keep)
        self._clip_once = None

    # ---- internal

    @operation
    def _run(self, work: Callable[[], Any]) -> Any:
        """Calls ``work``, which looks at gradients."""
        self.follow_changes()
        return self._sent(work)

    def _replace(self) -> None:
        """If the program has changed gradients after they were sent, or what the job consists of,
        sends all gradients again, in which all ranks must take part."""
        if self._joining:
            self.gradients.send_replaced()
        changed = self.gradients.changed()
        if changed and self.gradients.is_clipped:
            raise self.gradients.changed_after_clipping(changed[0])
        moved = self.gradients.any_sent and self.job.changed()
        if not changed and not moved:
            return
        if changed and self._joining:
            self.gradients.norms()  # the answer has the ranks that rest
        resting, size = set(self.gradients.resting), self.job.group.size
        active = [self.job.group.ranks[rank] for rank in range(size) if rank not in resting]
        current = {id(entry.tensor): self.gradients.current(entry) for entry in self.job.trained}
        contributed = self.gradients.contributed
        if moved:
            self._reopen(None)
            for entry in self.job.trained:
                # A parameter that was not trained before has a gradient of this rank.
                if id(entry.tensor) not in current:
                    current[id(entry.tensor)] = self.gradients.current(entry)
        else:
            self.job.discard()
        of_ranks = share("optimizer.step", json.dumps(sorted(contributed)), active)
        self.gradients.drop_unused(contributed.union(*map(json.loads, of_ranks)), current)
        texts = {}
        for entry in changed:
            text, gradient = "none", current.get(id(entry.tensor))
            if gradient is not None:
                [value] = hashes([self.job.framework.outgoing(gradient)])
                text = f"values with the hash {value:016x}"
            texts[f"the gradient of parameter {entry.name!r}"] = text
        if self.level != "os":
            # Each rank sends the mean of all, which only counts as such if every rank sends it.
            for entry in self.job.trained:
                has = "a gradient" if current.get(id(entry.tensor)) is not None else "none"
                texts.setdefault(f"the gradient of parameter {entry.name!r}", has)
        agree("optimizer.step", texts, active)
        for entry in self.job.trained if self.level != "os" else changed:
            mean = current.get(id(entry.tensor))
            if mean is not None:
                current[id(entry.tensor)] = self.gradients.as_contribution(mean)
        self.gradients.resend(current)

    def _end_step(self, report: Report) -> None:
        self.job.version += 1
        self.steps += 1
        self.job.connection.activity.steps += 1
        self._clip_once = None
        self.gradients.end_step(report.clip_coefficient)
        self.job.mark()
        if self.gatherer is not None:
            self.gatherer.new_version(together=True)

    def _sent(self, work: Callable[[], Any], *, keep: bool = False) -> Any:
        """Calls ``work``, which sends something. If it fails, the step begins again without
        gradients. For ``keep`` see :meth:`Gradients.restart`."""
        try:
            return work()
        except BaseException as error:
            self.job.forget()
            self.gradients.restart(keep=keep)
            self._clip_once = None
            # The servers have dropped an aborted step. After any other error, or Ctrl-C, they may
            # have a part of the step.
            self._interrupted = not isinstance(error, (StepAbortedError, RolledBackError))
            if not self._interrupted:
                self._voted = None
            raise

    def _end_interrupted_step(self) -> None:
        """Makes the servers drop their part of an interrupted step, so that it is not mixed with
        the next attempt."""
        try:
            self.job.discard()
        except StepAbortedError:
            pass  # the servers have already dropped it
        except StepMismatchError:
            # The step was decided before the interruption: the next step starts from its result.
            self._take_version(self.job.version + 1)
            if self._sync_buffers and not self._joining:
                self._receive_buffers()
        self._interrupted, self._voted = False, None

    def _catch_up(self) -> None:
        """Takes the current version, after the other ranks may have made any number of steps."""
        version = self.job.current_version()
        if version != self.job.version:
            self._take_version(version)
        self._is_behind = False

    def _take_version(self, version: int) -> None:
        """Takes the parameters of a version that this rank has not made."""
        self.job.version = version
        self._buffers_are_shared()
        self.job.receive(entry for entry in self.job.trained if entry.resident)
        self.job.mark()
        if self.gatherer is not None:
            self.gatherer.new_version()

    def _commit_and_pull(
        self,
        written: list[Entry[T]],
        received: list[tuple[int, Incoming]],
        data: tuple[bytes | None, bool],
    ) -> Report:
        """Commits the step and receives the new parameters. ``data``: that of this rank for a
        checkpoint, and whether it follows."""
        arrays = [(index, incoming.array) for index, incoming in received]
        if self.job.exchanges is None:
            return self._commit(written, arrays, data)
        report = self._commit(written, [], data)
        with self.job.connection.activity.waiting("pull"):
            self.job.exchanges.pull_all(report.version, arrays)
        return report

    def _commit(
        self,
        written: list[Entry[T]],
        targets: list[tuple[int, Array]],
        data: tuple[bytes | None, bool],
    ) -> Report:
        limits = [norm for norm in (self._clip_once, self._max_norm) if norm is not None]
        factors = self.gradients.factors()
        if self._clip_sets:
            factors = self.gradients.clip_sets(self._clip_sets)
        hashes = self.job.hashes(written)
        self._voted = self.job.version
        with self.job.connection.activity.waiting("commit"):
            return self.job.job.commit(
                self.job.version,
                self.job.groups(),
                loss_scale=self.loss_scale,
                max_norm=min(limits, default=None),
                gradient_factors=factors,
                written=hashes,
                targets=targets,
                user_data=data[0],
                user_data_follows=data[1],
            )

    def _replace_values(self, written: list[Entry[T]]) -> None:
        """Sends the values that the program has written, and the buffers if ranks share them or
        checkpoints have them."""
        # All buffers, since batch norm's updates of them do not count as modifications.
        sends_buffers = self._sync_buffers or self._checkpoints is not None
        if sends_buffers:
            self.job.follow_buffers()
        buffers = self.job.buffers if sends_buffers else ()
        arrays = [
            (entry.index, entry.outgoing())
            for entry in (*written, *buffers)
            if self.job.job.uploads(entry.index)
        ]
        if arrays:
            self.job.job.replace(self.job.version, arrays)


def _nothing(parameter: Any) -> None:
    pass


def _alive(found: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if found is None:
        raise InvalidArgumentError(
            "a gradient of a model that was deleted is no longer available; keep the model that "
            "group_sharded_parallel returned"
        )
    return found


def forget(sharding: Sharding[Any]) -> None:
    """Ends the training of a model that is not sharded any more."""
    _all.discard(sharding)
    sharding.gradients.unwatch()
    sharding.job.retire()


def all_open() -> list[Sharding[Any]]:
    """The sharded models of this process whose session is open."""
    return [sharding for sharding in _all if not sharding.job.connection.closed]


def is_sharded(parameters: Iterable[Any]) -> bool:
    """Returns whether a model with one of these parameters is sharded already."""
    given = list(parameters)
    if find(given) is None:
        return False
    gc.collect()  # the program may have deleted it
    return find(given) is not None


def find(parameters: Iterable[Any]) -> Sharding[Any] | None:
    """A sharded model with one of these parameters. None if there is none."""
    given = {id(parameter) for parameter in parameters}
    found = (
        other for other in _all if any(id(entry.tensor) in given for entry in other.job.entries)
    )
    return next(found, None)


def clip(parameters: Iterable[T], max_norm: float, norm_type: float) -> float | None:
    """Clips the open step of the sharded model that trains these parameters.

    Args:
        parameters: all parameters of its optimizer.
        max_norm: the norm to which the step is clipped.
        norm_type: 2.0.

    Returns:
        The global norm of the mean gradient over all ranks. None if the framework's own function
            must clip: there is no such model, or its optimizer does not have all that are given.

    Raises:
        InvalidArgumentError: only some of the optimizer's parameters are given, or ``norm_type`` is
            not 2.0.
    """
    given = {id(parameter): parameter for parameter in parameters}
    sharding = _trainer(given)
    if sharding is None:
        return None
    trained, framework = (
        {id(entry.tensor) for entry in sharding.job.trained},
        sharding.job.framework,
    )
    if any(key not in trained and framework.trains(given[key]) for key in given):
        return None
    if norm_type != 2.0:
        raise InvalidArgumentError(
            f"norm_type is {norm_type}; it must be 2.0 for sharded parameters"
        )
    return sharding.clip(float(max_norm))


def _trainer(given: Collection[int]) -> Sharding[Any] | None:
    """The sharded model that trains the parameters with these ids. None if there is none."""
    for sharding in _all:
        trained = list(sharding.job.trained)
        missing = [entry for entry in trained if id(entry.tensor) not in given]
        if len(missing) == len(trained):
            continue
        for entry in missing:
            if sharding.job.framework.is_stepped(entry.tensor):
                raise InvalidArgumentError(
                    f"parameters do not include {entry.name!r}; pass all parameters that the "
                    "sharded optimizer trains, since the global norm is over all of them"
                )
        return sharding
    return None
