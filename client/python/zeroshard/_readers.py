"""Finds the cluster and the job for programs that read or rewind a job without training it."""

from __future__ import annotations

import os
import re

from . import _session
from ._credentials import tls_files, token_of
from ._native import Cluster
from ._status import status_of
from .errors import InvalidArgumentError, NotInitialisedError


def cluster_at(address: str | None, token: str | None) -> Cluster:
    """Returns the cluster at ``address``, or of the session, or at ``ZEROSHARD_ADDRESS``."""
    if address is None and _session._current is not None:
        return _session._current._connection.cluster
    address = address or os.environ.get("ZEROSHARD_ADDRESS") or None
    if address is None:
        raise NotInitialisedError(
            "the address of the cluster is missing; pass address=..., set ZEROSHARD_ADDRESS, or "
            "call zeroshard.init() first"
        )
    return Cluster.connect(address, token=token_of(token), tls=tls_files())


def full_name(cluster: Cluster, job: str) -> str:
    """Returns the full name of a job, given its name or that of its run. The names of a run's jobs
    have a random part."""
    names = [status.name for status in status_of(cluster).jobs]
    # See Connection.job_name.
    of_run = re.compile(re.escape(job) + r"(-[0-9a-f]{8})?/")
    found = [name for name in names if name == job] or [
        name for name in names if of_run.match(name)
    ]
    if len(found) != 1:
        raise InvalidArgumentError(
            f"{len(found)} jobs have the name {job!r} or belong to a run of this name; the jobs of "
            f"the cluster are {names}"
        )
    return found[0]
