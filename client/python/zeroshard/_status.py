"""The status of a cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ._native import Cluster


@dataclass(frozen=True)
class ServerStatus:
    """A shard server, and the bytes that it holds. ``zone`` is empty unless it was started with
    ``--zone``. ``capacity_bytes`` are those that it has for slices (None: no limit), of which jobs
    need ``assigned_bytes``. A ``cordoned`` server receives no new slices."""

    id: int
    address: str
    zone: str
    master_bytes: int
    state_bytes: int
    accumulator_bytes: int
    published_bytes: int
    parked_bytes: int
    capacity_bytes: int | None
    assigned_bytes: int
    version: str
    cordoned: bool


@dataclass(frozen=True)
class JobStatus:
    """A job. ``version`` is None until the initial parameters are complete. ``failure`` is empty
    unless the job has failed. ``problem`` says why the job needs attention, and is empty if all is
    well."""

    name: str
    version: int | None
    #: How often the job has returned to a checkpoint.
    line: int
    epoch: int
    world: int
    joined: list[int]
    parameters: int
    tensors: int
    failure: str
    #: The ranks that have no more batches and wait for the others, ascending.
    resting: list[int]
    #: "waiting", "opening", "open", "restoring", "recovering" or "failed".
    state: str
    #: The ranks, servers or data that are missing; empty if nothing is.
    waiting_for: str
    problem: str
    #: The rank that commits last, on average over the last steps.
    slowest_rank: int | None
    #: The number of slices with fewer replicas than the job asks for.
    degraded_slices: int


@dataclass(frozen=True)
class Status:
    """The servers and jobs of a cluster."""

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
            if job.problem and not job.failure:
                state += f", {job.problem}"
            lines.append(
                f"  job {job.name}: {len(job.joined)}/{job.world} ranks, "
                f"{job.parameters:,} parameters, {state}"
            )
        return "\n".join(lines)


def status_of(cluster: Cluster) -> Status:
    """The servers and jobs of ``cluster``."""
    found: dict[str, Any] = json.loads(cluster.status())
    servers = [ServerStatus(**server) for server in found["servers"]]
    return Status(cluster.address, servers, [JobStatus(**job) for job in found["jobs"]])
