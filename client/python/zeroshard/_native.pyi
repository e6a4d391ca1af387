"""The extension module, written in Rust: clusters, jobs and transfers.

Blocking calls release the GIL, raise an error when their timeout expires, and can be interrupted
with Ctrl-C. Exceptions are those of :mod:`zeroshard.errors`. Tensors are identified by their index
in the job's manifest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

__all__ = [
    "Array",
    "Box",
    "Buckets",
    "CheckpointPolicy",
    "Cluster",
    "Exchange",
    "FollowedVersion",
    "Follower",
    "Job",
    "Layout",
    "Mesh",
    "OpenAttempt",
    "Optimizer",
    "Pane",
    "Pinned",
    "Report",
    "Rest",
    "Schedule",
    "TensorSpec",
    "Transfer",
    "__version__",
    "available_memory",
    "flush_traces",
    "hashes",
    "looks",
    "own_panes",
    "redistribution",
    "user_data",
]
__version__: str

#: A property has the name of the type.
type _Bytes = bytes

#: A parameter group: the name and the hyperparameters of its optimizer (see :class:`Optimizer`).
type _Group = tuple[str, Mapping[str, float]]
type _Average = tuple[str, float | None, str | tuple[float, float] | None, int, int]
type _Spikes = tuple[str, float | None, float | None, int, int, int, int, int]

@final
class Array:
    """Contiguous host memory that transfers read or write. ``owner`` is kept alive until they end.

    ``dtype`` is ``"f32"``, ``"bf16"`` or ``"f16"``. Buffers of other dtypes are transferred as raw
    ``"f32"`` words. A pull writes ``box`` of the tensor, in row-major order; by default the rank's
    box of the tensor's layout, which is the whole tensor if it has no layout.

    ``pane``: the pane of which it is the memory. A pull then shows values in it instead of
    copying them, if a server on this host has them as they are.

    ``wait`` is called before the values are read, and returns when a device has copied them to the
    memory. ``pulled`` is called when :meth:`Job.pull` has written the values. Both may be called by
    another thread.
    """

    def __new__(
        cls,
        address: int,
        numel: int,
        dtype: str,
        owner: object,
        box: Box | None = None,
        *,
        pane: Pane | None = None,
        wait: Callable[[], None] | None = None,
        pulled: Callable[[], None] | None = None,
    ) -> Array: ...
    def wait(self) -> None:
        """Waits until the memory has the values."""

def available_memory() -> int | None:
    """The bytes that a server on this machine may use by default; None if the system does not
    tell."""

def flush_traces() -> None:
    """Sends the spans that have ended to the collector of traces, if there is one. Waits for at
    most five seconds.
    """

@final
class Pane:
    """Memory in which pages of servers on this host appear, without a copy."""

    @staticmethod
    def reserve(nbytes: int) -> Pane | None:
        """A new pane of zeros. None if the system has none, or it would be so small that servers
        send its values."""

    @property
    def address(self) -> int:
        """The address of its first byte."""

    @property
    def shown(self) -> bool:
        """``True`` if servers show all of it. The program may have written to it."""

    def release(self) -> None:
        """Lets the servers overwrite what they show. Do not read the pane before the next pull."""

def own_panes() -> None:
    """Copies the values of all panes into memory of this process, which servers do not change.

    Raises :class:`~zeroshard.errors.OutOfMemoryError`.
    """

def looks(arrays: Sequence[Array]) -> list[tuple[bool, int]]:
    """A value for each array that changes when its elements do: ``(True, number)`` if servers show
    exactly these elements in its pane, and otherwise ``(False, hash)``.
    """

def hashes(arrays: Sequence[Array]) -> list[int]:
    """A 64-bit hash of the elements of each array (XXH3), to find out whether they are the same.

    The arrays are read by several threads, without the GIL.
    """

@final
class Box:
    """An axis-aligned region of a tensor: first index and number of indices per dimension."""

    def __new__(cls, offset: Sequence[int], size: Sequence[int]) -> Box: ...
    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of the whole tensor."""
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> tuple[int, ...]: ...
    @property
    def numel(self) -> int: ...
    def __getnewargs__(self) -> tuple[list[int], list[int]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Mesh:
    """Ranks in an n-dimensional array with named dimensions. ``ranks`` are in row-major order."""

    def __new__(cls, shape: Sequence[int], ranks: Sequence[int], names: Sequence[str]) -> Mesh: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def names(self) -> list[str]: ...
    def coordinate(self, rank: int) -> list[int] | None:
        """The index of ``rank`` in each dimension. None if the rank is not in the mesh."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Layout:
    """How a tensor is distributed over a mesh: one placement per mesh dimension.

    A placement is ``"shard:0"`` (split along dimension 0 of the tensor, as by ``torch.chunk``),
    ``"replicate"``, or the reduction that turns the ranks' values into the tensor: ``"sum"``,
    ``"avg"`` or ``"max"``.
    """

    def __new__(cls, mesh: Mesh, placements: Sequence[str]) -> Layout: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def placements(self) -> list[str]: ...
    def local_box(self, shape: Sequence[int], rank: int) -> Box | None:
        """The rank's box of a tensor of ``shape``. None if the rank is not in the mesh."""

def redistribution(
    shape: Sequence[int], source: Layout, target: Layout
) -> list[tuple[int, int, Box]]:
    """The transfers that redistribute a tensor: sending rank, receiving rank and box of each.

    A rank that already has a box sends it to itself. Neither layout may have partial placements.
    """

@final
class Optimizer:
    """An optimizer of the shard servers, with torch's names for its hyperparameters and state.

    Hyperparameters that are not given have torch's defaults. Flags are 0 or 1.
    """

    def __new__(
        cls, name: str, hyperparameters: Mapping[str, float] | None = None
    ) -> Optimizer: ...
    @property
    def hyperparameters(self) -> dict[str, float]: ...
    @property
    def state(self) -> list[str]:
        """The names of its state tensors. Each is f32, and is transferred in the parameter's
        shape."""
    def state_of(self, shape: Sequence[int]) -> list[str]:
        """The names of the state tensors of a parameter of this shape."""
    @property
    def scalar_state(self) -> list[str]:
        """The names of its state that is one f32 for each parameter, besides the number of applied
        steps."""
    @property
    def needs_whole_tensors(self) -> bool:
        """Returns whether an update depends on the norm of the whole parameter."""

@final
class TensorSpec:
    """One tensor of a job's manifest.

    ``layout`` is the index of one of the job's meshes and one placement per dimension of it. The
    layout determines which ranks upload the tensor and contribute to its gradient: each box of a
    sharded tensor comes from the ranks that have it, the first rank contributes for replicas, and
    partial values are reduced. Without a layout rank 0 uploads the tensor, and the gradient is the
    mean over all ranks. ``replaced_by`` is the only rank that may push new values of a tensor
    without a layout (:meth:`Job.replace`); by default rank 0.
    """

    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        frozen: bool = False,
        buffer: bool = False,
        group: int = 0,
        whole: bool = False,
        no_clip: bool = False,
        layout: tuple[int, Sequence[str]] | None = None,
        replaced_by: int | None = None,
    ) -> TensorSpec: ...

