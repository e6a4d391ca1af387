"""``init``, ``status`` and ``shutdown``: which cluster this process uses, and what it has open
there."""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing.util
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ._native import Cluster, Job, Mesh, TensorSpec, Transfer
from ._rendezvous import Place, Rendezvous, place, reachable_host
from .errors import Error, NotInitialised

_current: Session | None = None
_inits = itertools.count()
#: Seconds for which a hosted cluster is kept when nobody uses it, and not everybody has said
#: goodbye.
_GRACE = 5.0
#: Seconds for which a job is kept when the ranks that held it are lost, or have not come yet.
_IDLE_TIMEOUT = 60.0


@dataclass(frozen=True)
class ServerStatus:
    """A shard server, and the bytes that it holds."""

    id: int
    address: str
    master_bytes: int
    state_bytes: int
    accumulator_bytes: int
    published_bytes: int
    parked_bytes: int


@dataclass(frozen=True)
class JobStatus:
    """A job; ``version`` is None before its initial parameters are complete, ``failure`` empty
    while it can go on."""

    name: str
    version: int | None
    epoch: int
    world: int
    joined: list[int]
    parameters: int
    tensors: int
    failure: str


@dataclass(frozen=True)
class Status:
    """What the cluster has."""

    address: str
    servers: list[ServerStatus] = field(default_factory=list)
    jobs: list[JobStatus] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"cluster {self.address}: {len(self.servers)} shard servers"]
        for server in self.servers:
            held = (
                server.master_bytes
                + server.state_bytes
                + server.accumulator_bytes
                + server.published_bytes
            )
            lines.append(f"  server {server.id} at {server.address}: {held / 1e6:,.1f} MB")
        for job in self.jobs:
            state = job.failure or f"version {job.version}"
            lines.append(
                f"  job {job.name}: {len(job.joined)}/{job.world} ranks, {job.parameters:,} parameters, {state}"
            )
        return "\n".join(lines)


