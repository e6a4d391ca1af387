"""Followers: programs that receive what each step of a job has changed, and apply it to a model of
their own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ._core.framework import Framework
from ._native import Array, Box, Follower
from ._native import FollowedVersion as _Received
from ._readers import cluster_at, full_name
from .errors import InvalidArgumentError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: The job's tensors that no model has: parameters that only an optimizer has, among them the
#: statistics of Paddle's batch norms, and the state of optimizers that run on the ranks.
_OF_OPTIMIZERS = re.compile(r"optimizer\.\d+\.\d+|optimizer groups/.*|optimizer/.*")

#: The names of the dtypes in both frameworks.
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Host(Protocol[T_co]):
    """Host memory that transfers read and write in place of a tensor, or its own memory."""

    @property
    def tensor(self) -> T_co:
        """The memory as a tensor."""

    def finish(self) -> None:
        """Copies the memory to the tensor, if they are not the same."""


class Gathered(Protocol):
    """The changed elements of a tensor, in host memory."""

    @property
    def array(self) -> Array: ...

    def finish(self) -> None:
        """Writes the new values to the tensor."""


class Access(ABC, Generic[T]):
    """Adapter interface: what followers need from PyTorch or Paddle in addition to
    :class:`~zeroshard._core.framework.Framework`."""

    #: True if :meth:`gather` is there. If not, transfers copy the tensors of a device as a whole.
    gathers: ClassVar[bool] = False

    def __init__(self, framework: Framework[T]) -> None:
        self.framework = framework

    @abstractmethod
    def local(self, tensor: T) -> T:
        """The elements of the tensor that this process holds, without their gradient."""

    @abstractmethod
    def is_host(self, tensor: T) -> bool:
        """Returns whether transfers can use the tensor's own memory."""

    @abstractmethod
    def host(self, tensor: T, *, with_values: bool) -> Host[T]:
        """Returns host memory of the shape of a local tensor, with its values if they are
        needed."""

    @abstractmethod
    def host_words(self, tensor: T) -> Host[T]:
        """Returns a copy of the raw memory of a local tensor, as float32."""

    def gather(self, tensor: T, positions: bytes) -> Gathered:
        """Copies the elements at these positions (int64) of the flattened tensor to the host."""
        raise NotImplementedError


class _Values(Generic[T]):
    """A tensor of the model."""

    def __init__(self, access: Access[T], name: str, tensor: T, buffer: bool, dtype: str) -> None:
        framework = access.framework
        self._access = access
        self.tensor = access.local(tensor)
        own = framework.dtype(self.tensor)
        self._is_raw = buffer and own != "f32"
        if not self._is_raw and own != dtype:
            found = framework.dtype_text(self.tensor)
            raise InvalidArgumentError(
                f"tensor {name!r} of the model has the dtype {found}, and the follower receives "
                f"{_DTYPES[dtype]}; follow the job with dtype={found}, or convert the model"
            )
        self._host: Host[T] | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor, or of its box, in the job."""
        framework = self._access.framework
        if self._is_raw:
            return [framework.words(self.tensor)]
        return list(framework.local_shape(self.tensor))

    @property
    def is_near(self) -> bool:
        """True if transfers use the tensor's own memory, or a copy that is small."""
        return self._is_raw or self._access.is_host(self.tensor)

    def host(self, with_values: bool) -> Array:
        """Returns host memory for the whole tensor, with its values if they are needed."""
        return self._access.framework.array(self._host_tensor(with_values))

    def _host_tensor(self, with_values: bool) -> T:
        access = self._access
        self._host = (
            access.host_words(self.tensor)
            if self._is_raw
            else access.host(self.tensor, with_values=with_values)
        )
        return self._host.tensor

    def gather(self, positions: bytes) -> Gathered:
        """Returns the elements at these positions in host memory."""
        tensor = self._host_tensor(True) if self.is_near else self.tensor
        return self._access.gather(tensor, positions)

    def finish(self) -> None:
        """Copies the host memory to the tensor, if they are not the same."""
        host, self._host = self._host, None
        if host is not None:
            host.finish()


