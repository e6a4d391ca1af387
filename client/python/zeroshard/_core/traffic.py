"""What a rank sends and receives in each step: gradients and parameters, by itself or together with
the ranks of its group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeAlias

from .._native import Array, Transfer
from ..errors import InvalidArgumentError
from .entry import Entry
from .exchanges import Exchanges, Pull
from .job import ModelJob
from .tensors import T


class Several:
    """Some transfers, which are waited for together."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        """Waits for all of them."""
        for transfer in self._transfers:
            transfer.wait()

    def cancel(self) -> None:
        """Cancels those that are running."""
        for transfer in self._transfers:
            transfer.cancel()


#: What fetches parameters.
Fetch: TypeAlias = Transfer | Pull[T] | Several


class Traffic(Generic[T]):
    """The gradients that a rank sends in the open step, and the parameters that it pulls."""

    def __init__(self, job: ModelJob[T], exchanges: Exchanges[T] | None) -> None:
        """``exchanges``: the exchanges of this rank with its group; None without groups."""
        self._job = job
        self._exchanges = exchanges

    @property
    def group_size(self) -> int:
        """The number of ranks of the group of this rank; 1: it sends and receives by itself."""
        return 1 if self._exchanges is None else self._exchanges.size

    def begin_job(self, bucket_numel: int) -> None:
        """A job begins. At most ``bucket_numel`` elements are exchanged at a time, or one larger
        tensor."""
        if self._exchanges is not None:
            self._exchanges.open(self._job.job, self._job.trained, bucket_numel)

    # ---- gradients

    def send_gradient(self, entry: Entry[T], gradient: T) -> None:
        """Sends this rank's gradient in the open step."""
        self._job.check_open()
        try:
            array = self._job.framework.outgoing(gradient)
        except InvalidArgumentError:
            entry.check_kind()  # raises an error that names the parameter
            raise
        if self._exchanges is not None:
            self._exchanges.gradient(self._job.version, entry.index, array)
        else:
            self._job.job.gradient(self._job.version, entry.index, array)

    def send_absent(self, indices: Iterable[int]) -> None:
        """Reports the tensors of which this rank has no gradient in the open step."""
        if self._exchanges is None:
            self._job.job.absent(self._job.version, list(indices))
            return
        for index in indices:
            self._exchanges.gradient(self._job.version, index, None)

    def finish_gradients(self) -> None:
        """Waits until the group has exchanged all gradients of the open step."""
        if self._exchanges is not None:
            self._exchanges.finish()

    def discard(self) -> None:
        """Begins another attempt at the open step. Every rank must call it."""
        if self._exchanges is not None:
            self._exchanges.forget()
        self._job.job.discard(self._job.version)

    def forget(self) -> None:
        """Drops everything that this rank has of the open step."""
        if self._exchanges is not None:
            self._exchanges.forget()
        self._job.job.forget()

    # ---- parameters

    def pull(self, arrays: list[tuple[int, Array]], *, together: bool) -> Fetch[T]:
        """Starts to fetch trained parameters at the current version. ``together``: all ranks of the
        group do this."""
        job = self._job
        if job.average is not None:
            parts = job.parts(arrays, None)
            return Several([job.job.pull(job.version, some, part=part) for some, part in parts])
        if self._exchanges is not None and together:
            return self._exchanges.pull(job.version, arrays)
        return job.job.pull(job.version, arrays)

    def pull_decided(self, version: int, arrays: list[tuple[int, Array]]) -> None:
        """Fetches parameters of a version that was just made, together with the group."""
        if self._exchanges is not None:
            with self._job.connection.activity.waiting("pull"):
                self._exchanges.pull_all(version, arrays)

    def compare_pulls(self, held: list[int], ahead: list[int]) -> None:
        """All ranks of the group call this before they pull together: whether they hold the same
        units, and fetch the same ones."""
        if self._exchanges is not None:
            self._exchanges.compare(self._job.version, [held, ahead])
