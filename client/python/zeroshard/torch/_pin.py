"""Reads a job's parameters while it trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _pin
from .._pin import Pinned
from ._framework import TORCH


def pin(
    job: str,
    *,
    version: int | None = None,
    tensors: Sequence[str] | None = None,
    optimizer_state: bool = False,
    average: str | None = None,
    seconds: float = 60.0,
    address: str | None = None,
    token: str | None = None,
) -> Pinned[Tensor]:
    """Keeps one version of a job's parameters on the shard servers, so that this program can read
    it while training goes on.

    The program need not take part in the job: it can evaluate or generate text beside it. A pin
    needs memory on the servers for a copy of the parameters, at most ``--pinned-bytes`` of a server
    for all pins together, and costs the training nothing else::

        with zeroshard.torch.pin("train", address="127.0.0.1:7400") as latest:
            latest.load(model)

    Args:
        job: the name of the job, or of its run (``zeroshard.init(name=...)``).
        version: the version; by default the latest one.
        tensors: the names of the tensors to keep; by default all.
        optimizer_state: whether to keep the optimizer state of the same version as well.
        average: a running average of the job, which is read instead of the parameters. Tensors that
            do not train are read as they are.
        seconds: the time limit, at most 600.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Raises:
        InvalidArgumentError: no job, or more than one, has this name; an unknown tensor or average;
            the job has no parameters yet.
        VersionGoneError: ``version`` has been replaced.
        OutOfMemoryError: a server has no room for the pin.
    """
    kept = _pin.Kept(version, tensors, optimizer_state, average, seconds)
    return _pin.pin(TORCH, job, kept, address, token)
