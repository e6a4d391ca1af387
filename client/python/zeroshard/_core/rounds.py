"""Data parallelism: rounds in which the servers average the gradients of one backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from .. import _native
from .._session import current
from ..errors import InvalidArgumentError, UnusedParameterError
from .average import Averages, Named
from .framework import Framework, Place, T

_MB = 1 << 20


class Rounds(Generic[T]):
    """Averages the gradients of a model after each backward pass, as they become ready.

    Which passes do is said by their forward passes (:attr:`syncing`). A parameter that is frozen or
    unfrozen later is noticed at the next forward pass.
    """

    def __init__(
        self,
        framework: Framework[T],
        model: Any,
        place: Place,
        *,
        comm_buffer_size: float,
        last_comm_buffer_size: float,
        find_unused_parameters: bool,
    ) -> None:
        """All ranks take over rank 0's parameters and buffers.

        ``comm_buffer_size``: MB of a bucket; ``last_comm_buffer_size``: of the first of each dtype,
        which is sent last.
        """
        for name, size in (
            ("comm_buffer_size", comm_buffer_size),
            ("last_comm_buffer_size", last_comm_buffer_size),
        ):
            if not size >= 0:
                raise InvalidArgumentError(
                    f"{name} is {size}: it must be a number of MB, at least 0"
                )
        self._framework = framework
        self._model = model
        self._place = place
        self._limits = int(comm_buffer_size * _MB), int(last_comm_buffer_size * _MB)
        self.find_unused_parameters = find_unused_parameters
        #: Whether forward passes ask for synchronisation now, and whether the last one did.
        self.syncing = True
        self.armed = False
        #: Whether a backward pass is under way of which gradients may have been sent.
        self._begun = False
        #: Whether there is no job for what is trained now.
        self._broken = False
        self.averages: Averages[T] | None = None
        #: Jobs that are not used any more, to be left when every rank has gone on to the next one.
        self._retired: list[Averages[T]] = []
        self._unwatch: list[Callable[[], None]] = []
        trainable = self._trainable()
        if not trainable:
            raise InvalidArgumentError(
                "the module has no parameter that requires a gradient: there is nothing to train"
            )
        self._arrange(trainable, share=True)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Forward passes inside do not ask for synchronisation."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def new_buckets(self) -> _native.Buckets:
        """The buckets of what is trained."""
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

    def _arrange(self, trainable: list[Named[T]], share: bool) -> None:
        """Makes the buckets, the job and the hooks for what is trained now."""
        self._trained = [parameter for _, parameter in trainable]
        self._names = [name for name, _ in trainable]
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch = []
        if self.averages is not None:
            self._retired.append(self.averages)
            self.averages = None
        if self._place[1] == 1:
            return
        # If this fails, the next forward pass tries again.
        self._broken = True
        self._buckets = self.new_buckets()
        constants = self._constants() if share else ()
        self.averages = Averages(
            current(), self._framework, "data-parallel", self._place, trainable, constants, share
        )
        for index, parameter in enumerate(self._trained):
            ready = weakly(self, Rounds._ready, index)
            self._unwatch.append(self._framework.after_gradient(parameter, ready))
        self._broken = False

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

    def begin_forward(self) -> None:
        """A forward pass begins that a backward pass may follow."""
        if self._begun and not self._framework.in_backward():
            # No backward pass is under way: the last one ended in an error.
            self._begun = False
            self._give_up()
        trainable = self._trainable()
        if not trainable:
            # All frozen, perhaps for a while: the job stays.
            self.armed = False
            return
        as_before = len(trainable) == len(self._trained) and all(
            parameter is before for (_, parameter), before in zip(trainable, self._trained)
        )
        if self._broken or not as_before:
            self._arrange(trainable, share=False)
        elif self.averages is not None:
            self.averages.resume()
        self.armed = self.syncing and self.averages is not None

    def begin_round(self, *_: object) -> None:
        """In backward, before the first gradient is ready."""
        if self.armed and not self._begun:
            self._begun = True
            self._framework.after_backward(self._end_round)

    def _ready(self, index: int, _: T) -> None:
        """A gradient is complete."""
        if not self.armed or self.averages is None:
            return
        self.begin_round()
        try:
            ready = self._buckets.ready(index)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"the gradient of parameter {self._names[index]!r} was ready twice in one backward pass (is it "
                "used in more than one reentrant checkpoint?): run each backward pass but the last under no_sync(), then "
                "fused_allreduce_gradients"
            ) from error
        self.averages.send(self._trained, ready)

    def _end_round(self) -> None:
        """The backward pass is over."""
        averages = self.averages
        assert averages is not None, "a round begins where there is a job"
        try:
            for index in self._buckets.rest():
                averages.send(self._trained, self._buckets.ready(index))
            averages.finish(self._trained, self.find_unused_parameters)
        except UnusedParameterError:
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            self._begun = False
            self._buckets.reset()
        while self._retired:
            self._retired.pop().retire()

    def _give_up(self) -> None:
        """Forgets a round: the next forward pass has the servers drop what they have of it."""
        self._buckets.reset()
        if self.averages is not None:
            self.averages.abandon()


def average_now(framework: Framework[T], parameters: Iterable[T], place: Place) -> None:
    """Makes each parameter's gradient its mean over the ranks."""
    trainable = list(
        {id(p): p for p in parameters if framework.trains(p) and framework.numel(p) > 0}.values()
    )
    if place[1] == 1 or not trainable:
        return
    averages = _fused.get(framework, place, trainable)
    averages.resume()
    try:
        averages.send(trainable, range(len(trainable)))
        averages.finish(trainable, unused=True)
    except BaseException:
        averages.abandon()
        raise


class _Jobs:
    """The jobs of :func:`average_now`: one for each list of parameters that is alive."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[Any, ...], Averages[Any]] = {}
        self._alive: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}

    def get(self, framework: Framework[T], place: Place, parameters: list[T]) -> Averages[T]:
        session, key = current(), self._key(place, parameters)
        averages = self._jobs.get(key)
        if averages is None or averages.session is not session:
            named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
            self._jobs[key] = averages = Averages(
                session, framework, "fused-allreduce", place, named
            )
            # Another tensor may get the id of one that is no more.
            self._alive[key] = [
                weakref.ref(parameter, lambda _: self._drop(key)) for parameter in parameters
            ]
        return averages

    def _drop(self, key: tuple[Any, ...]) -> None:
        self._jobs.pop(key, None)
        self._alive.pop(key, None)

    @staticmethod
    def _key(place: Place, parameters: list[T]) -> tuple[Any, ...]:
        return place, *map(id, parameters)


_fused = _Jobs()


def weakly(owner: Any, method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """``method`` of ``owner`` for a hook that does not keep it alive: tensors' hooks are no
    garbage, ever."""
    reference = weakref.ref(owner)

    def call(*more: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *args, *more)

    return call
