"""The tensors of a model and its optimizer as a job of the cluster.

The specification of a job is immutable: its tensors, which of them are trained, and the optimizer.
When the program changes it (unfreezes a parameter, adds a parameter group, loads a state), a new
job continues from the last version of the previous one. Values that the program writes to
parameters become part of the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

from .. import _native
from .._agreement import agree
from .._checkpoints import Checkpoints
from .._connection import Connection
from .._native import Array, Box, Job, Mesh, Transfer
from .._rendezvous import ProcessGroup
from ..errors import (
    InvalidArgumentError,
    JobExistsError,
    JobFailedError,
    NotInitialisedError,
    RolledBackError,
)
from .broadcast import broadcast, offer
from .entry import Entry, hashes_of, mark, modified
from .exchanges import Exchanges, Pull
from .framework import Framework, Optimizer, T
from .layout import job_layouts
from .hyperparameters import reserving

#: Bytes of host memory that are used at a time when the optimizer's state is fetched, for each
#: state tensor.
_CHUNK = 1 << 30

#: The optimizer state of a parameter: the number of applied steps, the scalar state after them, and
#: host tensors by name.
State = tuple[int, Sequence[float], Mapping[str, T]]


class ModelJob(Generic[T]):
    """The job of one model and its optimizer, on one rank."""

    def __init__(
        self,
        connection: Connection,
        framework: Framework[T],
        model: Any,
        optimizer: Optimizer[T],
        group: ProcessGroup,
        bucket_numel: int,
        checkpoints: Checkpoints | None = None,
        exchanges: Exchanges[T] | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """``exchanges``: the exchanges of this rank with its group; None without groups.
        ``offload``: whether servers with a GPU keep the optimizer state outside of its memory."""
        self.framework = framework
        self.connection = connection
        self._model = model
        self.optimizer = optimizer
        self.group = group
        self._bucket_numel = bucket_numel
        self.optimizer_name = optimizer.name()
        self.entries: list[Entry[T]] = []
        self._by_tensor: dict[int, Entry[T]] = {}
        #: The open job, and the job with the buffers that this rank offers, in a list for those who
        #: must not keep this object.
        self._current: list[Job] = []
        self.version = 0
        self.checkpoints = checkpoints
        self.exchanges = exchanges
        self._offload = offload
        #: The state tensors that each parameter group has used so far. They stay on the servers
        #: when the program changes a hyperparameter so that steps do not use them any more.
        self._used: list[set[str]] = []
        #: The parameters that the program has removed from the optimizer, with their state, by id.
        self._removed: dict[int, tuple[Entry[T], State[T]]] = {}
        #: The version of the checkpoint from which the job was started or restored last; 0: none.
        self.started_at = 0
        #: :attr:`Job.restored`, as far as this rank has followed.
        self._followed: tuple[int, int] | None = None

    def entry(self, tensor: T) -> Entry[T]:
        """The entry of a tensor of the model."""
        return self._by_tensor[id(tensor)]

    def find(self, tensor: T) -> Entry[T] | None:
        """The entry of a tensor. None if the job does not have the tensor."""
        return self._by_tensor.get(id(tensor))

    @property
    def trained(self) -> Iterator[Entry[T]]:
        """The entries that the servers update, in manifest order."""
        return (entry for entry in self.entries if entry.trained)

    @property
    def buffers(self) -> Iterator[Entry[T]]:
        """The entries of the model's buffers."""
        return (entry for entry in self.entries if entry.buffer)

    def follow_buffers(self) -> None:
        """Finds the tensors by which the program has replaced buffers (``self.count = self.count +
        1``).

        Raises :class:`~zeroshard.InvalidArgumentError` if one has another shape or dtype.
        """
        named = dict(self.framework.buffers(self._model))
        for entry in self.buffers:
            tensor = named.get(entry.name)
            if tensor is not None and tensor is not entry.tensor:
                entry.replace(tensor)
                self._by_tensor[id(tensor)] = entry

    @property
    def parameters(self) -> Iterable[Entry[T]]:
        """The entries of the parameters, also of those that are not trained."""
        return (entry for entry in self.entries if not entry.buffer)

    def communicates(self) -> str | None:
        """What makes the ranks communicate in a forward or a backward pass, if anything does."""
        shared = next((entry for entry in self.entries if entry.layout is not None), None)
        if shared is not None:
            return f"parameter {shared.name!r}, which is distributed over ranks"
        names = {type(module).__name__ for module in self.framework.modules(self._model)}
        return "SyncBatchNorm" if "SyncBatchNorm" in names and self.group.size > 1 else None

    def record_buffers(self) -> Callable[[], None]:
        """Copies the model's buffers. Returns a function that restores them."""
        return self.framework.record_buffers(self._model)

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        """The current hyperparameters of the optimizer."""
        return self.optimizer.groups(self.optimizer_name)

    def changed(self) -> bool:
        """Returns whether the program has changed the specification of the job.

        A parameter that was trained before stays a part of the specification while it is frozen:
        no rank has a gradient of it, so that steps keep its values and its optimizer state.
        """
        used = self._state_used()
        if self._members() != self._specified or self.optimizer.name() != self.optimizer_name:
            return True
        return not set().union(*used) <= set(self._optimizers[0].state) or any(
            entry.optimized
            and not entry.trained
            and self.framework.is_stepped(entry.tensor)
            or entry.trained
            and entry.clips != self.framework.clips(entry.tensor)
            for entry in self.entries
        )

    def written(self) -> list[Entry[T]]:
        """The parameters that the program has written to since they were last marked."""
        parameters = [entry for entry in self.entries if not entry.buffer]
        for entry in parameters:
            entry.check_kind()
        return modified(parameters)

    def check_written(self) -> None:
        """Raises :class:`~zeroshard.DisagreementError` if the program has written different values
        to trained parameters on the ranks."""
        hashes = self.hashes(self.written())
        written = {
            f"values that the program has written to tensor {entry.name!r}": f"hash {value:016x}"
            for entry, value in zip(self.entries, hashes)
            if value
        }
        agree(
            "a forward or step after the model or the optimizer has changed",
            written,
            self.group.ranks,
        )

    def hashes(self, written: Iterable[Entry[T]]) -> list[int]:
        """What all ranks must have written alike: a hash for each entry of the job, or 0 if it is
        not in ``written``. Empty if all are 0.

        Parameters that are on every rank and do not train may differ. Of distributed parameters
        each rank writes its own part.
        """
        hashes = [0] * len(self.entries)
        alike = [entry for entry in written if entry.trained or not entry.resident]
        for entry, value in zip(alike, hashes_of(alike), strict=True):
            is_distributed = self.framework.layout(entry.tensor) is not None
            hashes[entry.index] = 1 if is_distributed else value or 1
        return hashes if any(hashes) else []

    def _members(self) -> list[list[int]]:
        """The ids of the parameters of each parameter group."""
        return [[id(parameter) for parameter in group] for group in self.optimizer.parameters()]

    def _state_used(self) -> list[set[str]]:
        """The state tensors that the next step uses, by parameter group."""
        return [set(_native.Optimizer(*values).state) for values in self.groups()]

    @property
    def used_state(self) -> list[set[str]]:
        """The state tensors that each parameter group has used so far."""
        return self._used

    def begin_step(self) -> None:
        """Called before each step, which may use state tensors that a group has not used before.

        Raises :class:`~zeroshard.InvalidArgumentError` if the servers do not begin to use them as
        the framework does.
        """
        for number, (names, (_, values)) in enumerate(zip(self._state_used(), self.groups())):
            if not names <= self._used[number] and values.get("dampening"):
                raise InvalidArgumentError(
                    f"the momentum of parameter group {number} was 0 until now, while other groups "
                    "have momentum, and its dampening is not 0; set the momentum before the first "
                    "step, or the dampening to 0"
                )
            self._used[number] |= names

    def _reserve_state(self, states: Mapping[int, State[T]]) -> list[tuple[str, dict[str, float]]]:
        """Adds the state tensors of the next step, and those in ``states``, to those that the
        servers keep. Returns hyperparameters with which every group has all of them."""
        groups, used = self.optimizer.parameters(), self._state_used()
        self._specified = self._members()
        self._used += [set() for _ in groups[len(self._used) :]]
        for number, (parameters, names) in enumerate(zip(groups, used, strict=True)):
            given = (states[id(p)][2] for p in parameters if id(p) in states)
            self._used[number] |= names.union(*given)
        kept = set().union(*self._used[: len(groups)])
        return [(name, reserving(name, values, kept)) for name, values in self.groups()]

    @property
    def uploaded(self) -> list[Entry[T]]:
        """The entries that this rank uploads: on rank 0 all replicated tensors, on every rank the
        boxes of which it is the first owner."""
        return [entry for entry in self.entries if self.job.uploads(entry.index)]

    @property
    def received(self) -> list[Entry[T]]:
        """The entries that another rank uploads."""
        return [entry for entry in self.entries if not self.job.uploads(entry.index)]

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
        self._start(fetched, states)
        try:
            if self._has_values():
                for _ in initial:
                    pass  # gives the tensors memory
                self.receive_resident()
            else:
                self._together(lambda: self._upload_initial(states, initial))
                self.job.initialised()
                others = (entry for entry in self.received if entry.resident)
                self.receive(others, label="receiving")
        except BaseException:
            self.connection.leave(self.job, wait=False)
            raise
        self.mark()

    def _has_values(self) -> bool:
        """Returns whether the job has started from a checkpoint, and nothing is uploaded. Every
        rank must call it before it uploads anything."""
        if self.checkpoints is None:
            return False
        version, self._followed = self.job.version, self.job.restored
        # No rank uploads anything before all have joined.
        versions = self.exchange("version", str(version))
        if len(set(versions)) > 1:
            raise JobFailedError(
                f"the ranks have joined job {self.job.name!r} at versions {', '.join(versions)}; "
                "another program is using it: give this run another name"
            )
        if version is None:
            return False
        if not self.checkpoints.resumes:
            raise JobExistsError(
                f"job {self.job.name!r} is at version {version}, and resume is 'never'; delete the "
                "job, give this run another name, or pass resume='auto'"
            )
        self.version = self.started_at = version
        return True

    def check_open(self) -> None:
        """Raises :class:`~zeroshard.NotInitialisedError` if the session was closed."""
        if self.connection.closed:
            raise NotInitialisedError(
                "the session was closed by zeroshard.shutdown(), and with it the part of this "
                "model that was on the servers; read, save and train it before that, or create it "
                "again after zeroshard.init()"
            )

    @property
    def is_rolled_back(self) -> bool:
        """Returns whether the job was restored from its last checkpoint, and this rank has not
        followed."""
        return self.job.restored != self._followed

    def check_not_rolled_back(self) -> None:
        """Raises :class:`~zeroshard.RolledBackError` if the job was restored from its last
        checkpoint, and this rank has not followed."""
        restored = self.job.restored
        if restored is not None and restored != self._followed:
            error = RolledBackError(
                f"job {self.job.name!r} was restored from its checkpoint of version {restored[1]}, "
                "because later state was lost; call Checkpoints.resume()"
            )
            error.version = restored[1]
            raise error

    def follow_restored(self) -> None:
        """Takes the version to which the job was restored."""
        restored = self.job.restored
        assert restored is not None, "the job was restored"
        self._followed, self.version = restored, restored[1]
        self.started_at = self.version

    # ---- the open step

    def send_gradient(self, entry: Entry[T], gradient: T) -> None:
        """Sends this rank's gradient in the open step."""
        self.check_open()
        try:
            array = self.framework.outgoing(gradient)
        except InvalidArgumentError:
            entry.check_kind()  # raises an error that names the parameter
            raise
        if self.exchanges is not None:
            self.exchanges.gradient(self.version, entry.index, array)
        else:
            self.job.gradient(self.version, entry.index, array)

    def send_absent(self, indices: Iterable[int]) -> None:
        """Reports the tensors of which this rank has no gradient in the open step."""
        if self.exchanges is None:
            self.job.absent(self.version, list(indices))
            return
        for index in indices:
            self.exchanges.gradient(self.version, index, None)

    def finish_gradients(self) -> None:
        """Waits until the group has exchanged all gradients of the open step."""
        if self.exchanges is not None:
            self.exchanges.finish()

    def discard(self) -> None:
        """Begins another attempt at the open step. Every rank must call it."""
        if self.exchanges is not None:
            self.exchanges.forget()
        self.job.discard(self.version)

    def forget(self) -> None:
        """Drops everything that this rank has of the open step."""
        if self.exchanges is not None:
            self.exchanges.forget()
        self.job.forget()

    def pull(self, arrays: list[tuple[int, Array]], *, together: bool) -> Transfer | Pull[T]:
        """Starts to fetch trained parameters at the current version. ``together``: all ranks of the
        group do this."""
        if self.exchanges is not None and together:
            return self.exchanges.pull(self.version, arrays)
        return self.job.pull(self.version, arrays)

    def compare_pulls(self, held: list[int], ahead: list[int]) -> None:
        """All ranks of the group call this before they pull together: whether they hold the same
        units, and fetch the same ones."""
        if self.exchanges is not None:
            self.exchanges.compare(self.version, [held, ahead])

    def _upload_initial(
        self, states: Mapping[int, State[T]], initial: Iterable[Sequence[T]]
    ) -> None:
        sent: set[int] = set()
        for tensors in initial:
            entries = [self.entry(tensor) for tensor in tensors]
            self._upload([one for one in entries if self.job.uploads(one.index)], [], states)
            sent.update(entry.index for entry in entries)
        self._upload([one for one in self.uploaded if one.index not in sent], [], states)

    def _together(self, work: Callable[[], None]) -> None:
        """Calls ``work`` on every rank. If it fails on one, the others do not wait for its values,
        but raise an error as well."""
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        own = "" if error is None else f"{type(error).__name__}: {error}"
        ranks = self.group.ranks
        try:
            texts = self.exchange("values", own)
        except Exception:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        for rank, text in zip(ranks, texts, strict=True):
            if text:
                raise JobFailedError(f"rank {rank} has failed to initialise the model: {text}")

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
        if states is None:
            self._check_state_grows()
            states = self._follow_removals()
        old, before = self.job, {entry.name: entry for entry in self.entries}
        fetched = {id(entry.tensor) for entry in self.entries if not entry.resident}
        self._start(fetched, states or {}, (old, self.version), fresh_state=states is not None)
        if values is None:
            self._upload_changed(before, states or {})
        else:
            given = values
            self._together(lambda: self._upload_changed(before, states or {}, given))
        self.job.initialised()
        self.receive(entry for entry in self.received if entry.resident)
        self.mark()
        self.connection.leave(old)

    def _follow_removals(self) -> Mapping[int, State[T]] | None:
        """Keeps the state of parameters that the program has removed from the optimizer. Returns
        the whole state if it has added one of them again, which continues with its own."""
        members = set().union(*self._members())
        for entry in self.trained:
            if id(entry.tensor) not in members:
                for _, state in self.states(self.version, entry.tensor):
                    self._removed[id(entry.tensor)] = entry, state
        added = self._removed.keys() & members
        if not added:
            return None
        shared = next((entry for entry in self.entries if entry.layout is not None), None)
        if shared is not None:
            raise InvalidArgumentError(
                "a parameter was removed from the optimizer and added again, and the servers "
                f"cannot continue with its state, since parameter {shared.name!r} is distributed "
                "over ranks; freeze parameters with requires_grad_(False) instead of removing them"
            )
        whole = {id(entry.tensor): state for entry, state in self.states(self.version)}
        kept = {key: state for key, state in whole.items() if key in members}
        return kept | {key: self._removed.pop(key)[1] for key in added}

    def _check_state_grows(self) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError` if the next step uses a state tensor that
        the optimizer cannot begin to keep after its first step. (SGD can.)"""
        used: set[str] = set().union(*self._state_used())
        missing = sorted(used - set(self._optimizers[0].state))
        name = self.optimizer_name
        if missing and name != "sgd" and any(n for n, _ in self.job.applied_steps(self.version)):
            raise InvalidArgumentError(
                f"a hyperparameter of {name} was changed after its first step, and the next step "
                f"uses the state {missing[0]!r}, which the optimizer has not kept; set the "
                "hyperparameter before the first step, or load a state that has it with "
                "load_state_dict"
            )

    def _upload_changed(
        self,
        before: Mapping[str, Entry[T]],
        states: Mapping[int, State[T]],
        values: Iterable[tuple[T, T]] = (),
    ) -> None:
        """Uploads everything that the servers cannot copy from the previous job."""
        sent: set[int] = set()
        for tensor, value in values:
            entry = self.entry(tensor)
            self.job.initialise([(entry.index, entry.outgoing(value))], label="uploading")
            sent.add(entry.index)
        ours = [entry for entry in self.uploaded if entry.index not in sent]
        kept = [entry for entry in ours if entry.continues(before.get(entry.name))]
        indices = {entry.index for entry in kept}
        uploaded = [entry for entry in ours if entry.index not in indices]
        self._upload(uploaded, kept, states)

    def _start(
        self,
        fetched: Collection[int],
        states: Mapping[int, State[T]],
        predecessor: tuple[Job, int] | None = None,
        *,
        fresh_state: bool = False,
    ) -> None:
        """``states``: existing optimizer state, by the ``id`` of its parameter."""
        self.optimizer_name = self.optimizer.name()
        self.entries = self._describe(states)
        for entry in self.entries:
            entry.resident = id(entry.tensor) not in fetched
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        saved = self.checkpoints
        name = (
            self.connection.job_name("sharded", self.group.ranks, lasting=saved is not None)
            if predecessor is None
            else predecessor[0].successor_name
        )
        meshes = self._place_entries(name)
        whole = _native.Optimizer(self.optimizer_name).needs_whole_tensors
        specs = [entry.spec(whole) for entry in self.entries]
        groups = self._reserve_state(states)
        self._optimizers = [_native.Optimizer(*values) for values in groups]
        self.job = self.connection.open(
            name,
            specs,
            groups,
            self.group,
            self._bucket_numel,
            meshes=meshes,
            predecessor=predecessor,
            fresh_state=fresh_state,
            checkpoints=None if saved is None else saved.policy,
            resume=saved is not None and saved.resumes,
            group_size=1 if self.exchanges is None else self.exchanges.size,
            offload=self._offload,
        )
        self.withdraw_buffers()
        if self.exchanges is not None:
            self.exchanges.open(self.job, self.trained, self._bucket_numel)
        self.version = 0

    def _place_entries(self, name: str) -> list[Mesh]:
        """Determines the layouts of the entries together with the other ranks. Returns the job's
        meshes."""
        named = {entry.name: entry for entry in self.entries}
        agreed = job_layouts(
            {name: self.framework.layout(entry.tensor) for name, entry in named.items()},
            lambda name: named[name].trained,
            self.group.ranks,
            lambda what, value: self.connection.exchange(f"{name}/{what}", value, self.group.ranks),
            self._alike(),
        )
        for entry in self.entries:
            entry.layout = agreed.layouts[entry.name]
        return agreed.meshes

    def _alike(self) -> dict[str, str]:
        """What all ranks must open the job with, as text by name."""
        tensors = {f"tensor {entry.name!r}": entry.text for entry in self.entries}
        options = {
            "the optimizer": self.optimizer_name,
            "the number of parameter groups": str(len(self.groups())),
            "offload": str(self._offload),
            "the URL of the checkpoints": str(self.checkpoints and self.checkpoints.url),
        }
        values = {
            f"{key} of parameter group {number}": str(value)
            for number, (_, group) in enumerate(self.groups())
            for key, value in group.items()
        }
        return {**tensors, **options, **values}

    def _describe(self, states: Collection[int]) -> list[Entry[T]]:
        framework, groups = self.framework, self.optimizer.parameters()
        # A parameter keeps its optimizer state while it is frozen.
        kept = {id(entry.tensor) for entry in self.trained}.union(states)
        group_of = {
            id(parameter): number for number, group in enumerate(groups) for parameter in group
        }
        named = {
            id(parameter): (name, parameter)
            for name, parameter in framework.parameters(self._model)
        }
        for number, group in enumerate(groups):
            for position, parameter in enumerate(group):
                # The optimizer may have parameters outside of the model: those of a loss, for
                # example.
                named.setdefault(id(parameter), (f"optimizer.{number}.{position}", parameter))
        entries: list[Entry[T]] = []

        def add(name: str, tensor: T, trained: bool, buffer: bool) -> None:
            dtype = framework.dtype(tensor)
            raw = not trained and dtype is None or buffer and dtype != "f32"
            group = group_of.get(id(tensor), 0)
            entry = Entry(framework, name, tensor, trained, buffer, group, len(entries), raw)
            entry.optimized = id(tensor) in group_of
            entries.append(entry)

        for key, (name, parameter) in named.items():
            trained = key in group_of and (key in kept or framework.is_stepped(parameter))
            add(name, parameter, trained, False)
        for name, tensor in framework.buffers(self._model):
            add(name, tensor, False, True)
        return entries

    def _upload(
        self, entries: list[Entry[T]], kept: list[Entry[T]], states: Mapping[int, State[T]]
    ) -> None:
        """Uploads ``entries``, and confirms the servers' copies of ``kept``.

        ``states``: optimizer state of both, by the ``id`` of its parameter. It is uploaded first,
        because the job begins when the last parameter has arrived.
        """
        for applied, some in self._by_applied([*entries, *kept], states).items():
            by_part: dict[str, list[tuple[int, Array]]] = {}
            for entry in some:
                if id(entry.tensor) not in states:
                    continue
                for part, tensor in states[id(entry.tensor)][2].items():
                    array = self.framework.array(tensor)
                    by_part.setdefault(part, []).append((entry.index, array))
            for part, arrays in by_part.items():
                self.job.initialise(arrays, part=part, applied=applied, label="uploading")
        for applied, some in self._by_applied(entries, states).items():
            arrays = [(entry.index, entry.outgoing()) for entry in some]
            self.job.initialise(arrays, applied=applied, label="uploading")
        for applied, some in self._by_applied(kept, states).items():
            self.job.keep([entry.index for entry in some], applied=applied)

    def _by_applied(
        self, entries: list[Entry[T]], states: Mapping[int, State[T]]
    ) -> dict[tuple[int, tuple[float, ...]], list[Entry[T]]]:
        """The entries, grouped by the steps that were applied to their state: the number, and the
        scalar state after them."""
        by_applied: dict[tuple[int, tuple[float, ...]], list[Entry[T]]] = {}
        for entry in entries:
            applied, scalars, _ = states.get(id(entry.tensor), (0, (), {}))
            by_applied.setdefault((applied, tuple(scalars)), []).append(entry)
        return by_applied

    def receive(self, entries: Iterable[Entry[T]], label: str | None = None) -> None:
        """Fetches entries at the current version."""
        targets = [(entry.index, entry.incoming()) for entry in entries]
        if not targets:
            return
        arrays = [(index, incoming.array) for index, incoming in targets]
        self.fetch(arrays, version=self.version, label=label)
        for _, incoming in targets:
            incoming.finish()

    def receive_resident(self) -> None:
        """Fetches everything that is on this worker at all times, at the current version."""
        self.receive((entry for entry in self.entries if entry.resident), label="receiving")

    def fetch(
        self,
        arrays: list[tuple[int, Array]],
        *,
        version: int,
        part: str | None = None,
        label: str | None = None,
    ) -> None:
        """Fetches tensors at a version: see :meth:`zeroshard._native.Job.fetch`."""
        self.check_open()
        self.check_not_rolled_back()
        with self.connection.activity.waiting("pull"):
            self.job.fetch(version, arrays, part=part, label=label)

    def untrained(self, *, with_buffers: bool) -> list[Entry[T]]:
        """The parameters that are not trained and are on every rank, and the buffers, if
        requested."""
        return [
            entry
            for entry in self.entries
            if (with_buffers if entry.buffer else entry.resident and not entry.trained)
        ]

    def broadcast(self, source: int, entries: Iterable[Entry[T]]) -> None:
        """All ranks receive these tensors of rank ``source``. Every rank must call it."""
        named = [(entry.name, entry.tensor) for entry in entries]
        broadcast(self.connection, self.framework, self.group, source, named)

    def offer_buffers(self, number: int) -> None:
        """The ranks that call this take the buffers of rank 0, which does not wait for them.
        ``number``: how often this was possible in the open step."""
        self.follow_buffers()
        self.withdraw_buffers()
        name = f"{self.job.name}/buffers-{self.version}-{number}"
        if self.job.restored is not None:
            name += f"-{self.job.restored[0]}"  # versions repeat
        named = [(entry.name, entry.tensor) for entry in self.buffers]
        job = offer(self.connection, self.framework, self.group, 0, named, name)
        if job is not None:
            self._current.append(job)

    def withdraw_buffers(self) -> None:
        """No rank takes the buffers that were offered last any more, or it takes them soon."""
        for job in self._current[1:]:
            self.connection.leave(job, wait=False)
        del self._current[1:]

    def current_version(self) -> int:
        """The version of the job, which other ranks may have made."""
        return self.connection.status_of(self.job).version or 0

    def exchange(self, what: str, value: str) -> list[str]:
        """Returns the value that each rank has passed for ``what``. Every rank must call it."""
        return self.connection.exchange(f"{self.job.name}/{what}", value, self.group.ranks)

    def states(self, version: int, only: T | None = None) -> Iterator[tuple[Entry[T], State[T]]]:
        """The whole optimizer state at a version, of all trained entries that were updated, or of
        one of them."""
        self.check_open()
        self.check_not_rolled_back()
        applied = self.job.applied_steps(version)
        updated = [
            entry
            for entry in self.trained
            if applied[entry.index][0] and (only is None or entry.tensor is only)
        ]
        for chunk in _chunks(updated):
            fetched: dict[str, list[tuple[int, Array]]] = {}
            states: list[dict[str, T]] = []
            for entry in chunk:
                used = self._used[entry.group]
                names = self._optimizers[entry.group].state_of(entry.shape)
                names = [name for name in names if name in used]
                tensors = {name: self.framework.host(entry.shape) for name in names}
                for name, tensor in tensors.items():
                    array = self.framework.array(tensor, Box.whole(entry.shape))
                    fetched.setdefault(name, []).append((entry.index, array))
                states.append(tensors)
            for name, arrays in fetched.items():
                self.fetch(arrays, version=version, part=name, label=f"fetching {name}")
            for entry, tensors in zip(chunk, states, strict=True):
                yield entry, (*applied[entry.index], tensors)

    def whole(self, entries: Iterable[Entry[T]], version: int) -> dict[str, T]:
        """Whole tensors by name, as f32 in host memory, at a version."""
        hosts = {entry.name: (entry, self.framework.host(entry.shape)) for entry in entries}
        arrays = [
            (entry.index, self.framework.array(host, Box.whole(entry.shape)))
            for entry, host in hosts.values()
        ]
        self.fetch(arrays, version=version, part="", label="fetching parameters")
        return {name: host for name, (_, host) in hosts.items()}

    def state_hash(self) -> str:
        """The hash of the whole state at the current version."""
        return self.connection.cluster.state_hash(self.job.name)

    @property
    def job(self) -> Job:
        """The open job of the cluster."""
        return self._current[0]

    @job.setter
    def job(self, job: Job) -> None:
        self._current[:1] = [job]

    def retire(self) -> None:
        """Leaves the job in the background."""
        _leave(self.connection, self._current)

    def retire_after(self, model: object) -> None:
        """Leaves the job in the background when ``model`` is deleted. Does not keep this object:
        the optimizer's hooks, which it reaches, may refer to the model."""
        weakref.finalize(model, _leave, self.connection, self._current).atexit = False

    def mark(self) -> None:
        """Records the state of all tensors, to detect changes by the program."""
        mark(self.entries)


def _leave(connection: Connection, current: list[Job]) -> None:
    for job in current:
        connection.leave(job, wait=False)


def _chunks(entries: list[Entry[T]]) -> Iterator[list[Entry[T]]]:
    chunk: list[Entry[T]] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        size += 4 * entry.framework.numel(entry.tensor)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
