"""The Rust half of the package: clusters, jobs, transfers.

Everything here releases the interpreter while it waits, ends at a deadline, and can be interrupted
by Ctrl-C. Errors are those of :mod:`zeroshard.errors`. Tensors are known by their position in the
job's manifest.
"""

from collections.abc import Mapping, Sequence
from typing import final

__all__ = [
    "Array",
    "Buckets",
    "Cluster",
    "Job",
    "Mesh",
    "Report",
    "Schedule",
    "TensorSpec",
    "Transfer",
    "__version__",
]
__version__: str

#: A box of a tensor: first index, and number of indices, along each dimension.
type _Area = tuple[Sequence[int], Sequence[int]]

#: A parameter group: the optimizer's name, and its hyperparameters by torch's names (flags are 0 or
#: 1).
type _Group = tuple[str, Mapping[str, float]]

@final
class Array:
    """Contiguous host memory of a tensor, lent to transfers; ``owner`` is kept alive for as long as
    they need it.

    ``dtype`` is ``"f32"``, ``"bf16"`` or ``"f16"``. Any other kind of element travels as raw words,
    as ``"f32"`` (only where nothing computes with it: buffers). A pull fills it with ``area`` of
    its tensor, row-major; without one with what the rank has of the tensor by its layout, which is
    all of it if there is none.
    """

    def __new__(
        cls, address: int, numel: int, dtype: str, owner: object, area: _Area | None = None
    ) -> Array: ...
    @property
    def numel(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Mesh:
    """Ranks in an array with named dimensions.

    How a tensor lies on it is said by one placement for each dimension: ``"shard:0"`` (cut along
    the tensor's dimension 0, like ``torch.chunk``), ``"replicate"``, ``"sum"`` or ``"avg"`` (what
    the ranks have is yet to be summed or averaged), ``"max"``.
    """

    def __new__(cls, shape: Sequence[int], ranks: Sequence[int], names: Sequence[str]) -> Mesh: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def ranks(self) -> list[int]:
        """Row-major."""
    @property
    def names(self) -> list[str]: ...
    def coordinate(self, rank: int) -> list[int] | None: ...
    def group(self, rank: int, dim: int) -> list[int] | None:
        """The ranks along a dimension through ``rank``."""
    def describe(self, rank: int) -> str:
        """Such as ``rank 3 (dp 1, tp 1)``."""
    def local_box(
        self, shape: Sequence[int], placements: Sequence[str], rank: int
    ) -> tuple[list[int], list[int]] | None:
        """What ``rank`` has of a tensor: first index, and number of indices, along each
        dimension."""

@final
class TensorSpec:
    """One tensor of a job's manifest.

    ``layout`` says how its gradient, and what it begins with, come from the ranks: the index of one
    of the job's meshes, and a placement for each of its dimensions. Of what is replicated the first
    rank contributes; each piece of what is cut comes from those who have it; what is partial is
    summed, or averaged. Without a layout every rank contributes all of it, the mean is taken, and
    rank 0 uploads it.
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
    ) -> TensorSpec: ...
    @property
    def name(self) -> str: ...

@final
class Cluster:
    """A cluster of shard servers: one that runs elsewhere, or one inside this process."""

    @staticmethod
    def connect(
        address: str,
        *,
        token: str | None = None,
        wire: str = "f32",
        chunk_bytes: int = 1048576,
        deadline: float = 600.0,
    ) -> Cluster: ...
    @staticmethod
    def embedded(
        shards: int = 1,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        wire: str = "f32",
        chunk_bytes: int = 1048576,
        deadline: float = 600.0,
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
    ) -> None:
        """Makes the job, unless it is there already with the same description.

        The coordinator deletes it when every rank has left in order, or when no rank has held it
        for ``idle_timeout`` seconds; with None it is kept until :meth:`delete_job`.
        """
    def join(self, name: str, rank: int, *, bucket_numel: int = 8388608) -> Job: ...
    def delete_job(self, name: str) -> None: ...
    def state_hash(self, name: str) -> str: ...
    def traffic(self) -> tuple[int, int]:
        """Payload bytes pulled and pushed so far."""
    def close(self) -> None:
        """Stops an embedded cluster, and waits for it."""

@final
class Job:
    """One rank's lease on a job."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int | None: ...
    def uploads(self, tensor: int) -> bool:
        """Whether this rank uploads what it has of a tensor, or another that has the same."""
    def initialise(
        self,
        arrays: Sequence[tuple[int, Array]],
        *,
        part: str = "",
        applied: int = 0,
        label: str | None = None,
    ) -> None:
        """Uploads initial parameters (``part=""``), or before them a state tensor of the optimizer.

        What others upload by the tensors' layouts (without one: all but rank 0) is left out.

        ``applied`` is how many steps the state has seen. With a ``label`` long work shows a
        progress bar.
        """
    def initialised(self) -> int:
        """Waits until the initial parameters of all ranks are complete on all servers; the version
        then.

        A rank that uploads and leaves before that takes along what it has uploaded.
        """
    def gradient(self, step: int, tensor: int, array: Array) -> None:
        """Puts a gradient into the open bucket; a full bucket starts on its way. Returns at
        once."""
    def push(self, step: int, arrays: Sequence[tuple[int, Array]]) -> None:
        """Starts to send these gradients as one bucket. Returns at once."""
    def absent(self, step: int, tensors: Sequence[int]) -> None:
        """Says that this rank has no gradients for these tensors. Returns at once."""
    def buffers(self, step: int, arrays: Sequence[tuple[int, Array]]) -> None:
        """Starts to send the buffers as they are after ``step``; by the ranks that upload them."""
    def flush(self) -> None:
        """Sends the open bucket, and waits until everything sent has arrived."""
    def forget(self) -> None:
        """Drops the open bucket and what is on its way. What is sent next belongs to the attempt
        that is open then.

        Until then everything of the step belongs to the attempt that its first gradient was sent
        in, and once that has ended it fails with :class:`~zeroshard.errors.StepAborted`.
        """
    def discard(self, step: int) -> None:
        """Forgets, and has the servers drop what came of the open attempt at ``step``. Every rank
        must do the same.

        Raises :class:`~zeroshard.errors.StepAborted` where the servers have dropped it already,
        :class:`~zeroshard.errors.StepMismatch` where the step was decided, and
        :class:`~zeroshard.errors.Disagreement` where another rank commits the attempt.
        """
    def reduce(self, step: int, loss_scale: float = 1.0) -> float:
        """The global norm of the mean gradient, once every rank has flushed. Flushes first."""
    def commit(
        self,
        step: int,
        groups: Sequence[_Group],
        *,
        loss_scale: float = 1.0,
        max_norm: float | None = None,
        targets: Sequence[tuple[int, Array]] | None = None,
    ) -> Report:
        """Flushes, says that this rank's part of the step is done, and waits for the decision.

        ``targets`` are filled with the parameters that the step makes.
        """
    def pull(
        self, version: int, arrays: Sequence[tuple[int, Array]], *, part: str | None = None
    ) -> Transfer:
        """Starts to fill the arrays with the parameters at ``version``, which is waited for.

        With a ``part`` exactly, in f32: ``""`` the parameters, ``"master"``, or a state tensor of
        the optimizer.
        """
    def fetch(
        self,
        version: int,
        arrays: Sequence[tuple[int, Array]],
        *,
        part: str | None = None,
        label: str | None = None,
    ) -> None:
        """As :meth:`pull`, and waits; with a ``label`` long work shows a progress bar."""
    def applied_steps(self, version: int) -> list[int]:
        """How many steps each tensor has been updated by."""
    def leave(self) -> Transfer:
        """Starts to leave the job, done."""

@final
class Transfer:
    """Work that is under way. It stops when nobody has this any more."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...

@final
class Report:
    """What became of a step."""

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
        """The first tensor with inf or NaN, and the lowest rank that sent one."""
    @property
    def absent(self) -> list[tuple[int, int, bool]]:
        """Tensors without a gradient on some rank: tensor, lowest such rank, whether on every
        rank."""

@final
class Buckets:
    """Which gradients travel together, and when: buckets are sent whole, in reverse order."""

    def __new__(
        cls, tensors: Sequence[tuple[int, str]], limit_bytes: int, first_limit_bytes: int
    ) -> Buckets:
        """``tensors``: bytes and dtype of each, in forward order."""
    @property
    def buckets(self) -> list[list[int]]: ...
    def ready(self, tensor: int) -> list[int]:
        """Marks a gradient as complete; the tensors that can be sent now. Twice in a round: an
        error."""
    def rest(self) -> list[int]:
        """The tensors that are not ready, in order."""
    def reset(self) -> None:
        """Begins the next round."""

@final
class Schedule:
    """The order in which units are used, learned from the last pass, and what to fetch ahead."""

    def __new__(cls, sizes: Sequence[int], window: int) -> Schedule:
        """``sizes``: bytes of each unit; ``window``: bytes that may be fetched ahead (one unit
        always may)."""
    def use(self, unit: int) -> list[int]:
        """Notes that ``unit`` is used now; the units to have ready next, nearest first."""
    def restart(self) -> list[int]:
        """A new pass begins; the units that it probably starts with."""
