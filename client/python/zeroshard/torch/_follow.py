"""Follows a job while it trains, and receives what each step has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from .._native import Array, Follower
from .._native import FollowedVersion as _Received
from .._readers import cluster_at, full_name
from ..errors import InvalidArgumentError
from ._framework import TORCH

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class _Values:
    """A tensor of the model, and the host memory that transfers read and write."""

    def __init__(self, name: str, tensor: Tensor, buffer: bool, dtype: str) -> None:
        self.tensor = tensor.detach()
        self._is_raw = buffer and tensor.dtype != torch.float32
        expected = tensor.dtype if self._is_raw else _DTYPES[dtype]
        if tensor.dtype != expected:
            raise InvalidArgumentError(
                f"tensor {name!r} of the model has the dtype {tensor.dtype}, and the follower "
                f"receives {expected}; follow the job with dtype={tensor.dtype}, or convert the "
                "model"
            )
        self._host: Tensor | None = None

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor in the job."""
        return [TORCH.words(self.tensor)] if self._is_raw else list(self.tensor.shape)

    @property
    def is_near(self) -> bool:
        """True if transfers use the tensor's own memory, or a copy that is small."""
        return self._is_raw or self._is_host

    @property
    def _is_host(self) -> bool:
        return self.tensor.device.type == "cpu" and self.tensor.is_contiguous()

    def host(self, with_values: bool) -> Array:
        """Returns the memory of :meth:`host_tensor`."""
        return TORCH.array(self.host_tensor(with_values))

    def host_tensor(self, with_values: bool) -> Tensor:
        """Returns the whole tensor in host memory: itself, or a copy, which has the values of the
        tensor if ``with_values`` is set."""
        if self._is_host and not self._is_raw:
            return self.tensor
        if self._is_raw:
            self._host = torch.zeros(TORCH.words(self.tensor), dtype=torch.float32, device="cpu")
            source = self.tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            self._host.view(torch.uint8)[: source.numel()] = source
        else:
            self._host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
            if with_values:
                self._host.copy_(self.tensor)
        return self._host

    def finish(self) -> None:
        """Copies the host memory to the tensor, if they are not the same."""
        host, self._host = self._host, None
        if host is None:
            return
        if self._is_raw:
            values = host.view(torch.uint8)[: TORCH.nbytes(self.tensor)]
            host = values.view(self.tensor.dtype).reshape(self.tensor.shape)
        self.tensor.copy_(host)


class _Gathered:
    """The changed elements of a tensor, in host memory. The tensor may be on a device."""

    def __init__(self, values: _Values, positions: bytes) -> None:
        self._tensor = values.tensor
        self._values = values if values.is_near else None
        if self._values is not None:
            self._flat = values.host_tensor(True).reshape(-1)
        else:
            # A view, or a copy of a tensor that is not contiguous.
            self._flat = self._tensor.reshape(-1)
        found = (
            torch.frombuffer(bytearray(positions), dtype=torch.int64)
            if positions  # torch refuses an empty buffer
            else torch.empty(0, dtype=torch.int64)
        )
        self._positions = found.to(self._flat.device)
        self._changed = self._flat[self._positions].cpu()

    @property
    def array(self) -> Array:
        return TORCH.array(self._changed)

    def finish(self) -> None:
        """Writes the new values to the tensor."""
        self._flat.index_copy_(0, self._positions, self._changed.to(self._flat.device))
        if self._values is not None:
            self._values.finish()
        elif not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


class FollowedVersion:
    """A version of a job that a follower has received but not written to a model yet."""

    def __init__(self, follower: Follower, received: _Received) -> None:
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

    def apply(self, model: nn.Module) -> None:
        """Gives the parameters and buffers of ``model`` the values of this version, in place.

        The model must have the values of the version that you applied last. This method checks them
        before it writes the first value. If your program has written to the model since, it fetches
        all values of the newest version, and :attr:`number` becomes the number of that version.

        Raises:
            InvalidArgumentError: the model lacks a followed tensor, or a tensor has another shape
                or dtype than in the job. The model is unchanged.
            UnavailableError: a full copy has failed, and the model has values of several versions.
                The next version is a full copy.
        """
        values = self._values(model)
        is_near = all(of.is_near for of in values.values())
        if self.copied is None and not is_near and self._apply_gathered(values):
            return
        arrays = [(index, of.host(self.copied is None)) for index, of in values.items()]
        self._received.apply(arrays)
        for of in values.values():
            of.finish()

    def _apply_gathered(self, values: dict[int, _Values]) -> bool:
        positions = {index: self._received.positions(index) or b"" for index in values}
        parts = {index: _Gathered(of, positions[index]) for index, of in values.items()}
        if not self._received.apply_gathered([(index, of.array) for index, of in parts.items()]):
            return False
        for part in parts.values():
            part.finish()
        return True

    def _values(self, model: nn.Module) -> dict[int, _Values]:
        """Returns the model's tensors, by the index of the job's tensor that owns the storage."""
        followed = {
            name: (shape, dtype, owner) for name, shape, dtype, owner in self._follower.tensors
        }
        named = [(name, tensor, False) for name, tensor in TORCH.parameters(model)]
        named += [(name, tensor, True) for name, tensor in TORCH.buffers(model)]
        values: dict[int, _Values] = {}
        for name, tensor, buffer in named:
            if name not in followed:
                continue
            shape, dtype, owner = followed[name]
            of = _Values(name, tensor, buffer, dtype)
            if of.shape != shape:
                raise InvalidArgumentError(
                    f"tensor {name!r} of the model has the shape {of.shape}, and {shape} in the "
                    "job; create the model with the sizes of the job's model"
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

    def __init__(self, follower: Follower) -> None:
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
        return FollowedVersion(follower, follower.next())

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


def follow(
    job: str,
    *,
    dtype: torch.dtype = torch.float32,
    tensors: Sequence[str] | None = None,
    seconds: float = 600.0,
    mirror: str | None = None,
    address: str | None = None,
    token: str | None = None,
) -> Versions:
    """Follows a job while it trains: your program receives what each step has changed, and applies
    it to a model of its own.

    Your program need not take part in the job. The first version is a full copy, and each later
    version is only a small part of one. If your program asks seldom, it skips versions and delays
    nobody::

        with zeroshard.torch.follow("train", dtype=torch.bfloat16, address=...) as versions:
            for version in versions:
                version.apply(model)
                generate(model)

    Args:
        job: the name of the job, or of its run (``zeroshard.init(name=...)``).
        dtype: the dtype of your model's parameters: float32, bfloat16 or float16. The servers round
            the parameters to it. Buffers have the dtype of the job's model.
        tensors: the names of the tensors to follow; by default all.
        seconds: how long to wait for a version.
        mirror: the ``host:port`` of a mirror (``zsctl mirror``) that sends the values instead of
            the servers.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Raises:
        InvalidArgumentError: no job or several jobs have this name, or a tensor or the dtype is
            unknown, or ``mirror`` is not an address.
    """
    names = {of: name for name, of in _DTYPES.items()}
    if dtype not in names:
        expected = ", ".join(str(of) for of in names)
        raise InvalidArgumentError(f"dtype is {dtype}; it must be one of {expected}")
    cluster = cluster_at(address, token)
    follower = cluster.follow(
        full_name(cluster, job),
        dtype=names[dtype],
        tensors=None if tensors is None else list(tensors),
        seconds=seconds,
        mirror=mirror,
    )
    return Versions(follower)
