"""Data parallelism: the servers average the gradients of each backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from .. import _native
from .._native import Rest
from .._rendezvous import ProcessGroup
from .._session import connection
from ..errors import InvalidArgumentError, UnusedParameterError
from .averager import Averager, Named
from .broadcast import broadcast
from .modules import Modules
from .parameters import Hook, Parameters
from .tensors import T
from .weak_calls import weakly

_MB = 1 << 20

#: The reducers of this process.
_all: weakref.WeakSet[Reducer[Any]] = weakref.WeakSet()


class Reducer(Generic[T]):
    """Averages the gradients of a model after each backward pass, in buckets that are sent when
    they are ready.

    A backward pass is averaged if its forward pass ran while :attr:`syncing` was True. Without a
    forward pass of the wrapper (of its module, or a method of it), it is averaged if it runs while
    :attr:`syncing` is True. A parameter that is frozen or unfrozen later is noticed at the next
    forward pass of the wrapper.
    """

    def __init__(
        self,
        framework: Modules[T],
        model: Any,
        group: ProcessGroup,
        *,
        comm_buffer_size: float,
        last_comm_buffer_size: float,
        find_unused_parameters: bool,
        broadcast: bool = True,
    ) -> None:
        """``broadcast``: all ranks take the parameters and buffers of rank 0.

        ``comm_buffer_size``: MB of a bucket; ``last_comm_buffer_size``: MB of the first bucket of
        each dtype, which is sent last.
        """
        for name, size in (
            ("comm_buffer_size", comm_buffer_size),
            ("last_comm_buffer_size", last_comm_buffer_size),
        ):
            if not isinstance(size, int | float) or not size >= 0:
                raise InvalidArgumentError(
                    f"{name} is {size!r}; it must be a non-negative number of MB"
                )
        if not isinstance(find_unused_parameters, bool):
            raise InvalidArgumentError(
                f"find_unused_parameters is {find_unused_parameters!r}; it must be True or False"
            )
        self._framework = framework
        self._model = model
        self._group = group
        self._limits = int(comm_buffer_size * _MB), int(last_comm_buffer_size * _MB)
        self.find_unused_parameters = find_unused_parameters
        #: ``True`` if forward passes request averaging now.
        self.syncing = True
        #: ``True`` if the backward pass of the last forward pass is averaged, if the wrapper could
        #: not register hooks on its outputs.
        self.hidden: bool | None = None
        #: ``True`` if the running backward pass is averaged. None: no backward pass is running.
        self._averaging: bool | None = None
        #: What the running backward pass calls at its end. A pass that fails drops it.
        self._end: Callable[[], Callable[[], None] | None] = _nothing
        #: ``True`` if creating the job for the current parameters has failed.
        self._broken = False
        self.averager: Averager[T] | None = None
        #: ``True`` if mean gradients are over the ranks that do not rest.
        self._excluding = False
        #: ``True`` if ranks may rest, and the rest of this one.
        self._joining = False
        self._rest: Rest | None = None
        #: Jobs that are no longer used. They are left when every rank uses the next one.
        self._retired: list[Averager[T]] = []
        self._hooks: list[Hook] = []
        trainable = self._trainable()
        if not trainable:
            raise InvalidArgumentError(
                "no parameter of the module requires a gradient; unfreeze at least one"
            )
        self._arrange(trainable, broadcast)
        _all.add(self)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """A context whose forward passes do not request averaging."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def begin_join(self, excluding: bool) -> None:
        """Called before a loop that may have a different number of steps on each rank.
        ``excluding``: mean gradients are over the ranks whose loop has not ended."""
        self._excluding, self._joining = excluding, True

    def leave_join(self) -> None:
        """Called after such a loop, whether or not it has raised an error."""
        self._excluding, self._rest, self._joining = False, None, False

    def end_evenly(self) -> None:
        """Raises :class:`~zeroshard.DisagreementError` if another rank makes a further step."""
        if self.averager is not None:
            self.averager.abandon()
            self.averager.resume()

    def check_complete(self) -> None:
        """Each backward pass is a step of its own."""
        self._end_failed()

    def rest(self) -> None:
        """Contributes nothing more until every rank rests."""
        self._rest = None if self.averager is None else self.averager.rest(self._excluding)

    def end_join(self) -> int:
        """Waits until every rank rests, and takes the parameters of the rank that made the last
        step. Returns this rank."""
        if self.averager is None or self._rest is None:
            return self._group.rank
        last = self.averager.end_rest(self._rest)
        parameters = list(self._framework.parameters(self._model))
        broadcast(connection(), self._framework, self._group, last, parameters)
        return last

    def new_buckets(self) -> _native.Buckets:
        """The buckets of the trained parameters."""
        sizes = [
            (
                self._framework.nbytes(parameter),
                self._framework.dtype_of(f"parameter {name!r}", parameter),
            )
            for name, parameter in zip(self._names, self._trained, strict=True)
        ]
        return _native.Buckets(sizes, *self._limits)

    def _trainable(self) -> list[Named[T]]:
        named = self._framework.parameters(self._model)
        return [
            (name, p)
            for name, p in named
            if self._framework.trains(p) and self._framework.numel(p) > 0
        ]

    def _arrange(self, trainable: list[Named[T]], broadcast: bool) -> None:
        """Creates buckets, job and hooks for the trained parameters."""
        self._trained = [parameter for _, parameter in trainable]
        self._names = [name for name, _ in trainable]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.averager is not None:
            self._retired.append(self.averager)
            self.averager = None
        if self._group.size == 1:
            return
        # If this fails, the next forward pass tries again.
        self._broken = True
        self._buckets = self.new_buckets()
        constants = self._constants() if broadcast else ()
        self.averager = Averager(
            connection(),
            self._framework,
            "data-parallel",
            self._group,
            trainable,
            constants,
            broadcast,
        )
        self._hooks = [self._hook(index) for index in range(len(self._trained))]
        self._broken = False

    def _hook(self, index: int) -> Hook:
        ready = weakly(self, Reducer._ready, index)
        return self._framework.after_gradient(self._trained[index], ready)

    def _follow_hooks(self) -> None:
        """The program's hooks get a gradient before it is sent, also those that it has registered
        since."""
        for index, hook in enumerate(self._hooks):
            if not hook.is_last:
                hook.remove()
                self._hooks[index] = self._hook(index)

    def _constants(self) -> list[Named[T]]:
        framework = self._framework
        tensors = [
            named for named in framework.parameters(self._model) if not framework.trains(named[1])
        ]
        return [
            named
            for named in [*tensors, *framework.buffers(self._model)]
            if framework.numel(named[1]) > 0
        ]

    def begin_forward(self) -> bool:
        """Called when a forward pass begins that may be followed by a backward pass. Returns
        whether that is averaged."""
        self._end_failed()
        trainable = self._trainable()
        if not trainable:
            # All parameters are frozen, perhaps temporarily: keep the job.
            return False
        as_before = len(trainable) == len(self._trained) and all(
            parameter is before for (_, parameter), before in zip(trainable, self._trained)
        )
        if self._broken or not as_before:
            if self.averager is not None and self._joining and self.averager.any_rests():
                raise InvalidArgumentError(
                    "a parameter was frozen or unfrozen while another rank has no more batches; "
                    "change it before or after the loops under zeroshard.torch.join"
                )
            self._arrange(trainable, broadcast=False)
        elif self.averager is not None:
            self._follow_hooks()
            self.averager.resume()
        return self.syncing and self.averager is not None

    def begin_backward(self, averaging: bool, *_: object) -> None:
        """Called during backward, before the first gradient is ready. Gradients of a backward pass
        of several forward passes are averaged if those of one of them are."""
        self._end_failed()
        if averaging and not self._averaging:
            self._after_backward(Reducer._finish_reduction)
        elif self._averaging is None:
            self._after_backward(Reducer._end_backward)
        self._averaging = averaging or bool(self._averaging)

    def _after_backward(self, end: Callable[[Reducer[T]], None]) -> None:
        call = weakly(self, end)
        self._end = weakref.ref(call)
        self._framework.after_backward(call)

    def _end_failed(self) -> None:
        """Ends a backward pass that has raised an error."""
        is_running = self._framework.in_backward() and self._end() is not None
        if self._averaging is not None and not is_running:
            if self._averaging:
                self._give_up()
            self._averaging = self.hidden = None

    def _ready(self, index: int, _: T) -> None:
        """Called when a gradient is complete."""
        self._end_failed()
        if self._averaging is None:
            if self.averager is not None:
                self.averager.resume()
            averaging = self.syncing if self.hidden is None else self.hidden
            self.begin_backward(averaging and self.averager is not None)
        if not self._averaging or self.averager is None:
            return
        if not self._hooks[index].is_last:
            return  # hooks of the program follow: it is sent at the end of the pass
        try:
            ready = self._buckets.ready(index)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the gradient of parameter {self._names[index]!r} was computed twice in one "
                "backward pass (is it used in several reentrant checkpoints?); run the forward and "
                "backward under no_sync() and call fused_allreduce_gradients afterwards"
            ) from error
        self.averager.send(self._trained, ready)

    def _finish_reduction(self) -> None:
        """Called when the backward pass has ended."""
        averager = self.averager
        assert averager is not None, "only passes with a job are averaged"
        try:
            for index in self._buckets.rest():
                averager.send(self._trained, self._buckets.ready(index))
            averager.finish(self._trained, self.find_unused_parameters)
        except UnusedParameterError:
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            self._averaging = self.hidden = None
            self._buckets.reset()
        while self._retired:
            self._retired.pop().retire()

    def _end_backward(self) -> None:
        """Called when a backward pass that began without averaging has ended."""
        if not self._averaging:
            self._averaging = self.hidden = None

    def _give_up(self) -> None:
        """Abandons the reduction. The next forward pass makes the servers drop their part of it."""
        self._buckets.reset()
        if self.averager is not None:
            self.averager.abandon()


