"""What a rank exchanges with the other ranks of its group: gradients, which they add before each of
them pushes a part, and parameters, of which each of them pulls a part.

The collective operations of a rank run in one thread, in the order in which the program has
requested them, so a rank that is ahead of the others does not stop its program. The order is the
same on all ranks as long as none of them begins a step again. Therefore the ranks compare what they
are about to exchange before each exchange. A rank that is at an earlier attempt than another one
ends it with StepAbortedError, and the other rank waits for it. Parameters that the ranks do not
request in the same order are pulled by each rank alone. A rank may also hold parameters that
another one has to pull, since it has evaluated the model alone: whether they hold the same is
compared before each pass, and if they do not, each rank pulls alone in this pass.
"""

from __future__ import annotations

import collections
import functools
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeAlias, TypeVar

from .._native import Array, Exchange, Job, OpenAttempt, Transfer
from .._rendezvous import ProcessGroup
from ..errors import InternalError, StepAbortedError
from .collectives import Collectives, GroupSize, group_of
from .entry import Entry
from .framework import Framework
from .tensors import T, Tensors

_COMPARE, _PULL, _PUSH = 0, 1, 2

#: The number of buckets of gradients that a device may be copying to host memory at a time. Ranks
#: without groups send as many at a time.
_MAX_COPIES = 3

#: What ranks are about to exchange: epoch, step or version, number of the attempt, kind, item.
_Key: TypeAlias = tuple[int, int, int, int, int]

_I = TypeVar("_I")
_R = TypeVar("_R")


class _Missed(Exception):
    """The other ranks of the group do not pull the same parameters now."""


class Pull(Generic[T]):
    """Parameters that the group pulls."""

    def __init__(
        self,
        job: Job,
        version: int,
        arrays: list[tuple[int, Array]],
        exchange: Exchange,
        messages: Future[Array],
    ) -> None:
        self._job = job
        self._version = version
        self._arrays = arrays
        self._exchange = exchange
        self._messages: Future[Array] | None = messages

    def wait(self) -> None:
        """Returns when the arrays have the parameters."""
        if self._messages is None:
            return
        try:
            messages = self._messages.result()
        except _Missed:
            self._job.pull(self._version, self._arrays).wait()
        else:
            self._exchange.place(messages, [array for _, array in self._arrays])
        self._messages = None

    def cancel(self) -> None:
        """Gives up the parameters. Their memory is not written to any more, as after
        :meth:`Transfer.cancel`."""
        # The exchange still takes place, because the other ranks may need it.
        self._messages = None


