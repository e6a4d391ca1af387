"""The steps of a process, and the time for which it has waited for the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ._log import bytes_text, log, steps_text

#: The operations that wait: for tensors; for buckets of gradients, of which a limited number is
#: sent at a time; and for a step, which includes the remaining gradients, the other ranks and the
#: new parameters.
Wait = Literal["pull", "push", "commit"]


class Activity:
    """The steps of a process on a connection, and its time of waiting, for all of its models."""

    def __init__(self) -> None:
        self.steps = 0
        #: Seconds of waiting.
        self.waited: dict[Wait, float] = {"pull": 0.0, "push": 0.0, "commit": 0.0}
        self._began: float | None = None

    def begin(self) -> None:
        """The first model is ready to be trained. Later calls have no effect."""
        if self._began is None:
            self._began = time.perf_counter()
            # What was waited for before is not a part of the training.
            self.waited = dict.fromkeys(self.waited, 0.0)

    @property
    def seconds(self) -> float:
        """Seconds since :meth:`begin`."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @contextmanager
    def waiting(self, operation: Wait) -> Iterator[None]:
        """A context that measures the time of an operation that may wait."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited[operation] += time.perf_counter() - began

    def log_end(self, run: str, traffic: tuple[int, int]) -> None:
        """Logs a line about the process, if it has made steps. ``traffic``: the bytes that it has
        pulled and pushed."""
        if self.steps:
            log(
                "%s: %s in %s s; pulled %s, pushed %s; %s",
                run,
                steps_text(self.steps),
                f"{self.seconds:,.1f}",
                *map(bytes_text, traffic),
                waiting_text(self.waited, self.seconds),
            )


def waiting_text(waited: dict[Wait, float], seconds: float) -> str:
    """The time of waiting, its share of ``seconds``, and its parts."""
    total = sum(waited.values())
    share = f"{total / seconds:.0%}: " if seconds else ""
    parts = ", ".join(f"{operation} {time:,.1f} s" for operation, time in waited.items())
    return f"waited {total:,.1f} s for the servers ({share}{parts})"
