"""Opens the job of a model, and continues with a new one when its specification has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from .._averages import Average
from .._spikes import SpikePolicy
from .._native import Job, Mesh
from ..errors import InvalidArgumentError, JobExistsError, JobFailedError
from .describing import describe
from .entry import Entry
from .job import ModelJob
from .layout import job_layouts
from .optimizer_spec import State
from .owners import owners
from .saving import Saving
from .stored import stored_states
from .tensors import T
from .traffic import Traffic
from .uploading import upload_changed, upload_initial


@dataclass(frozen=True)
class JobSettings:
    """What the job of a model is opened with, beside its tensors and its optimizer."""

    #: Elements of a bucket of gradients.
    bucket_numel: int
    #: ``True`` if servers with a GPU keep the optimizer state outside of its memory.
    offload: bool
    #: The dtype of the optimizer state on the servers.
    state_dtype: str
    #: The running averages of the parameters, by name.
    averages: Mapping[str, Average]
    #: The policy on spikes; None: the job has none.
    spikes: SpikePolicy | None
    #: None: the job has no checkpoints.
    saving: Saving | None


class Opening(Generic[T]):
    """Opens the jobs of a model, one after the other."""

    def __init__(self, job: ModelJob[T], traffic: Traffic[T], settings: JobSettings) -> None:
        self._job = job
        self._traffic = traffic
        self._settings = settings
        #: The parameters that the program has removed from the optimizer, with their state, by id.
        self._removed: dict[int, tuple[Entry[T], State[T]]] = {}

    def open(
        self,
        states: Mapping[int, State[T]],
        fetched: Collection[int],
        initial: Iterable[Sequence[T]],
    ) -> None:
        """Creates the first job. Each parameter and buffer takes the value of the first rank that
        has it.

        ``states``: existing optimizer state, by the ``id`` of its parameter. ``fetched``: the ids
        of the parameters that are on this worker only while they are used. ``initial``: yields
        those of them that have their values until the next ones are requested, and gives all other
        tensors their values.

        Raises :class:`~zeroshard.errors.JobFailedError` if this fails on another rank.
        """
        job = self._job
        self._start(fetched, states)
        try:
            if self._has_values():
                for _ in initial:
                    pass  # gives the tensors memory
                job.receive_resident()
            else:
                self._together(lambda: upload_initial(job, states, initial))
                job.job.initialised()
                others = (entry for entry in job.received if entry.resident)
                job.receive(others, label="receiving")
        except BaseException:
            job.connection.leave(job.job, wait=False, shown=True)
            raise
        self._has_begun()

    def reopen(
        self,
        states: Mapping[int, State[T]] | None = None,
        values: Iterable[tuple[T, T]] | None = None,
    ) -> None:
        """Continues with a new job from the last version of the current one.

        ``values``: gives the tensors that this rank uploads and that are on this worker new values,
        and yields the others that it uploads with their new values, which are not needed any more
        when the next ones are requested.

        The servers copy the master weights and, unless ``states`` is given, the optimizer state
        where it still fits. Buffers, and parameters that are new or that the program has written
        to, take the value of the first rank that has them. The other ranks receive them.
        """
        job = self._job
        if states is None:
            job.optimizer.check_state_grows(self._has_stepped)
            states = self._follow_removals()
        old, before = job.job, {entry.name: entry for entry in job.entries}
        fetched = {id(entry.tensor) for entry in job.entries if not entry.resident}
        self._start(fetched, states or {}, (old, job.version), fresh_state=states is not None)
        if values is None:
            upload_changed(job, before, states or {}, ())
        else:
            given = values
            self._together(lambda: upload_changed(job, before, states or {}, given))
        job.job.initialised()
        job.receive(entry for entry in job.received if entry.resident)
        self._has_begun()
        job.connection.leave(old, shown=True)

    def _start(
        self,
        fetched: Collection[int],
        states: Mapping[int, State[T]],
        predecessor: tuple[Job, int] | None = None,
        *,
        fresh_state: bool = False,
    ) -> None:
        """Creates and joins a job. ``states``: existing optimizer state, by the ``id`` of its
        parameter."""
        job, settings = self._job, self._settings
        job.optimizer.follow_kinds()
        # A parameter keeps its optimizer state while it is frozen.
        kept = {id(entry.tensor) for entry in job.trained}.union(states)
        job.describe(describe(job.framework, job.model, job.optimizer, kept, fetched))
        saving = settings.saving
        name = (
            job.connection.job_name("sharded", job.group.ranks, lasting=saving is not None)
            if predecessor is None
            else predecessor[0].successor_name
        )
        self._divide()
        meshes = self._place_entries(name)
        specs = [entry.spec(job.optimizer.needs_whole(entry)) for entry in job.entries]
        job.job = job.connection.open(
            name,
            specs,
            job.optimizer.reserve(states),
            job.group,
            settings.bucket_numel,
            meshes=meshes,
            predecessor=predecessor,
            fresh_state=fresh_state,
            checkpoints=None if saving is None else saving.policy,
            resume=saving is not None and saving.resumes,
            group_size=self._traffic.group_size,
            offload=settings.offload,
            state_dtype=settings.state_dtype,
            averages=settings.averages,
            spikes=settings.spikes,
        )
        job.end_others()
        self._traffic.begin_job(settings.bucket_numel)
        job.version = 0

    def _has_begun(self) -> None:
        """The servers have all values of the job, and this rank has those that stay on it."""
        job = self._job
        if self._traffic.group_size == 1:
            # In memory in which each version can be shown. (What a group exchanges is copied.)
            for entry in job.trained:
                if entry.resident:
                    job.framework.adopt(entry.tensor)
        job.mark()
        if job.optimizer.on_ranks is not None:
            job.optimizer.on_ranks.settle()

    def _divide(self) -> None:
        """Divides what optimizers on the ranks step among the ranks."""
        job = self._job
        ranks = job.optimizer.on_ranks
        if ranks is None:
            return
        units = list(ranks.units())
        costs = [sum(map(job.framework.numel, parameters)) for parameters, _ in units]
        for (parameters, slots), rank in zip(units, owners(costs, job.group.size)):
            for parameter in parameters:
                job.entry(parameter).replaced_by = rank
            for slot in slots:
                job.entries[job.index_of(slot)].replaced_by = rank

    # ---- together with the other ranks

    def _place_entries(self, name: str) -> list[Mesh]:
        """Determines the layouts of the entries together with the other ranks. Returns the job's
        meshes."""
        job = self._job
        named = {entry.name: entry for entry in job.entries}
        agreed = job_layouts(
            {name: job.framework.layout(entry.tensor) for name, entry in named.items()},
            lambda name: named[name].trained,
            job.group.ranks,
            lambda what, value: job.connection.exchange(f"{name}/{what}", value, job.group.ranks),
            self._alike(),
        )
        for entry in job.entries:
            entry.layout = agreed.layouts[entry.name]
        return agreed.meshes

    def _alike(self) -> dict[str, str]:
        """What all ranks must open the job with, as text by name."""
        optimizer, settings = self._job.optimizer, self._settings
        tensors = {f"tensor {entry.name!r}": entry.text for entry in self._job.entries}
        options = {
            "the optimizer": " and ".join(dict.fromkeys(optimizer.kinds)),
            "the number of parameter groups": str(len(optimizer.groups())),
            "offload": str(settings.offload),
            **self._job.connection.wires,
            "state_dtype": settings.state_dtype,
            "ema": str(dict(settings.averages)),
            "spikes": str(settings.spikes and settings.spikes.as_tuple()),
            "the URL of the checkpoints": str(settings.saving and settings.saving.url),
            **({} if optimizer.on_ranks is None else optimizer.on_ranks.alike()),
        }
        values = {
            f"{key} of parameter group {number}": str(value)
            for number, (_, group) in enumerate(optimizer.groups())
            for key, value in group.items()
        }
        return {**tensors, **options, **values}

    def _has_values(self) -> bool:
        """Returns whether the job has started from a checkpoint, and nothing is uploaded. Every
        rank must call it before it uploads anything."""
        job, saving = self._job, self._settings.saving
        if saving is None:
            return False
        version = job.job.version
        job.join_restored()
        # No rank uploads anything before all have joined.
        versions = job.exchange("version", str(version))
        if len(set(versions)) > 1:
            raise JobFailedError(
                f"the ranks have joined job {job.job.name!r} at versions {', '.join(versions)}; "
                "another program is using it: give this run another name"
            )
        if version is None:
            return False
        if not saving.resumes:
            raise JobExistsError(
                f"job {job.job.name!r} is at version {version}, and resume is 'never'; delete the "
                "job, give this run another name, or pass resume='auto'"
            )
        job.start_at(version)
        return True

    def _together(self, work: Callable[[], None]) -> None:
        """Calls ``work`` on every rank. If it fails on one, the others do not wait for its values,
        but raise an error as well."""
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        own = "" if error is None else f"{type(error).__name__}: {error}"
        ranks = self._job.group.ranks
        try:
            texts = self._job.exchange("values", own)
        except Exception:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for rank, text in zip(ranks, texts, strict=True):
            if text:
                raise JobFailedError(f"rank {rank} has failed to initialise the model: {text}")

    # ---- the state of the previous job

    def _has_stepped(self) -> bool:
        return any(number for number, _ in self._job.job.applied_steps(self._job.version))

    def _follow_removals(self) -> Mapping[int, State[T]] | None:
        """Keeps the state of parameters that the program has removed from the optimizer. Returns
        the whole state if it has added one of them again, which continues with its own."""
        job = self._job
        members = set().union(*job.optimizer.members())
        for entry in job.trained:
            if id(entry.tensor) not in members:
                for _, state in stored_states(job, job.version, entry.tensor):
                    self._removed[id(entry.tensor)] = entry, state
        added = self._removed.keys() & members
        if not added:
            return None
        if job.distributed is not None:
            raise InvalidArgumentError(
                "a parameter was removed from the optimizer and added again, and the servers "
                f"cannot continue with its state, since parameter {job.distributed.name!r} is "
                "distributed over ranks; freeze parameters with requires_grad_(False) instead of "
                "removing them"
            )
        whole = {id(entry.tensor): state for entry, state in stored_states(job, job.version)}
        kept = {key: state for key, state in whole.items() if key in members}
        return kept | {key: self._removed.pop(key)[1] for key in added}