class Exchanges(Generic[T]):
    """The exchanges of a rank in a job with groups."""

    def __init__(self, framework: Tensors[T], collectives: Collectives[T]) -> None:
        self._framework = framework
        self._collectives = collectives
        #: The number of ranks of the group.
        self.size = len(collectives.ranks)
        self._thread = _Thread()
        self._buckets: list[list[int]] = []
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._open = _Open(None)
        #: The result of the last comparison of what the ranks hold. Used in the thread.
        self._holds_the_same = True

    def open(self, job: Job, trained: Iterable[Entry[T]], bucket_numel: int) -> None:
        """Begins with a job, or with its successor. At most ``bucket_numel`` elements are exchanged
        at a time, or one larger tensor."""
        self._job = job
        self._bucket_numel = bucket_numel
        # The batches must be the same on all ranks.
        numel = self._framework.largest_numel
        self._sizes = {entry.index: numel(entry.tensor) for entry in trained}
        # Backward computes the last gradients first.
        last_first = list(reversed(self._sizes))
        self._buckets = list(_batches(last_first, self._sizes.__getitem__, bucket_numel))
        self._exchanges.clear()
        self.forget()

    # ---- gradients

    def gradient(self, step: int, index: int, gradient: Array | None) -> None:
        """This rank's gradient of a tensor, or None if it has none. Called once for each trained
        tensor. :meth:`finish` raises the errors of the exchanges."""
        if self._open.has_failed:
            return
        attempt = self._job.open_attempt(step)
        if attempt.key != self._open.key:
            self._open = _Open(attempt.key)
        opened = self._open
        opened.ready[index] = gradient
        while opened.exchanged < len(self._buckets):
            number = opened.exchanged
            bucket = self._buckets[number]
            if not opened.ready.keys() >= set(bucket):
                break
            gradients = [opened.ready.pop(tensor) for tensor in bucket]
            opened.exchanged += 1
            opened.wait_for_copies(gradients)
            work = functools.partial(self._push, opened, attempt, number, gradients)
            opened.exchanges.append(self._thread.submit(work))

    def finish(self) -> None:
        """Waits until all gradients of the step have been exchanged."""
        for exchange in self._open.exchanges:
            exchange.result()
        self._open.exchanges.clear()

    def forget(self) -> None:
        """Gives up the exchanges of the open step that have not begun."""
        self._open = _Open(None)

    def _push(
        self,
        opened: _Open,
        attempt: OpenAttempt,
        number: int,
        gradients: Sequence[Array | None],
    ) -> None:
        """Exchanges a bucket, unless the attempt was given up or has failed. Runs in the thread of
        the exchanges."""
        if opened.has_failed or self._open is not opened:
            return
        try:
            self._exchange_bucket(attempt, number, gradients)
        except BaseException:
            opened.has_failed = True
            raise

    def _exchange_bucket(
        self, attempt: OpenAttempt, number: int, gradients: Sequence[Array | None]
    ) -> None:
        epoch, step, attempt_number = attempt.key
        latest = self._meet((epoch, step, attempt_number, _PUSH, number))
        if latest is not None:
            attempt.reach_epoch(latest)
            raise StepAbortedError(f"attempt {attempt_number} at step {step} was discarded")
        exchange = self._exchange(self._buckets[number])
        sent_words, received_words = exchange.sent_words, exchange.received_words
        sent, received = (
            self._framework.host((sum(words),)) for words in (sent_words, received_words)
        )
        exchange.pack(gradients, self._framework.array(sent))
        self._collectives.all_to_all(sent, sent_words, received, received_words)
        self._job.push_sums(attempt, exchange, self._framework.array(received))

    # ---- parameters

    def compare(self, version: int, held: object) -> None:
        """Starts to compare which parameters the ranks hold, and are about to pull. If these
        differ, each rank pulls alone until the next comparison."""
        item = _checksum(held)
        self._thread.submit(functools.partial(self._compare, version, item))

    def pull(self, version: int, arrays: list[tuple[int, Array]]) -> Pull[T]:
        """Starts to fetch parameters into arrays, each with the index of its tensor."""
        indices = [index for index, _ in arrays]
        exchange = self._exchange(indices)
        part = self._framework.host((exchange.part_words,))
        transfer = self._job.pull_pieces(version, exchange, self._framework.array(part))
        work = functools.partial(
            self._gather, version, _checksum(indices), exchange, transfer, part
        )
        return Pull(self._job, version, arrays, exchange, self._thread.submit(work))

    def pull_all(self, version: int, arrays: list[tuple[int, Array]]) -> None:
        """Fetches parameters of any total size, in the same order on all ranks."""
        sizes = self._sizes
        pulls: collections.deque[Pull[T]] = collections.deque()
        for some in _batches(arrays, lambda array: sizes[array[0]], self._bucket_numel):
            pulls.append(self.pull(version, some))
            # The next batch is pulled while this one is gathered.
            if len(pulls) > 1:
                pulls.popleft().wait()
        for pull in pulls:
            pull.wait()

    def _compare(self, version: int, item: int) -> None:
        """Compares what the ranks hold. Runs in the thread of the exchanges."""
        try:
            self._meet((self._job.epoch, version, 0, _COMPARE, item))
            self._holds_the_same = True
        except _Missed:
            self._holds_the_same = False

    def _gather(
        self, version: int, item: int, exchange: Exchange, transfer: Transfer, part: T
    ) -> Array:
        """Waits for this rank's part of parameters, and returns what all ranks have pulled for this
        one. Runs in the thread of the exchanges."""
        if not self._holds_the_same:
            transfer.cancel()
            raise _Missed
        transfer.wait()
        self._meet((self._job.epoch, version, 0, _PULL, item))
        taken_words = exchange.taken_words
        taken = self._framework.host((sum(taken_words),))
        if exchange.is_whole:
            self._collectives.all_gather(part, taken)
        else:
            given_words = exchange.given_words
            given = self._framework.host((sum(given_words),))
            exchange.pack_part(self._framework.array(part), self._framework.array(given))
            self._collectives.all_to_all(given, given_words, taken, taken_words)
        return self._framework.array(taken)

    # ---- internal

    def _exchange(self, indices: Sequence[int]) -> Exchange:
        key = tuple(indices)
        if key not in self._exchanges:
            self._exchanges[key] = self._job.exchange(indices)
        return self._exchanges[key]

    def _meet(self, key: _Key) -> int | None:
        """Waits until all ranks are about to exchange the same values, and returns None. If another
        rank is at a later attempt, returns the epoch of that attempt.

        Raises ``_Missed`` if this rank pulls parameters that another one does not, or holds others.
        """
        while True:
            keys = self._collectives.all_gather_numbers(key)
            if all(other == key for other in keys):
                return None
            if key[3] != _PUSH:
                raise _Missed
            latest = max(other[:3] for other in keys)
            if key[:3] < latest:
                return latest[0]
            if all(other[:4] == key[:4] for other in keys):
                raise InternalError(
                    f"the ranks of the group exchange different gradients in step {key[1]}: "
                    f"buckets {[other[4] for other in keys]}"
                )


