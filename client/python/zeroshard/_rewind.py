"""``rewind``: returns a job to a checkpoint."""

from __future__ import annotations

from ._readers import cluster_at, full_name
from .errors import InvalidArgumentError

#: The maximum number of ranges that a job skips.
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

    The job abandons the versions after ``to``: no server serves them, and it never returns to them.
    New versions get the same numbers; :attr:`JobStatus.line` counts the returns.

    Args:
        job: the name of the job, or of its run (``zeroshard.init(name=...)``).
        to: the version of the checkpoint. The job must be at a later one.
        url: the directory or prefix with the checkpoint; by default that of the job's
            ``Checkpoints``.
        skip: batches to skip after this version. You cannot skip a batch that an earlier step has
            used. Loops over :func:`zeroshard.steps` skip them.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Returns:
        The number of the new line.

    Raises:
        InvalidArgumentError: no job, or more than one, has this name; the job is not at a later
            version than ``to``; a step before ``to`` has used a batch in ``skip``.
        NoCheckpointError: there is no checkpoint of this version on the job's line.
        TimeoutError: the job has not continued in time. It may still return.
    """
    skips = [] if skip is None else ranges(skip)
    cluster = cluster_at(address, token)
    return cluster.rewind(full_name(cluster, job), to, url, skips)


def ranges(skip: range) -> list[tuple[int, int]]:
    """Converts a range to (begin, end) pairs; ``end`` is not skipped."""
    if not skip:
        return []
    if abs(skip.step) == 1:
        return [(min(skip), max(skip) + 1)]
    if len(skip) > _MAX_RANGES:
        raise InvalidArgumentError(
            f"skip names {len(skip)} single batches; at most {_MAX_RANGES} are allowed"
        )
    return [(batch, batch + 1) for batch in sorted(skip)]
