"""The running averages of a job in place of its parameters, on this worker."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Generic

from ..errors import InvalidArgumentError
from .gather import Gatherer
from .job import ModelJob
from .program_changes import ProgramChanges
from .reading import Reads
from .tensors import T


class Averaged(Generic[T]):
    """Swaps averages in, and the parameters in again."""

    def __init__(
        self,
        job: ModelJob[T],
        names: Collection[str],
        reads: Reads[T],
        changes: ProgramChanges[T],
        gatherer: Gatherer[T] | None,
    ) -> None:
        """``names``: those of the averages."""
        self._job = job
        self._names = names
        self._reads = reads
        self._changes = changes
        self._gatherer = gatherer

    @contextlib.contextmanager
    def showing(self, name: str) -> Iterator[None]:
        """A context in which the parameters that train have the values of an average."""
        self._check(name)
        self._job.average = name
        try:
            self._receive()
            yield
        finally:
            self._job.average = None
            self._receive()

    def _check(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(map(repr, self._names)) or "none; pass ema=... when you shard it"
            raise InvalidArgumentError(
                f"the model has no average {name!r}; its averages are {known}"
            )
        self._job.check_has_parameters("averages are swapped in")
        if not self._reads.is_between_steps:
            raise InvalidArgumentError(
                "averages are swapped in while a step is made, or by a thread that does not train "
                "the model; read them with zeroshard.torch.pin(..., average=...), or call averaged "
                "between two steps"
            )
        self._changes.follow()
        self._reads.check_not_written(self._job.trained)

    def _receive(self) -> None:
        """Fetches what is on this worker at all times, and forgets what is fetched for each use."""
        self._job.receive(entry for entry in self._job.trained if entry.resident)
        self._job.mark()
        if self._gatherer is not None:
            self._gatherer.new_version()
