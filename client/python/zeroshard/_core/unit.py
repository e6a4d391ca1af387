"""The unit of gathering: how it is fetched, and freed."""

from __future__ import annotations

from typing import Any, Generic

from .._native import Array
from .holdings import Holdings
from .interrupts import operation
from .job import ModelJob
from .tensors import Incoming, T
from .traffic import Fetch, Traffic


class Unit(Generic[T]):
    """The large parameters of one module. They are fetched and freed together."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        holdings: Holdings[T],
        number: int,
        parameters: dict[str, T],
    ) -> None:
        self._job = job
        self._traffic = traffic
        self._holdings = holdings
        self.number = number
        #: By name in the module.
        self.parameters = parameters
        self.nbytes = sum(map(job.framework.nbytes, parameters.values()))
        self.gathered = True
        #: ``True`` if servers show its values, so that it has no memory of this process.
        self.shown = False
        #: The number of running forwards that use it.
        self.users = 0
        #: What fetches it, the memory that receives values, and the memory of each parameter.
        self._fetch: Fetch[T] | None = None
        self._incoming: list[Incoming] = []
        self._values: list[tuple[T, T]] = []
        #: The node of the backward graph that it was fetched for.
        self.node: Any = None
        #: The parameters whose gradient is complete in this backward pass.
        self.done: set[int] = set()

    @property
    def allocated(self) -> bool:
        """Returns whether it has memory, because it is gathered or being fetched."""
        return self.gathered or self._fetch is not None

    @property
    def modified(self) -> bool:
        """Returns whether the program has written to it."""
        return any(self._job.entry(parameter).modified for parameter in self.parameters.values())

    @operation
    def start(self, together: bool = False) -> None:
        """Starts to fetch it, if it is not allocated. ``together``: all ranks of the group do
        this."""
        if not self.allocated:
            arrays = self.prepare()
            self.fetch_by(self._traffic.pull(arrays, together=together))

    def prepare(self) -> list[tuple[int, Array]]:
        """Takes memory for it. Returns what the transfer for :meth:`fetch_by` must pull."""
        job, arrays = self._job, []
        job.check_open()
        job.check_not_rolled_back()
        self._incoming.clear()
        self._values.clear()
        for parameter in self.parameters.values():
            if job.entry(parameter).modified:
                continue  # an initializer of Paddle has given it memory and values
            value = self._holdings.memory.take(parameter)
            self._values.append((parameter, value))
            self._incoming.append(self._job.framework.incoming(value))
            arrays.append((job.entry(parameter).index, self._incoming[-1].array))
        return arrays

    def fetch_by(self, transfer: Fetch[T]) -> None:
        """Lets ``transfer`` fetch it, which may also fetch other units."""
        self._fetch = transfer
        self._holdings.count(self.nbytes)

    @operation
    def finish(self) -> None:
        """Fetches it and waits."""
        if not self.gathered:
            self._job.check_open()  # it may have been prefetched before
        self.start()
        if self._fetch is not None:
            try:
                with self._job.connection.activity.waiting("pull"):
                    self._fetch.wait()
            except BaseException:
                self.give_up()
                raise
            for one in self._incoming:
                one.finish()
            self._fetch, self.gathered = None, True
            self.shown = all(
                [self._holdings.memory.received(one) for one in self.parameters.values()]
            )
            if self.shown:
                self._holdings.count(-self.nbytes)
            else:
                self._holdings.count_peak()
            for parameter, value in self._values:
                entry = self._job.entry(parameter)
                if not entry.modified:
                    self._holdings.put(parameter, value)
                    entry.hide()
            self._incoming.clear()
            self._values.clear()

    def expose(self) -> None:
        """The program may write to it from now on."""
        for parameter in self.parameters.values():
            self._job.entry(parameter).expose()

    @operation
    def free(self, outdated: bool = False) -> None:
        """Frees it, unless a forward uses it or the program has written to it. In the latter case
        the next step takes over the values. What servers show is not freed before it is
        ``outdated``."""
        if not self.allocated or self.users > 0 or self.shown and not outdated or self.modified:
            return
        self._cancel()
        self.gathered, self.node = False, None
        if not self.shown:
            self._holdings.count(-self.nbytes)
        self.shown = False
        for parameter in self.parameters.values():
            self._holdings.drop(parameter)
            self._job.entry(parameter).hide()

    def _cancel(self) -> None:
        """Cancels its fetch. A prefetch may have failed because a step has ended its version."""
        if self._fetch is not None:
            # The memory must not be written to after it is freed.
            self._fetch.cancel()
            self._fetch = None
            self._incoming.clear()
            self._values.clear()

    def give_up(self) -> None:
        """Cancels its fetch, if there is one."""
        if self._fetch is not None:
            self._cancel()
            self._holdings.count(-self.nbytes)