class FollowedVersion:
    """A version of a job that a follower has received but not written to a model yet."""

    def __init__(self, access: Access[Any], follower: Follower, received: _Received) -> None:
        self._access = access
        self._follower = follower
        self._received = received

    @property
    def number(self) -> int:
        """The number of steps after which the parameters had these values."""
        return self._received.number

    @property
    def line(self) -> int:
        """The line of the version, which grows when the job returns to a checkpoint."""
        return self._received.line

    @property
    def bytes(self) -> int:
        """The number of bytes received for this version. For a full copy it is 0 until you apply
        it."""
        return self._received.bytes

    @property
    def changed_fraction(self) -> float | None:
        """The fraction of all elements that differ from the model's earlier version. It is 1.0 for
        a full copy, and None until you apply a version that has only changes."""
        return self._received.changed_fraction

    @property
    def copied(self) -> str | None:
        """The reason for a full copy: ``"joined"``, ``"behind"``, ``"rewound"``, ``"differed"`` or
        ``"interrupted"``. None if the follower received only changes."""
        return self._received.copied

    def apply(self, model: Any) -> None:
        """Gives the parameters and buffers of ``model`` the values of this version, in place.

        The model must have the values of the version that you applied last. This method compares a
        hash of each slice with that of the servers. If your program has written to the model since,
        it fetches all values of the newest version, and :attr:`number` becomes the number of that
        version.

        If you follow a box of a tensor, the model's tensor has the shape of the box. A distributed
        tensor holds its local elements only, whose shape is then that of the box.

        Raises:
            InvalidArgumentError: the model lacks a followed tensor, or a tensor has another shape
                or dtype than in the job. The model is unchanged.
            UnavailableError: a full copy has failed, and the model has values of several versions.
                The next version is a full copy.
        """
        values = self._values(model)
        gathers = self._access.gathers and not all(of.is_near for of in values.values())
        if self.copied is None and gathers and self._apply_gathered(values):
            return
        arrays = [(index, of.host(self.copied is None)) for index, of in values.items()]
        self._received.apply(arrays)
        for of in values.values():
            of.finish()

    def _apply_gathered(self, values: dict[int, _Values[Any]]) -> bool:
        positions = {index: self._received.positions(index) or b"" for index in values}
        parts = {index: of.gather(positions[index]) for index, of in values.items()}
        if not self._received.apply_gathered([(index, of.array) for index, of in parts.items()]):
            return False
        for index, part in parts.items():
            part.finish()
            values[index].finish()
        return True

    def _values(self, model: Any) -> dict[int, _Values[Any]]:
        """Returns the model's tensors, by the index of the job's tensor that owns the storage."""
        followed = {
            name: (shape, dtype, owner) for name, shape, dtype, owner in self._follower.tensors
        }
        framework = self._access.framework
        named = [(name, tensor, False) for name, tensor in framework.parameters(model)]
        named += [(name, tensor, True) for name, tensor in framework.buffers(model)]
        values: dict[int, _Values[Any]] = {}
        for name, tensor, buffer in named:
            if name not in followed:
                continue
            shape, dtype, owner = followed[name]
            of = _Values(self._access, name, tensor, buffer, dtype)
            if of.shape != shape:
                raise InvalidArgumentError(
                    f"tensor {name!r} of the model has the shape {of.shape}, and the follower "
                    f"receives {shape}; create the model with the sizes of the job's model, or "
                    "follow the box of the tensor that it has"
                )
            values.setdefault(owner, of)
        missing = [name for name, (_, _, owner) in followed.items() if owner not in values]
        if missing:
            raise InvalidArgumentError(
                f"the model has no tensors {missing}; pass tensors=[...] with those that it has"
            )
        return values


class Versions:
    """An iterator over the versions of a job, as they appear."""

    def __init__(self, access: Access[Any], follower: Follower) -> None:
        self._access = access
        self._follower: Follower | None = follower

    def __iter__(self) -> Iterator[FollowedVersion]:
        return self

    def __next__(self) -> FollowedVersion:
        """Waits for a version after the last one, and returns the newest one.

        Raises:
            TimeoutError: no newer version appeared within ``seconds``.
            UnknownJobError: the job has been deleted.
        """
        follower = self._open()
        return FollowedVersion(self._access, follower, follower.next())

    @property
    def copies(self) -> dict[str, int]:
        """The number of applied full copies for each reason (:attr:`FollowedVersion.copied`)."""
        return self._open().copies()

    def _open(self) -> Follower:
        if self._follower is None:
            raise InvalidArgumentError("the follower is closed; read versions before that")
        return self._follower

    def __enter__(self) -> Versions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._follower = None


@dataclass(frozen=True)
class Followed:
    """What a program follows."""

    dtype: Any
    tensors: Sequence[str] | None
    boxes: Mapping[str, Sequence[tuple[int, int]]] | None
    seconds: float
    mirror: str | None


def follow(
    access: Access[Any],
    dtypes: Mapping[Any, str],
    job: str,
    followed: Followed,
    address: str | None,
    token: str | None,
) -> Versions:
    """``dtypes``: the dtypes of the framework that can be followed, with the names of the
    servers."""
    if followed.dtype not in dtypes:
        expected = ", ".join(str(of) for of in dtypes)
        raise InvalidArgumentError(f"dtype is {followed.dtype}; it must be one of {expected}")
    boxes = {name: _box(name, ranges) for name, ranges in (followed.boxes or {}).items()}
    cluster = cluster_at(address, token)
    name = full_name(cluster, job)

    def following(tensors: Sequence[str] | None) -> Follower:
        return cluster.follow(
            name,
            dtype=dtypes[followed.dtype],
            tensors=None if tensors is None else list(tensors),
            boxes=boxes,
            seconds=followed.seconds,
            mirror=followed.mirror,
        )

    follower = following(followed.tensors)
    if followed.tensors is None:
        names = [of for of, *_ in follower.tensors]
        of_models = [of for of in names if not _OF_OPTIMIZERS.fullmatch(of)]
        if of_models != names:
            follower = following(of_models)
    return Versions(access, follower)


def _box(name: str, ranges: Sequence[tuple[int, int]]) -> Box:
    try:
        offset, size = [of for of, _ in ranges], [of for _, of in ranges]
        return Box(offset, size)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the box of tensor {name!r} is {ranges!r}; it must have the first index and the "
            "number of indices along each dimension, such as [(0, 512), (1024, 1024)]"
        ) from error