@final
class CheckpointPolicy:
    """When and where a job is saved, what happens when a server is lost that holds the only copy of
    a part of it (``"restore"`` or ``"fail"``), and when a server has no memory for second copies
    during a save (``"wait"`` or ``"give_up"``)."""

    def __new__(
        cls,
        url: str,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        keep: int = 0,
        on_loss: str = "restore",
        on_memory_shortage: str = "wait",
    ) -> CheckpointPolicy: ...

def user_data(url: str, job: str, version: int, rank: int) -> bytes | None:
    """The data that a rank has stored in a checkpoint. None if it has stored none."""

@final
class Cluster:
    """A connection to a cluster of shard servers, which may run inside this process."""

    @staticmethod
    def connect(
        address: str,
        *,
        token: str | None = None,
        tls: tuple[str, str | None, str | None, str | None] | None = None,
        wire: str = "f32",
        parameter_wire: str | None = None,
        chunk_bytes: int = 1048576,
        transport: str | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        replicas: int = 1,
        rounding_seed: int = 0,
    ) -> Cluster: ...
    @staticmethod
    def embedded(
        shards: int = 1,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        wire: str = "f32",
        parameter_wire: str | None = None,
        chunk_bytes: int = 1048576,
        transport: str | None = None,
        timeout: float = 600.0,
        replicas: int = 1,
        rounding_seed: int = 0,
    ) -> Cluster: ...
    @property
    def address(self) -> str: ...
    def status(self) -> str:
        """Servers and jobs, as JSON."""
    def create_job(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        groups: Sequence[_Group],
        world: int,
        meshes: Sequence[Mesh] | None = None,
        *,
        idle_timeout: float | None = None,
        predecessor: tuple[Job, int] | None = None,
        fresh_state: bool = False,
        checkpoints: CheckpointPolicy | None = None,
        resume: bool = False,
        group_size: int = 1,
        offload: bool = False,
        state_dtype: str = "f32",
        averages: Sequence[_Average] | None = None,
        averages_skip: bool = False,
        spikes: _Spikes | None = None,
    ) -> None:
        """Creates the job, unless a job with the same name and the same specification exists.

        With a ``predecessor``, a job at its current version, the servers first copy its master
        weights to the tensors of the same name and shape, and, without ``fresh_state``, its
        optimizer state and applied steps, where it has all state tensors of this job.
        The rank that uploads such a tensor then calls :meth:`Job.initialise` or :meth:`Job.keep`.

        The coordinator deletes the job when all ranks have left it, or when no rank has held it for
        ``idle_timeout`` seconds. With None, the job is kept until ``zsctl delete``.

        With ``resume``, the job starts from the latest checkpoint of a job of this name, if there
        is one. Its version is then that of the checkpoint, and nothing is uploaded.

        With a ``group_size``, so many consecutive ranks add their gradients before they push them:
        see :class:`Exchange`.

        With ``offload``, servers with a GPU keep the optimizer state in host memory or on disk.

        ``state_dtype``: ``"f32"``, or ``"int8"`` for optimizer state of 1 byte per element, for the
        optimizers that can have it; :meth:`Job.pull` still returns it as f32.

        ``averages``: name, decay, warm-up, start and distance of updates of each running average,
        as :class:`zeroshard.Average` has them. ``averages_skip``: skipped steps do not count.

        ``spikes``: the policy on spikes, as :class:`zeroshard.SpikePolicy` has it.
        """
    def join(self, name: str, rank: int, *, bucket_numel: int = 8388608) -> Job: ...
    def save_checkpoint(self, name: str) -> tuple[int, int]:
        """Saves the current version of a job where its policy says. Returns the version and the
        size in bytes when the checkpoint is complete."""
    def rewind(
        self, name: str, version: int, url: str | None, skips: Sequence[tuple[int, int]]
    ) -> int:
        """Returns a job to its checkpoint of a version, and returns the number of the new line."""
    def pin(
        self,
        name: str,
        *,
        version: int | None = None,
        tensors: Sequence[str] | None = None,
        optimizer_state: bool = False,
        averages: Sequence[str] | None = None,
        seconds: float = 60.0,
    ) -> Pinned:
        """Keeps a version of the parameters, and of the optimizer state if requested, on the
        servers; the latest one by default."""
    def follow(
        self,
        name: str,
        *,
        dtype: str,
        tensors: Sequence[str] | None = None,
        boxes: Mapping[str, Box] | None = None,
        seconds: float = 600.0,
        mirror: str | None = None,
    ) -> Follower:
        """Follows a job in a dtype. ``boxes``: the boxes of tensors that are not followed as a
        whole. ``seconds``: the longest wait for a version. ``mirror``: the address of a mirror."""
    def state_hash(self, name: str) -> str: ...
    def traffic(self) -> tuple[int, int]:
        """Payload bytes pulled and pushed so far."""
    def close(self) -> None:
        """Stops an embedded cluster and waits until it has stopped."""

