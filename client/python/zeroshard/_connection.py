"""The connection of a process to its cluster, and the jobs that the process has joined."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ._activity import Activity
from ._averages import Average
from ._native import CheckpointPolicy, Cluster, Job, Mesh, TensorSpec, Transfer, own_panes
from ._rendezvous import ProcessGroup, Rendezvous
from ._shown import own
from ._spikes import SpikePolicy
from ._status import JobStatus, Status, status_of
from .errors import (
    Error,
    JobExistsError,
    NotInitialisedError,
    RankTakenError,
    UnknownJobError,
)

#: Seconds for which rank 0 keeps its embedded cluster when no rank has a job, but not all ranks
#: have left.
_GRACE = 5.0
#: Seconds for which the coordinator keeps a job that no rank holds.
_IDLE_TIMEOUT = 60.0


class Connection:
    """A connection to a cluster that all ranks of a run share."""

    def __init__(
        self,
        cluster: Cluster,
        world: ProcessGroup,
        name: str,
        run: str,
        rendezvous: Rendezvous | None,
        timeout: float,
        *,
        token: str | None,
        named: bool,
        wires: Mapping[str, str],
    ) -> None:
        """``run`` is the prefix of the names of the run's jobs: ``name`` and a random number. Jobs
        with checkpoints have the prefix ``name``, which later runs have as well; without ``named``
        it is that of the script, which other scripts of the cluster may have. ``rendezvous`` is
        None for a single process; rank 0 may host the cluster that the other ranks use. ``wires``:
        the arguments of :func:`zeroshard.init` that name encodings, which must be alike on all
        ranks."""
        self.cluster = cluster
        self.world = world
        self._name = name
        self._named = named
        #: The token of the cluster, for other processes of this program. None: it has none.
        self.token = token
        self.wires = wires
        self._run = run
        self._rendezvous = rendezvous
        #: The maximum time of an operation in seconds.
        self.timeout = timeout
        self._names: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._jobs: list[Job] = []
        #: Transfers that leave a job.
        self._leaving: list[Transfer] = []
        self._process = os.getpid()
        self.activity = Activity()
        self.closed = False

    def job_name(self, purpose: str, ranks: tuple[int, ...], *, lasting: bool = False) -> str:
        """A name for the next job of these ranks. All ranks get the same name. ``lasting``: the
        next run of the program gets it as well."""
        number = self._names[purpose, ranks]
        self._names[purpose, ranks] += 1
        members = "all" if ranks == self.world.ranks else "-".join(map(str, ranks))
        return f"{self._name if lasting else self._run}/{purpose}-{number}/{members}"

    def exchange(self, key: str, value: str, ranks: Sequence[int]) -> list[str]:
        """Returns the value that each of ``ranks`` has passed for ``key``, in their order."""
        if self._rendezvous is None:
            return [value]
        return self._rendezvous.exchange(f"{self._run}/{key}", value, ranks)

    def open(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        groups: Sequence[tuple[str, Mapping[str, float]]],
        group: ProcessGroup,
        bucket_numel: int,
        *,
        meshes: Sequence[Mesh] | None = None,
        predecessor: tuple[Job, int] | None = None,
        fresh_state: bool = False,
        checkpoints: CheckpointPolicy | None = None,
        resume: bool = False,
        group_size: int = 1,
        offload: bool = False,
        state_dtype: str = "f32",
        averages: Mapping[str, Average] | None = None,
        spikes: SpikePolicy | None = None,
    ) -> Job:
        """Creates a job, unless another rank has created it, and joins it.

        For ``predecessor`` and the arguments after it see :meth:`Cluster.create_job`. The rank
        leaves the job in :meth:`leave`, or else in :meth:`close`. The coordinator deletes the job
        when all ranks have left or are lost.
        """
        averages = averages or {}
        try:
            self.cluster.create_job(
                name,
                tensors,
                groups,
                group.size,
                meshes,
                idle_timeout=_IDLE_TIMEOUT,
                predecessor=predecessor,
                fresh_state=fresh_state,
                checkpoints=checkpoints,
                resume=resume,
                group_size=group_size,
                offload=offload,
                state_dtype=state_dtype,
                averages=[
                    (name, one.decay, one.warmup, one.start, one.every)
                    for name, one in averages.items()
                ],
                averages_skip=any(one.on_skip == "keep" for one in averages.values()),
                spikes=None if spikes is None else spikes.as_tuple(),
            )
            job = self.cluster.join(name, group.rank, bucket_numel=bucket_numel)
        except (JobExistsError, RankTakenError) as error:
            if not self._named and name.startswith(f"{self._name}/"):
                error.args = (
                    f"{error}; zeroshard.init has named this run {self._name!r} after its script, "
                    "as another run of the cluster: pass it a name of your own, name=...",
                )
            raise
        self._jobs.append(job)
        return job

    def leave(self, job: Job, *, wait: bool = True, shown: bool = False) -> None:
        """Leaves a job, once. ``shown``: servers show values of the job, which they forget."""
        if job in self._jobs:
            self._jobs.remove(job)
            try:
                if shown:
                    own_panes()
            finally:
                leaving = job.leave()
            if wait:
                leaving.wait()
            else:
                self._leaving = [*(other for other in self._leaving if not other.done()), leaving]

    def status(self) -> Status:
        """Servers and jobs of the cluster.

        Raises:
            NotInitialisedError: the session was closed.
        """
        if self.closed:
            raise NotInitialisedError(
                "the session was closed by zeroshard.shutdown(), or at the end of its block; call "
                "zeroshard.init() and use the new session"
            )
        return status_of(self.cluster)

    def status_of(self, job: Job) -> JobStatus:
        """The status of a job."""
        for status in self.status().jobs:
            if status.name == job.name:
                return status
        raise UnknownJobError(f"job {job.name!r} does not exist any more; create it again")

    def close(self) -> None:
        """Leaves all jobs and disconnects. An embedded cluster stops when all ranks have left."""
        if self._process != os.getpid():
            return  # a forked child: the connection belongs to its parent
        self.closed = True
        if self.world.rank == 0:
            self.activity.log_end(self._run, self.cluster.traffic())
        try:
            own()
            for job in list(self._jobs):
                self.leave(job, wait=False)
            for leaving in self._leaving:
                with contextlib.suppress(Error):  # the cluster or the job is gone
                    leaving.wait()
            if self._rendezvous is not None:
                # Errors of a connection: the cluster is gone, or does not answer this process.
                with contextlib.suppress(OSError):
                    self._wait_for_others(self._rendezvous)
        finally:
            self.cluster.close()

    def _wait_for_others(self, rendezvous: Rendezvous) -> None:
        """Reports that this rank has left. Rank 0, which may host the cluster, waits until the
        other ranks have left as well or have no job for :data:`_GRACE` seconds."""
        until = time.monotonic() + self.timeout
        idle_since = None
        left = self._left(rendezvous, 1)
        while self.world.rank == 0 and left < self.world.size and time.monotonic() < until:
            time.sleep(0.02)
            left = self._left(rendezvous, 0)
            # Not `status()`, which is for programs and refuses a closed session.
            idle = not any(job.joined for job in status_of(self.cluster).jobs)
            idle_since = (idle_since or time.monotonic()) if idle else None
            if idle_since is not None and time.monotonic() - idle_since > _GRACE:
                break

    def _left(self, rendezvous: Rendezvous, by: int) -> int:
        """Adds to the number of ranks that have left, and returns it."""
        try:
            return rendezvous.count(f"{self._run}/left", by)
        except Exception:
            # The process that served the store has ended, and no rank waits any more.
            return self.world.size