def exchanges(
    framework: Framework[T], size: GroupSize, ranks: ProcessGroup, timeout: float
) -> Exchanges[T] | None:
    """The exchanges of this rank with its group of ``size`` among ``ranks``; None if no other rank
    is in it. ``timeout``: of a collective operation, in seconds."""
    group = group_of(size, ranks)
    if len(group) == 1:
        return None
    return Exchanges(framework, framework.collectives(group, timeout))


def _batches(items: Iterable[_I], numel: Callable[[_I], int], limit: int) -> Iterator[list[_I]]:
    """Consecutive items with at most ``limit`` elements in total, or one larger item."""
    batch: list[_I] = []
    total = 0
    for item in items:
        total += numel(item)
        if batch and total > limit:
            yield batch
            batch, total = [], numel(item)
        batch.append(item)
    if batch:
        yield batch


def _checksum(items: object) -> int:
    return zlib.crc32(repr(items).encode())


class _Open:
    """The exchanges of the open attempt."""

    def __init__(self, key: tuple[int, int, int] | None) -> None:
        self.key = key
        #: The gradients of the last buckets, which a device may still copy to host memory.
        self._copied: collections.deque[Sequence[Array | None]] = collections.deque()
        #: The gradients of buckets that are not complete.
        self.ready: dict[int, Array | None] = {}
        #: The number of buckets whose exchange was requested.
        self.exchanged = 0
        self.exchanges: list[Future[None]] = []
        self.has_failed = False

    def wait_for_copies(self, gradients: Sequence[Array | None]) -> None:
        """Adds a bucket, and waits until the gradients of all but the last few are in host memory.
        Otherwise those of a whole backward pass could wait on a device."""
        self._copied.append(gradients)
        if len(self._copied) > _MAX_COPIES:
            for gradient in self._copied.popleft():
                if gradient is not None:
                    gradient.wait()


class _Thread:
    """A thread that runs work in the order in which it is submitted. It ends with its owner, and
    does not delay the end of the process."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_run, args=(self._work,), name="zeroshard-group", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, work: Callable[[], _R]) -> Future[_R]:
        future: Future[_R] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(run)
        return future


def _run(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := work.get()) is not None:
        run()
        del run