@final
class Pinned:
    """A version of a job's parameters that the servers keep."""

    @property
    def version(self) -> int: ...
    @property
    def tensors(self) -> list[tuple[str, list[int], str, bool]]:
        """Name, shape, dtype, and whether it is a buffer, of all tensors of the job."""
    def trains(self, tensor: int) -> bool:
        """Returns whether the servers update the tensor with this index."""
    def state_names(self, tensor: int) -> list[str]:
        """The names of the state tensors of the tensor with this index, if it trains."""
    def pull(self, arrays: Sequence[tuple[int, Array]], *, part: str | None = None) -> None:
        """Fills the arrays with tensors, which are given by their indices: whole, or the boxes of
        the arrays. ``part`` is as in :meth:`Job.pull`."""
    def applied_steps(self) -> list[tuple[int, list[float]]]:
        """As :meth:`Job.applied_steps`, at the pinned version, if the optimizer state is pinned."""
    def close(self) -> None:
        """Releases the version."""

@final
class Follower:
    """Receives the versions of a job: what each has changed."""

    @property
    def tensors(self) -> list[tuple[str, list[int], str, int]]:
        """Name, shape (or that of the box), dtype of the reader's values, and index of the tensor
        that owns the storage, of all tensors that are followed."""
    def next(self) -> FollowedVersion:
        """Waits for the next version, and returns the newest one."""
    def copies(self) -> dict[str, int]:
        """The number of full copies for each reason."""

