"""``rewind``: returns a job to a checkpoint."""

from __future__ import annotations

from ._readers import cluster_at, full_name
from .errors import InvalidArgumentError

#: The most ranges of batches that a line leaves out.
_MAX_RANGES = 1000


def rewind(
    job: str,
    *,
    to: int,
    url: str | None = None,
    skip: range | None = None,
    address: str | None = None,
    token: str | None = None,
) -> int:
    """Returns a job to a checkpoint, while its ranks keep running: after a spike of the loss, for
    example. On every rank the step ends with :class:`~zeroshard.RolledBackError`, and a loop over
    :func:`zeroshard.steps` continues from the checkpoint. Parameters, optimizer state, averages and
    the data of the ranks are those of the checkpoint::

        zs.rewind("train", to=100, skip=range(100, 120), address="127.0.0.1:7400")

    The versions that are left behind are never served or restored again. New versions have the same
    numbers; :attr:`JobStatus.line` counts the returns.

    Args:
        job: the name of the job, or of its run (``zeroshard.init(name=...)``).
        to: the version of the checkpoint. The job must be at a later one.
        url: the directory or prefix with the checkpoint; by default that of the job's
            ``Checkpoints``.
        skip: batches that the steps after the version leave out, without those that its steps were
            made with. Loops over :func:`zeroshard.steps` follow it.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Returns:
        The number of the new line.

    Raises:
        InvalidArgumentError: no job, or more than one, has this name; ``to`` is not an earlier
            version than that of the job; ``skip`` has batches of steps that stand.
        NoCheckpointError: there is no checkpoint of this version on the job's line.
        TimeoutError: the job has not returned in time. It may still do so.
    """
    skips = [] if skip is None else ranges(skip)
    cluster = cluster_at(address, token)
    return cluster.rewind(full_name(cluster, job), to, url, skips)


def ranges(skip: range) -> list[tuple[int, int]]:
    """The batches of a range, as the first of each run of batches, and the one after the last."""
    if not skip:
        return []
    if abs(skip.step) == 1:
        return [(min(skip), max(skip) + 1)]
    if len(skip) > _MAX_RANGES:
        raise InvalidArgumentError(
            f"skip names {len(skip)} single batches; at most {_MAX_RANGES} are allowed"
        )
    return [(batch, batch + 1) for batch in sorted(skip)]
