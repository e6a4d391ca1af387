"""Checkpoints of a job, which the shard servers write while training continues."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from . import _native
from ._core.saving import Saving
from .errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NoCheckpointError,
    UserDataLostError,
)

if TYPE_CHECKING:
    from ._core.job import ModelJob
    from ._core.optimizer_settings import Optimizer

#: The data of a rank begins with it if ``zeroshard.steps`` has added the state of its loop.
_MARK = b"zeroshard.steps 1\n"


class Loop(Protocol):
    """A loop that adds its state to the data of a rank."""

    @property
    def is_in_step(self) -> bool:
        """Returns whether a step of the loop has begun and not ended."""

    @property
    def has_stepped(self) -> bool:
        """Returns whether the model has made a step since that one has begun."""

    def state(self) -> dict[str, Any]:
        """The state of the loop with which the next step is to begin."""


class SavedModel(Protocol):
    """A sharded model with checkpoints."""

    @property
    def job(self) -> ModelJob[Any]:
        """The job of the model."""

    def roll_back(self) -> None:
        """Follows the job to the checkpoint from which it was restored, if it was."""


class Checkpoints:
    """When and where the servers save a model and its optimizer, and what a new run starts from.

    A checkpoint belongs to the name of the run (``zs.init(name=...)``, by default that of the
    script) and to the position of the model among those that the run has sharded with checkpoints.
    It can be restored on any number of servers and ranks. A server that is lost takes its part of
    the state with it; the job is then restored from its last checkpoint, and the step raises
    :class:`~zeroshard.RolledBackError` on every rank::

        checkpoints = zs.Checkpoints("file:///checkpoints", every=100, state=state)
        model, optimizer, _ = group_sharded_parallel(..., checkpoints=checkpoints)
        for step in zs.steps(total, checkpoints, restore=restore):
            with step:
                train_one(step.batch_number)
        checkpoints.save()

    Saved are parameters, optimizer state and step counts, and the buffers of rank 0.
    :func:`~zeroshard.steps` also saves the number of the step, the random state, and in Paddle the
    scheduler that is the learning rate of the optimizer. Everything else that the training depends
    on belongs in ``state``: the state of a scheduler of PyTorch and of a gradient scaler, for
    example. A program with another loop calls :meth:`resume` when it starts and after
    :class:`~zeroshard.RolledBackError`; ``state`` then includes the random state, every scheduler
    and the position in the data.
    """

    def __init__(
        self,
        url: str,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        keep: int = 0,
        on_loss: Literal["restore", "fail"] = "restore",
        on_memory_shortage: Literal["wait", "give_up"] = "wait",
        resume: Literal["auto", "never"] = "auto",
        state: Callable[[], bytes] | None = None,
    ) -> None:
        """
        Args:
            url: the directory or prefix of the checkpoints, which the coordinator, all servers and
                all ranks can reach: ``file://``, ``s3://``, ``gs://`` or ``az://``.
            every: save at each step whose number is a multiple of this.
            every_seconds: save after the first step that ends so long after the last save began; 1
                or more.
            keep: the number of checkpoints to keep; 0: all.
            on_loss: whether the job is restored from its last checkpoint when a server is lost that
                holds the only copy of a part of it, or fails. With ``"restore"`` it is also
                restored when a rank is lost after ``optimizer.step()`` in a block of
                :func:`~zeroshard.steps`, because the state at the end of the block is lost.
            on_memory_shortage: a step that is made during a save needs a second copy of what is not
                written yet. Where a server has no memory for it (``--snapshot-bytes``), ``"wait"``
                makes the step wait for the save, at most for 30 s, and ``"give_up"`` gives the save
                up.
            resume: ``"auto"`` starts from the latest checkpoint, if there is one; ``"never"``
                requires that there is none.
            state: returns the data of this rank for a checkpoint, at most 16 MiB, in the form that
                the next step is to begin with. It is called on every rank in each step, because a
                checkpoint can be requested at any step: at the end of the block of
                :func:`~zeroshard.steps`; in other loops in ``optimizer.step()``, before the step is
                made.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        for what, number, least in (("every", every, 1), ("keep", keep, 0)):
            if number is not None and number < least:
                raise InvalidArgumentError(f"{what} is {number}; it must be {least} or more")
        if resume not in ("auto", "never"):
            raise InvalidArgumentError(f'resume is {resume!r}; it must be "auto" or "never"')
        policy = _native.CheckpointPolicy(
            url,
            every=every,
            every_seconds=every_seconds,
            keep=keep,
            on_loss=on_loss,
            on_memory_shortage=on_memory_shortage,
        )
        #: What the job of the model needs of this.
        self.saving = Saving(policy, url, resumes=resume == "auto")
        #: The directory or prefix of the checkpoints.
        self.url = url
        self._state = state
        #: The loop whose state is added to the data of a rank. Weak: it ends before the model.
        self._loop: weakref.ref[Loop] | None = None
        #: The version for which this rank has announced data and has not sent it; 0: none.
        self._owed = 0
        # Weak: the job ends with the model, also if the program keeps this object.
        self._sharding: weakref.ref[SavedModel] | None = None

    def resume(self) -> tuple[int, bytes | None]:
        """Continues from the checkpoint, on every rank: at the start of a run, and after
        :class:`~zeroshard.RolledBackError`.

        Returns:
            The number of steps that the model has made, and the data of this rank at that step.
                None: there is no data of this rank; ``(0, None)``: there is no checkpoint.

        Raises:
            InvalidArgumentError: no model is sharded with this object, or it has made steps since.
            CheckpointDamagedError: the data of this rank is damaged.
            StorageError: the checkpoint cannot be read.
            UserDataLostError: the data of this rank was lost before the checkpoint was saved.
        """
        version, _, own = self.resume_loop()
        return version, own

    def save(self) -> int:
        """Waits until the model is saved as it is after its last step: for example at the end of a
        run. Does nothing if it has been saved already. One rank or all ranks may call it.

        Returns:
            The number of steps that the model has made.

        Raises:
            InvalidArgumentError: no model is sharded with this object, or a block of
                :func:`~zeroshard.steps` has made a step and has not ended, or has ended with an
                error.
            RolledBackError: the last step was lost meanwhile, and the job was restored from its
                checkpoint. Start the program again: it continues from there.
            UserDataLostError: the data of a rank for the version was lost.
            StorageError: the checkpoint cannot be written.
            TimeoutError: it has not been written after an hour.
        """
        sharding = self._bound("save")
        loop = self._following()
        if loop is not None and loop.is_in_step and loop.has_stepped:
            raise InvalidArgumentError(
                "save() was called in a block of zeroshard.steps after optimizer.step(); call it "
                "after the block, because the state of the loop at its end is a part of the "
                "checkpoint"
            )
        job = sharding.job
        if self._owed and self._owed == job.version:
            raise InvalidArgumentError(
                f"the block of step {job.version - 1} of zeroshard.steps has ended with an error "
                f"after optimizer.step(), so the state of the loop at version {job.version} is not "
                "known and cannot be saved; start the program again, which continues from the last "
                "checkpoint"
            )
        # The coordinator does not know of a save by an earlier job, and would write it again.
        if job.version == job.started_at and self._has_saved(job):
            return job.version
        job.job.save(job.version)
        return job.version

    def _bound(self, method: str) -> SavedModel:
        sharding = None if self._sharding is None else self._sharding()
        if sharding is None:
            raise InvalidArgumentError(
                f"{method}() was called without a model; pass this object to "
                "group_sharded_parallel as checkpoints first"
            )
        return sharding

    def _has_saved(self, job: ModelJob[Any]) -> bool:
        try:
            _native.user_data(self.url, job.job.name, job.version, job.group.rank)
        except UserDataLostError:
            return True
        except NoCheckpointError:
            return False
        return True

    def _saved(self, sharding: SavedModel, rank: int) -> bytes | None:
        job = sharding.job
        if not job.version:
            return None
        at = self.url, job.job.name, job.version, rank
        try:
            return _native.user_data(*at)
        except UserDataLostError:
            raise
        except NoCheckpointError:
            # The job is that of an earlier run which ended between two checkpoints. The coordinator
            # has the data of its last step.
            job.connection.cluster.save_checkpoint(job.job.name)
            return _native.user_data(*at)

    # ---- called by zeroshard.steps

    @property
    def has_state(self) -> bool:
        """Returns whether the program saves data of its own."""
        return self._state is not None

    def follow(self, loop: Loop) -> None:
        """From now on, the state of the loop is added to the data of this rank, until the loop is
        deleted."""
        self._loop = weakref.ref(loop)

    def send(self) -> None:
        """Sends the data of this rank at the end of a step of the loop."""
        job = self._bound("send").job
        data = self._packed(self._following())
        if data is not None:
            job.job.send_user_data(job.version, data)
        self._owed = 0

    @property
    def job_name(self) -> str:
        """The name of the job of the model."""
        name: str = self._bound("job_name").job.job.name
        return name

    def batch(self, step: int) -> int:
        """Returns the number of the batch that a step uses."""
        number: int = self._bound("batch").job.job.batch(step)
        return number

    @property
    def optimizer(self) -> Optimizer[Any]:
        """The settings of the optimizer of the model."""
        return self._bound("optimizer").job.optimizer.settings

    def resume_loop(self) -> tuple[int, dict[str, Any] | None, bytes | None]:
        """As :meth:`resume`, with the state of the loop at that step between its two results. A
        rank that has none takes that of rank 0, without its random state."""
        sharding = self._bound("resume")
        sharding.roll_back()
        job = sharding.job
        if job.version != job.started_at:
            raise InvalidArgumentError(
                f"resume() was called after step {job.version - 1}; call it before the first step "
                "or after RolledBackError"
            )
        loop, own = unpacked(self._saved(sharding, job.group.rank))
        if loop is None and job.group.rank != 0:
            first, _ = unpacked(self._saved(sharding, 0))
            if first is not None:
                loop = {name: value for name, value in first.items() if name != "random"}
        return job.version, loop, own

    # ---- called by the sharded model

    def check_unused(self) -> None:
        """Raises an error if another model uses this object."""
        if self._sharding is not None and self._sharding() is not None:
            raise InvalidArgumentError(
                "checkpoints is already used by another model; create one Checkpoints for each"
            )

    def bind(self, sharding: SavedModel) -> None:
        """Called when the model has been sharded."""
        self._sharding = weakref.ref(sharding)

    def data(self) -> tuple[bytes | None, bool]:
        """The data of this rank for the step that is being made, and whether the loop sends it at
        the end of the step."""
        loop = self._following()
        if loop is None:
            return self._packed(loop), False
        if not loop.is_in_step:
            raise InvalidArgumentError(
                "optimizer.step() was called outside of the blocks of zeroshard.steps; call it in "
                "`with step:`, because a loop with checkpoints continues from the end of a block"
            )
        if loop.has_stepped:
            raise InvalidArgumentError(
                "a step of zeroshard.steps calls optimizer.step() more than once; a loop with "
                "checkpoints can continue only between its steps, so call it once in each"
            )
        self._owed = self._bound("data").job.version + 1
        return None, True

    def _following(self) -> Loop | None:
        return None if self._loop is None else self._loop()

    def _packed(self, loop: Loop | None) -> bytes | None:
        data = None if self._state is None else self._state()
        if self._state is not None and not isinstance(data, bytes):
            raise InvalidTypeError(
                f"state of the checkpoints has returned a {type(data).__name__}; it must return "
                "bytes"
            )
        return data if loop is None else packed(loop.state(), data)


def packed(loop: dict[str, Any], own: bytes | None) -> bytes:
    """The data of a rank: the state of the loop as JSON on the first line, and the program's own
    data."""
    header = json.dumps({**loop, "own": own is not None})
    return _MARK + header.encode() + b"\n" + (own or b"")


def unpacked(data: bytes | None) -> tuple[dict[str, Any] | None, bytes | None]:
    """The inverse of :func:`packed`. Without a loop, all data is the program's own."""
    if data is None or not data.startswith(_MARK):
        return None, data
    header, _, own = data[len(_MARK) :].partition(b"\n")
    loop = json.loads(header)
    return loop, own if loop.pop("own") else None
