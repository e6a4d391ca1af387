"""What the program has written to the parameters of a job since the last step."""

from __future__ import annotations

from collections.abc import Iterable

from .._agreement import agree
from .entry import Entry, hashes_of, modified
from .job import ModelJob
from .tensors import T


def written(job: ModelJob[T]) -> list[Entry[T]]:
    """The parameters that the program has written to since they were last marked."""
    parameters = list(job.parameters)
    for entry in parameters:
        entry.check_kind()
    return modified(parameters)


def hashes_of_written(job: ModelJob[T], entries: Iterable[Entry[T]]) -> list[int]:
    """What all ranks must have written alike: a hash for each entry of the job, or 0 if it is not
    among the written ``entries``. Empty if all are 0.

    Parameters that are on every rank and do not train may differ. Of distributed parameters each
    rank writes its own part.
    """
    hashes = [0] * len(job.entries)
    alike = [entry for entry in entries if entry.trained or not entry.resident]
    for entry, value in zip(alike, hashes_of(alike), strict=True):
        is_distributed = job.framework.layout(entry.tensor) is not None
        hashes[entry.index] = 1 if is_distributed else value or 1
    return hashes if any(hashes) else []


def check_written_alike(job: ModelJob[T]) -> None:
    """Raises :class:`~zeroshard.DisagreementError` if the program has written different values to
    trained parameters on the ranks."""
    hashes = hashes_of_written(job, written(job))
    texts = {
        f"values that the program has written to tensor {entry.name!r}": f"hash {value:016x}"
        for entry, value in zip(job.entries, hashes)
        if value
    }
    agree("a forward or step after the model or the optimizer has changed", texts, job.group.ranks)