@final
class FollowedVersion:
    """A version of a job that a follower has received."""

    @property
    def number(self) -> int: ...
    @property
    def line(self) -> int: ...
    @property
    def bytes(self) -> int:
        """The bytes that the servers have sent. Of a full copy, once it is applied."""
    @property
    def changed_fraction(self) -> float | None:
        """The fraction of the elements that have changed, once the version is applied."""
    @property
    def copied(self) -> str | None:
        """The reason for a full copy; None if the version has changes only."""
    def apply(self, arrays: Sequence[tuple[int, Array]]) -> None:
        """Writes the version to the arrays, which are given by the indices of their tensors: all
        tensors that are followed and own their storage, with the values of the version that was
        applied before."""
    def positions(self, tensor: int) -> _Bytes | None:
        """The positions of the changed elements of a tensor, as int64; None for a full copy."""
    def apply_gathered(self, arrays: Sequence[tuple[int, Array]]) -> bool:
        """Replaces the old values at the positions of all tensors by the new ones. Returns False if
        they are not those of the version that was applied before: :meth:`apply` then fetches a full
        copy."""

@final
class Exchange:
    """The division of some tensors among the ranks of a group: what each rank sends to the others,
    and what becomes of it. The group transfers it in words of 4 bytes."""

    @property
    def sent_words(self) -> list[int]:
        """The words of this rank's messages with gradients, by the rank of the group to which they
        are sent."""
    @property
    def received_words(self) -> list[int]:
        """The words of the messages with gradients for this rank, by the rank of the group that
        sends them."""
    @property
    def is_whole(self) -> bool:
        """Returns whether every rank of the group holds the same elements of each tensor. Then each
        rank needs the whole parts of the others, which have the same number of words."""
    @property
    def part_words(self) -> int:
        """The words of the part of the parameters that this rank pulls."""
    @property
    def given_words(self) -> list[int]:
        """The words of this rank's messages with parameters, by the rank of the group to which they
        are sent, unless :attr:`is_whole`."""
    @property
    def taken_words(self) -> list[int]:
        """The words of the messages with parameters for this rank, by the rank of the group that
        sends them."""
    def pack(self, gradients: Sequence[Array | None], into: Array) -> None:
        """Writes this rank's messages with gradients, one after the other. ``gradients``: of each
        tensor, or None if this rank has none."""
    def pack_part(self, part: Array, into: Array) -> None:
        """Writes this rank's messages with parameters, one after the other, unless
        :attr:`is_whole`. ``part``: those that this rank has pulled."""
    def place(self, messages: Array, arrays: Sequence[Array]) -> None:
        """Copies the parameters in the messages from all ranks to the tensors."""

@final
class OpenAttempt:
    """The attempt at a step to which pushes belong."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The epoch, the step, and the number of the attempt in this epoch."""
    def reach_epoch(self, epoch: int) -> None:
        """Waits until this rank knows of the epoch, of which another rank has learned first. An
        epoch after that of the attempt ends it with :class:`~zeroshard.StepAbortedError`."""

