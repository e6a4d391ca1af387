"""``steps``: a training loop whose aborted steps are run again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from ._checkpoints import Checkpoints
from ._core.attempt import Attempt, attempts, check_restorable
from ._random import RandomState
from .errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NoCheckpointError,
    RolledBackError,
    StepAbortedError,
    UserDataLostError,
)

B = TypeVar("B")

#: So many attempts at a step may fail one after the other; then its error is raised.
_MAX_FAILURES = 100


class Step(Generic[B]):
    """One attempt at a step of :func:`steps`, and the context in which it is made."""

    #: The number of the step in the loop, which begins with 0. It stays the same when the step is
    #: run again.
    number: int
    #: The number of the batch. It is the number of the step plus the number of batches before it
    #: that the job skips after :func:`zeroshard.rewind`.
    batch_number: int
    #: The batch of the step; None if :func:`steps` was called with a number.
    batch: B

    def __init__(
        self,
        number: int,
        batch_number: int,
        batch: B,
        caught: tuple[type[Exception], ...],
        checkpoints: Checkpoints | None,
    ) -> None:
        self.number = number
        self.batch_number = batch_number
        self.batch = batch
        self._caught = caught
        self._checkpoints = checkpoints
        self._is_open = False
        self._models: list[Attempt[Any]] = attempts()
        self._random = RandomState.current()
        #: The error that has ended the block, if the loop continues after it.
        self._error: Exception | None = None

    def __enter__(self) -> Step[B]:
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            if error is None:
                error = self._end()
        finally:
            self._is_open = False
        if isinstance(error, self._caught):
            self._error = error
            return True
        # The program may keep this object longer than the model.
        self._models.clear()
        return False

    def _end(self) -> Exception | None:
        """Sends the data of this rank for checkpoints. Returns the error after which the loop
        continues."""
        if self._checkpoints is not None and self._has_stepped:
            try:
                self._checkpoints.send()
            except self._caught as error:
                return error
        return None

    @property
    def _has_stepped(self) -> bool:
        return any(model.has_stepped for model in self._models)


class _Steps(Generic[B]):
    """The iterator of :func:`steps`."""

    def __init__(
        self,
        batch: Callable[[int, int], B],
        checkpoints: Checkpoints | None,
        restore: Callable[[bytes | None], object] | None,
    ) -> None:
        """``batch``: maps the number of a step and that of its batch to the batch, and raises
        StopIteration after the last one."""
        self._batch = batch
        self._checkpoints = checkpoints
        self._restore = restore
        self._step: Step[B] | None = None
        self._failures = 0
        #: The state of the loop before step 0, if it has begun with that and has checkpoints.
        self._first: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Step[B]]:
        return self

    def __next__(self) -> Step[B]:
        last = self._step
        error = None if last is None else last._error
        self._failures = 0 if error is None else self._failures + 1
        if last is None:
            self._step = self._new(0 if self._checkpoints is None else self._resumed())
        elif isinstance(error, StepAbortedError):
            self._step = self._again(last, error)
        elif error is not None:
            self._step = self._new(self._resumed())
        else:
            self._step = self._new(last.number + 1)
        return self._step

    def _new(self, number: int) -> Step[B]:
        checkpoints = self._checkpoints
        batch_number = number if checkpoints is None else checkpoints.batch(number)
        return self._attempt(number, batch_number, self._batch(number, batch_number))

    def _again(self, last: Step[B], error: StepAbortedError) -> Step[B]:
        """Another attempt at an aborted step, from the same state."""
        # A model that the program has dropped may be in a cycle, and would be restored as well.
        gc.collect()
        try:
            check_restorable(last._models)
            for model in last._models:
                model.restore()
        except InvalidArgumentError as refused:
            raise refused from error
        last._random.restore()
        return self._attempt(last.number, last.batch_number, last.batch)

    def _attempt(self, number: int, batch_number: int, batch: B) -> Step[B]:
        caught: tuple[type[Exception], ...] = (StepAbortedError, RolledBackError)
        if self._checkpoints is None:
            caught = (StepAbortedError,)
        caught = caught if self._failures + 1 < _MAX_FAILURES else ()
        return Step(number, batch_number, batch, caught, self._checkpoints)

    # ---- checkpoints

    def _resumed(self) -> int:
        """Continues from the checkpoint. Returns the number of the step."""
        checkpoints = self._checkpoints
        assert checkpoints is not None, "the loop has checkpoints"
        try:
            version, loop, own = checkpoints.resume_loop()
        except UserDataLostError as lost:
            raise UserDataLostError(
                f"{lost}. To do so, delete the job if it still exists (zsctl delete "
                f"{checkpoints.job_name}), remove the checkpoint of this version if there is one "
                "(zsctl checkpoint rm), and start the program again"
            ) from lost
        if version and loop is None:
            name = checkpoints.job_name
            raise NoCheckpointError(
                f"job {name!r} is at version {version}, for which zeroshard.steps has saved no "
                "data, because another loop has trained it; to continue from an earlier "
                f"checkpoint, run `zsctl delete {name}` and `zsctl checkpoint rm {name} {version} "
                f"--url {checkpoints.url}`"
            )
        loop = loop or self._first
        if loop is not None:
            checkpoints.optimizer.set_schedule(loop.get("schedule"))
        if self._restore is not None:
            self._restore(own)
        if loop is None:
            loop = self._first = self._state_before(0)
        elif "random" in loop:
            RandomState.from_json(loop["random"]).restore()
        checkpoints.follow(self)
        number: int = loop["number"]
        return number

    def _state_before(self, number: int) -> dict[str, Any]:
        """The current state of the loop, with which this step is to begin."""
        assert self._checkpoints is not None, "the loop has checkpoints"
        state = {"number": number, "random": RandomState.current().to_json()}
        schedule = self._checkpoints.optimizer.schedule()
        return state if schedule is None else {**state, "schedule": schedule}

    # ---- called by the checkpoints

    @property
    def is_in_step(self) -> bool:
        return self._step is not None and self._step._is_open

    @property
    def has_stepped(self) -> bool:
        return self._step is not None and self._step._has_stepped

    def state(self) -> dict[str, Any]:
        step = self._step
        assert step is not None, "the loop has begun"
        return self._state_before(step.number + 1)


@overload
def steps(
    batches: int,
    checkpoints: Checkpoints | None = None,
    *,
    restore: Callable[[bytes | None], object] | None = None,
) -> Iterator[Step[None]]: ...
@overload
def steps(
    batches: Iterable[B],
    checkpoints: Checkpoints | None = None,
    *,
    restore: Callable[[bytes | None], object] | None = None,
) -> Iterator[Step[B]]: ...
def steps(
    batches: int | Iterable[Any],
    checkpoints: Checkpoints | None = None,
    *,
    restore: Callable[[bytes | None], object] | None = None,
) -> Iterator[Step[Any]]:
    """The steps of a training loop. A step that is aborted, because a server or a rank was lost, is
    run again with the same results::

        for step in zs.steps(loader):
            with step:
                optimizer.zero_grad()
                model(*step.batch).backward()
                optimizer.step()
                print(step.number)

    :class:`~zeroshard.StepAbortedError` ends the block, and the loop continues with the same number
    and batch. The block is the whole step: forwards, all backward passes, clipping, and one
    ``optimizer.step()``. After that follows everything that depends on the step and does not need
    the servers: schedulers, the ``update()`` of a gradient scaler, evaluations, logs. Code of the
    loop before or after the block runs again as well. Earlier blocks do not, so gradients cannot be
    accumulated over several blocks.

    A step begins without gradients, as after ``zero_grad(set_to_none=True)``. When it is run again,
    these have the values with which it began:

    - the random state of Python's ``random``, ``numpy.random``, torch (CPU and CUDA) and Paddle;
    - the buffers of sharded models, such as the running statistics of batch norm.

    Restored are not: generators that the program has created (``torch.Generator``,
    ``numpy.random.default_rng``, those of Paddle's ``get_rng_state_tracker``), the random state of
    other devices, buffers and gradients of models that are not sharded, and other objects that the
    block changes before ``optimizer.step()``.

    A step may be aborted on some ranks only. Therefore the block must not contain collective calls
    (``torch.distributed.all_reduce``, for example).

    With ``checkpoints``, the loop begins with the step that follows the checkpoint, and continues
    from there after :class:`~zeroshard.RolledBackError`. The number of the step and the random
    state of each rank at the end of its block are a part of the checkpoint; in Paddle also the
    ``state_dict()`` of the scheduler that is the learning rate of the optimizer. A checkpoint is
    complete when the blocks of all ranks have ended. What a program does after a block is not run
    again when the loop continues from the checkpoint that the block has ended with: a scheduler
    that moves there, or an evaluation that draws random numbers there, gives other results. The
    loop is that of the whole run, not of an epoch, and trains one model. The program saves other
    data with ``state`` of the checkpoints, which is passed to ``restore``.

    :func:`~zeroshard.rewind` may ask that batches are skipped. The batch of a step is then
    ``batches[step.batch_number]``.

    Args:
        batches: the number of steps, or the batches. With checkpoints, batches must be a sequence
            (``collections.abc.Sequence``): ``batches[batch_number]`` is the batch of a step.
        checkpoints: those of the model.
        restore: called with the data that ``state`` of the checkpoints has returned, when the loop
            begins and after each RolledBackError; with None if there is no checkpoint, or if it has
            no data of this rank.

    Raises:
        InvalidArgumentError: ``checkpoints`` are used with batches that are not a sequence, or only
            one of ``state`` and ``restore`` is given. In the loop: an aborted step cannot be run
            again, because a gradient was computed before its block, because the block has made a
            step or has changed parameters, because the model has SyncBatchNorm or distributed
            parameters, or because gradients are averaged by ``DataParallel`` or
            ``fused_allreduce_gradients``; or a block makes two steps in a loop with checkpoints.
        InvalidTypeError: ``batches`` is neither a number nor iterable.
        NoCheckpointError: the job continues, but there is no data of its last step, because another
            loop has made it.
        UserDataLostError: the data of the last step was lost, and the checkpoints have
            ``on_loss="fail"``.
        StepAbortedError: the step was aborted 100 times.
        RolledBackError: the job has returned to a checkpoint, and ``checkpoints`` is None; or this
            happened 100 times.
    """
    if (checkpoints is not None and checkpoints.has_state) != (restore is not None):
        raise InvalidArgumentError(
            "restore of zeroshard.steps gets the data that state of Checkpoints returns; pass both "
            "or neither"
        )
    return _Steps(_batches(batches, checkpoints is not None), checkpoints, restore)


def _batches(batches: int | Iterable[Any], from_any: bool) -> Callable[[int, int], Any]:
    """Returns a function from the number of a step and that of its batch to the batch.
    ``from_any``: the steps may continue from any number."""
    if isinstance(batches, int):
        if batches < 0:
            raise InvalidArgumentError(f"the number of steps is {batches}; it must be 0 or more")
        return _counted(batches)
    if isinstance(batches, Sequence):
        return _indexed(batches)
    if not isinstance(batches, Iterable):
        raise InvalidTypeError(
            f"batches is a {type(batches).__name__}; it must be a number of steps, or iterable"
        )
    if from_any:
        raise InvalidArgumentError(
            f"batches is a {type(batches).__name__}, which cannot go back to the batch of a "
            "checkpoint; with checkpoints, pass a sequence, or a number of steps and make each "
            "batch from step.batch_number"
        )
    found = iter(batches)
    return lambda number, batch_number: next(found)


def _counted(steps: int) -> Callable[[int, int], None]:
    def batch(number: int, batch_number: int) -> None:
        if number >= steps:
            raise StopIteration

    return batch


def _indexed(batches: Sequence[Any]) -> Callable[[int, int], Any]:
    def batch(number: int, batch_number: int) -> Any:
        if batch_number >= len(batches):
            raise StopIteration
        return batches[batch_number]

    return batch