def any_averages() -> bool:
    """Returns whether gradients are averaged in this process: after the backward passes of a model,
    or with :func:`average_now`."""
    return _fused.any() or any(reducer.averager is not None for reducer in _all)


def average_now(framework: Parameters[T], parameters: Iterable[T], group: ProcessGroup) -> None:
    """Replaces the gradient of each parameter with its mean over the ranks."""
    trainable = list(
        {id(p): p for p in parameters if framework.trains(p) and framework.numel(p) > 0}.values()
    )
    if group.size == 1 or not trainable:
        return
    averager = _fused.get(framework, group, trainable)
    averager.resume()
    try:
        averager.send(trainable, range(len(trainable)))
        averager.finish(trainable, unused=True)
    except BaseException:
        averager.abandon()
        raise


def _nothing() -> None:
    return None


class _Jobs:
    """The jobs of :func:`average_now`: one for each list of parameters, as long as it is alive."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[Any, ...], Averager[Any]] = {}
        self._alive: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}

    def get(
        self, framework: Parameters[T], group: ProcessGroup, parameters: list[T]
    ) -> Averager[T]:
        open_connection, key = connection(), self._key(group, parameters)
        averager = self._jobs.get(key)
        if averager is None or averager.connection is not open_connection:
            named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
            self._jobs[key] = averager = Averager(
                open_connection, framework, "fused-allreduce", group, named
            )
            # The id of a deleted tensor may be reused.
            self._alive[key] = [
                weakref.ref(parameter, lambda _: self._drop(key)) for parameter in parameters
            ]
        return averager

    def any(self) -> bool:
        """Returns whether there is a job."""
        return bool(self._jobs)

    def _drop(self, key: tuple[Any, ...]) -> None:
        self._jobs.pop(key, None)
        self._alive.pop(key, None)

    @staticmethod
    def _key(group: ProcessGroup, parameters: list[T]) -> tuple[Any, ...]:
        return group, *map(id, parameters)


_fused = _Jobs()