@final
class Job:
    """One rank's lease on a job."""

    @property
    def name(self) -> str: ...
    @property
    def successor_name(self) -> str:
        """The name of the job that takes over from this one: ``name.1`` after ``name``."""
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int | None:
        """The version in the coordinator's last message. None before the initial parameters are
        complete."""
    @property
    def restored(self) -> tuple[int, int] | None:
        """The job's last return to a checkpoint: the first epoch after it, and the version of the
        checkpoint."""
    def batch(self, step: int) -> int:
        """Returns the number of the batch that a step uses."""
    def uploads(self, tensor: int) -> bool:
        """Returns whether this rank uploads its box of the tensor. Only one of several replicas
        does."""
    def replaces(self, tensor: int) -> bool:
        """Returns whether this rank pushes new values of its box of the tensor."""
    def rounds(self, tensor: int) -> bool:
        """Returns whether a fetch without a ``part`` rounds the tensor, because the encoding of
        parameters has fewer bits than the tensor."""
    def initialise(
        self,
        arrays: Sequence[tuple[int, Array]],
        *,
        part: str = "",
        applied: tuple[int, Sequence[float]] = ...,
        label: str | None = None,
    ) -> None:
        """Uploads initial parameters (``part=""``), or before them one optimizer state tensor each.

        Skips tensors that another rank uploads. ``applied`` is the number of steps that were
        applied to the state, and the values of the optimizer's ``scalar_state`` after them; by
        default ``(0, ())``. With a ``label``, a long upload shows a progress bar.
        """
    def keep(self, tensors: Sequence[int], *, applied: tuple[int, Sequence[float]] = ...) -> None:
        """States that this rank uploads nothing for these tensors, because the servers keep the
        values that they have copied from the job's predecessor. ``applied`` is as in
        :meth:`initialise`, if the state is fresh."""
    def initialised(self) -> int:
        """Waits until all servers have the initial parameters of all ranks. Returns the version.

        If a rank leaves before this point, its uploads are dropped.
        """
    def gradient(self, step: int, tensor: int, array: Array) -> None:
        """Adds a gradient to the current bucket. Sends the bucket when it is full. Does not wait
        for the transfer."""
    def push(self, step: int, arrays: Sequence[tuple[int, Array]]) -> None:
        """Starts to send these gradients as one bucket. Does not wait for the transfer."""
    def exchange(self, tensors: Sequence[int]) -> Exchange:
        """The division of these tensors among the ranks of the group."""
    def open_attempt(self, step: int) -> OpenAttempt:
        """The attempt to which pushes of this rank belong now."""
    def push_sums(self, attempt: OpenAttempt, exchange: Exchange, received: Array) -> None:
        """Starts to send the sums of the gradients in the messages for this rank. Does nothing if
        the attempt has been given up."""
    def pull_pieces(self, version: int, exchange: Exchange, part: Array) -> Transfer:
        """Starts to fill ``part`` with the parameters that this rank pulls for its group."""
    def absent(self, step: int, tensors: Sequence[int]) -> None:
        """Reports that this rank has no gradient for these tensors. Does not wait."""
    def replace(self, step: int, arrays: Sequence[tuple[int, Array]]) -> None:
        """Starts to send new values of tensors. Called by the ranks that upload them.

        Parameters that train have these values before ``step`` is applied, and other tensors after
        it.
        """
    def flush(self) -> None:
        """Sends the current bucket and waits until all transfers have ended."""
    def forget(self) -> None:
        """Drops the current bucket and cancels running transfers. Gradients sent afterwards belong
        to the attempt that is open then.

        Without this call all gradients of a step belong to the attempt that was open when the first
        one was sent, and fail with :class:`~zeroshard.errors.StepAbortedError` if it has ended.
        """
    def discard(self, step: int) -> None:
        """Does what :meth:`forget` does, and makes the servers drop the gradients of the open
        attempt at ``step``. Every rank must call it.

        Raises :class:`~zeroshard.errors.StepAbortedError` if the servers have already dropped them,
        :class:`~zeroshard.errors.StepMismatchError` if the step was already decided, and
        :class:`~zeroshard.errors.DisagreementError` if another rank commits the attempt.
        """
    def rest(self, step: int, excluded: bool) -> Rest:
        """Flushes, and contributes nothing more to ``step`` and later ones, until every rank rests.

        Gradients that were sent for ``step`` count in it. ``excluded``: mean gradients are over the
        ranks that do not rest. It must be the same on every rank.
        """
    def reduce(
        self, step: int, loss_scale: float = 1.0
    ) -> tuple[list[float], list[int], list[int]]:
        """Flushes, waits until every rank has flushed, and returns the norm of each tensor's mean
        gradient, the ranks that rest, and the tensors of which no rank has a gradient."""
    def gradient_sums(self, step: int, arrays: Sequence[tuple[int, Array]]) -> None:
        """Fetches the sums over the ranks of the gradients of tensors in the open attempt, as f32.
        Waits until every rank has flushed."""
    def divisor(self, tensor: int) -> int:
        """The number of ranks whose gradients of a tensor are averaged."""
    def commit(
        self,
        step: int,
        groups: Sequence[_Group],
        *,
        loss_scale: float = 1.0,
        max_norm: float | None = None,
        gradient_factors: Sequence[float] | None = None,
        written: Sequence[int] | None = None,
        targets: Sequence[tuple[int, Array]] | None = None,
        user_data: bytes | None = None,
        user_data_follows: bool = False,
        loss: float | None = None,
    ) -> Report:
        """Flushes, commits this rank's contribution and waits until the step is decided.

        ``gradient_factors``: a factor for the mean gradient of each tensor; None: all are 1.
        ``written``: for each tensor, the hash of the values that the program has written to it, or
        0; None: it has written none.
        ``targets`` receive the parameters of the new version.
        ``user_data``: data of this rank for a checkpoint of the new version, at most 16 MiB.
        ``user_data_follows``: this rank sends that data after the step.
        ``loss``: that of this rank.
        """
    def pull(
        self, version: int, arrays: Sequence[tuple[int, Array]], *, part: str | None = None
    ) -> Transfer:
        """Starts to receive the parameters of ``version``, as soon as it is available.

        With a ``part`` the values are exact f32 numbers: ``""`` for the parameters, ``"master"``
        for the master weights, or the name of an optimizer state tensor.
        """
    def fetch(
        self,
        version: int,
        arrays: Sequence[tuple[int, Array]],
        *,
        part: str | None = None,
        label: str | None = None,
    ) -> None:
        """Pulls and waits. With a ``label``, a long transfer shows a progress bar."""
    def applied_steps(self, version: int) -> list[tuple[int, list[float]]]:
        """The number of steps that were applied to each tensor, and the values of the optimizer's
        ``scalar_state`` after them."""
    def send_user_data(self, version: int, user_data: bytes) -> None:
        """Sends the data of this rank for checkpoints of ``version``, which its last step made."""
    def save(self, version: int) -> int:
        """Waits until ``version``, which the last step made, is saved where the policy of the job
        says. Returns the size of the checkpoint in bytes."""
    def leave(self) -> Transfer:
        """Starts to leave the job in order."""