class Session:
    """This process's connection to a cluster; as a context manager it ends with its block."""

    def __init__(
        self,
        cluster: Cluster,
        where: Place,
        run: str,
        *,
        rendezvous: Rendezvous | None,
        deadline: float,
    ) -> None:
        """``rendezvous``: where several ranks say goodbye; rank 0 may host what the others use."""
        self.cluster = cluster
        self._rendezvous = rendezvous
        self._deadline = deadline
        self.rank = where.rank
        self.world = where.world
        self._run = run
        self._names: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._jobs: list[Job] = []
        #: Jobs that are being left.
        self._leaving: list[Transfer] = []
        self._process = os.getpid()

    def name(self, kind: str, ranks: tuple[int, ...]) -> str:
        """A name for a job of these ranks: the same on all of them, and another with every call."""
        number = self._names[kind, ranks]
        self._names[kind, ranks] += 1
        members = "all" if ranks == tuple(range(self.world)) else "-".join(map(str, ranks))
        return f"{self._run}/{kind}-{number}/{members}"

    def exchange(self, key: str, value: str, ranks: Sequence[int]) -> list[str]:
        """What each of ``ranks`` says under ``key``, in their order; all of them must."""
        return [value] if self._rendezvous is None else self._rendezvous.exchange(key, value, ranks)

    def open(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        groups: Sequence[tuple[str, Mapping[str, float]]],
        place: tuple[int, int],
        bucket_numel: int,
        *,
        meshes: Sequence[Mesh] | None = None,
    ) -> Job:
        """Makes a job, unless another rank has, and joins it; ``place``: rank and world.

        The session leaves it at its end, unless :meth:`retire` came before. The coordinator deletes
        it when all ranks have left, or are lost.
        """
        rank, world = place
        self.cluster.create_job(name, tensors, groups, world, meshes, idle_timeout=_IDLE_TIMEOUT)
        job = self.cluster.join(name, rank, bucket_numel=bucket_numel)
        self._jobs.append(job)
        return job

    def retire(self, job: Job, *, wait: bool = True) -> None:
        """Leaves a job, once."""
        if job in self._jobs:
            self._jobs.remove(job)
            leaving = job.leave()
            if wait:
                leaving.wait()
            else:
                self._leaving = [*(other for other in self._leaving if not other.done()), leaving]

    def _status(self) -> Status:
        found: dict[str, Any] = json.loads(self.cluster.status())
        servers = [ServerStatus(**server) for server in found["servers"]]
        return Status(self.cluster.address, servers, [JobStatus(**job) for job in found["jobs"]])

    def close(self) -> None:
        """Leaves all jobs and the cluster; an embedded one stops once every rank has left its
        jobs."""
        global _current
        if _current is self:
            _current = None
        if self._process != os.getpid():
            return  # a forked child: its parent's session
        try:
            for job in list(self._jobs):
                self.retire(job, wait=False)
            for leaving in self._leaving:
                try:
                    leaving.wait()
                except Error:
                    pass  # the cluster, or the job, is gone already
            if self._rendezvous is not None:
                self._say_goodbye(self._rendezvous)
        finally:
            self.cluster.close()

    def _say_goodbye(self, rendezvous: Rendezvous) -> None:
        """Rank 0 hosts the cluster: it waits until the others need it no longer, or are gone."""
        key = f"{self._run}/left"
        try:
            left = rendezvous.count(key, 1)
            until = time.monotonic() + self._deadline
            alone_since = None
            while self.rank == 0 and left < self.world and time.monotonic() < until:
                time.sleep(0.02)
                left = rendezvous.count(key, 0)
                alone = not any(job.joined for job in self._status().jobs)
                alone_since = (alone_since or time.monotonic()) if alone else None
                if alone_since is not None and time.monotonic() - alone_since > _GRACE:
                    break
        except Exception:
            pass  # the store went with its process: nobody waits any more

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def init(
    address: str | None = None,
    token: str | None = None,
    shards: int = 1,
    *,
    wire: str = "f32",
    chunk_bytes: int = 1 << 20,
    deadline: float = 600.0,
) -> Session:
    """Connects this process to a cluster.

    ``address`` (or ``ZEROSHARD_ADDRESS``) is a coordinator's ``host:port``, ``token`` (or
    ``ZEROSHARD_TOKEN``) the cluster's secret. With no address a cluster of ``shards`` servers
    starts inside this process; of several ranks (``torchrun``, ``torch.multiprocessing.spawn``)
    rank 0 hosts it, and the others find it.

    ``wire`` is the dtype of parameters and gradients on the wire (``"f32"``, ``"bf16"``,
    ``"f16"``), ``chunk_bytes`` the payload of one message, ``deadline`` how many seconds any
    operation may take: also how long a rank waits for another that evaluates or saves.

    Raises :class:`~zeroshard.NotInitialised` where there is a session already or the ranks cannot
    find each other, :class:`~zeroshard.Timeout` and :class:`~zeroshard.Unauthenticated`.
    """
    global _current
    if _current is not None:
        raise NotInitialised("zeroshard.init was called before; call zeroshard.shutdown() first")
    where = place()
    number = next(_inits)
    address = address or os.environ.get("ZEROSHARD_ADDRESS") or None
    token = token or os.environ.get("ZEROSHARD_TOKEN") or None

    def connect(address: str, token: str | None) -> Cluster:
        return Cluster.connect(
            address, token=token, wire=wire, chunk_bytes=chunk_bytes, deadline=deadline
        )

    rendezvous = Rendezvous(where, deadline) if where.world > 1 else None
    if rendezvous is not None and where.rank > 0:
        told = json.loads(
            rendezvous.hear(
                f"run/{number}", "rank 0 to start the cluster: does every rank call zeroshard.init?"
            )
        )
        cluster = connect(told["address"], told["token"])
        run = told["run"]
    else:
        run = f"run-{secrets.token_hex(4)}"
        if address is not None:
            cluster = connect(address, token)
        else:
            host = "127.0.0.1" if rendezvous is None else reachable_host()
            if host != "127.0.0.1" and token is None:
                token = secrets.token_hex(16)
            cluster = Cluster.embedded(
                shards,
                host=host,
                token=token,
                wire=wire,
                chunk_bytes=chunk_bytes,
                deadline=deadline,
            )
        if rendezvous is not None:
            told = {"address": cluster.address, "token": token, "run": run}
            rendezvous.tell(f"run/{number}", json.dumps(told))
    # The rendezvous is kept: the store may be served by this process, and others may still have to
    # hear.
    _current = Session(cluster, where, run, rendezvous=rendezvous, deadline=deadline)
    return _current


def current() -> Session:
    """The session; one with the default settings if there is none. It must be of the ranks that
    there are now."""
    session = _current if _current is not None else init()
    now = place()
    if (session.rank, session.world) != (now.rank, now.world):
        raise NotInitialised(
            f"zeroshard.init was called by rank {session.rank} of {session.world}, and now this is rank {now.rank} of "
            f"{now.world}: call it after torch.distributed.init_process_group"
        )
    return session


def status() -> Status:
    """Servers and jobs of this process's cluster."""
    if _current is None:
        raise NotInitialised("there is no cluster: call zeroshard.init() first")
    return _current._status()


def shutdown() -> None:
    """Leaves the cluster; an embedded one stops. Without a session it does nothing."""
    if _current is not None:
        _current.close()


atexit.register(shutdown)
if multiprocessing.parent_process() is not None:
    # Children of multiprocessing end without what atexit knows.
    multiprocessing.util.Finalize(None, shutdown, exitpriority=100)