@final
class Transfer:
    """A running transfer. It is cancelled when this object is deleted."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def cancel(self) -> None:
        """Cancels it, and waits until it no longer writes to the memory. Its errors are ignored."""

@final
class Rest:
    """The rest of a rank. It is given up when this object is deleted."""

    def wait(self) -> tuple[int, int]:
        """Waits until every rank rests. Returns the open step, and the highest rank of those that
        took part in the last step.

        Raises :class:`~zeroshard.errors.StepAbortedError` or
        :class:`~zeroshard.errors.RankLeftError` if a rank was lost or has left.
        """

@final
class Report:
    """The result of a step."""

    @property
    def version(self) -> int: ...
    @property
    def applied(self) -> bool: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def clip_coefficient(self) -> float: ...
    @property
    def overflow(self) -> tuple[int, int | None] | None:
        """The first tensor with an inf or NaN gradient, and the lowest rank that sent one."""
    @property
    def resting(self) -> list[int]:
        """The ranks that rested, in order."""
    @property
    def spike(self) -> str | None:
        """The reason why the policy on spikes skipped the step, if it did. It completes the
        sentence "The step was skipped, because ..."."""
    @property
    def absent(self) -> list[tuple[int, int, bool]]:
        """The tensors without a gradient on some rank: tensor, lowest such rank, and whether no
        rank has one."""

@final
class Buckets:
    """Buckets of gradients, in forward order. A bucket is sent when all its gradients are ready, in
    reverse order."""

    def __new__(
        cls, tensors: Sequence[tuple[int, str]], limit_bytes: int, first_limit_bytes: int
    ) -> Buckets:
        """``tensors`` has the size in bytes and the dtype of each, in forward order."""
    @property
    def buckets(self) -> list[list[int]]: ...
    def ready(self, tensor: int) -> list[int]:
        """Marks a gradient as ready, and returns the tensors that can be sent now. Raises an error
        if the gradient is already marked."""
    def rest(self) -> list[int]:
        """The tensors that are not ready, in order."""
    def reset(self) -> None:
        """Marks all gradients as not ready."""

@final
class Schedule:
    """Prefetching: records the order in which units are used in one pass, and predicts the next."""

    def __new__(cls, sizes: Sequence[int], window: int) -> Schedule:
        """``sizes`` has the size of each unit in bytes. ``window`` is the number of bytes to
        prefetch; at least one unit is prefetched."""
    def use(self, unit: int) -> list[int]:
        """Records that ``unit`` is used now, and returns the units to prefetch, next first."""
    def restart(self) -> list[int]:
        """Begins a new pass, and returns the units that it is expected to use first."""
