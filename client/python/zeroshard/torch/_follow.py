"""Follows a job while it trains: receives what each of its steps has changed."""

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
    """A tensor of the model and the host memory that transfers read and write."""

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
        """Returns whether transfers write to memory that is the tensor's own, or a small copy."""
        return self._is_raw or self._is_host

    @property
    def _is_host(self) -> bool:
        return self.tensor.device.type == "cpu" and self.tensor.is_contiguous()

    def host(self, with_values: bool) -> Array:
        """The memory of :meth:`host_tensor`."""
        return TORCH.array(self.host_tensor(with_values))

    def host_tensor(self, with_values: bool) -> Tensor:
        """The whole tensor in host memory: itself, or a copy. ``with_values``: the copy needs its
        values."""
        if self._is_host and not self._is_raw:
            return self.tensor
        if self._is_raw:
            self._host = torch.zeros(TORCH.words(self.tensor), dtype=torch.float32)
            source = self.tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            self._host.view(torch.uint8)[: source.numel()] = source
        else:
            self._host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
            if with_values:
                self._host.copy_(self.tensor)
        return self._host

    def finish(self) -> None:
        """Copies the host memory to the tensor, if it is a copy."""
        host, self._host = self._host, None
        if host is None:
            return
        if self._is_raw:
            values = host.view(torch.uint8)[: TORCH.nbytes(self.tensor)]
            host = values.view(self.tensor.dtype).reshape(self.tensor.shape)
        self.tensor.copy_(host)


class _Gathered:
    """The changed elements of a tensor, which may be on a device."""

    def __init__(self, values: _Values, positions: bytes) -> None:
        self._tensor = values.tensor
        self._values = values if values.is_near else None
        if self._values is not None:
            self._flat = values.host_tensor(True).reshape(-1)
        else:
            # A view, or a copy of a tensor that is not contiguous.
            self._flat = self._tensor.reshape(-1)
        found = torch.frombuffer(bytearray(positions), dtype=torch.int64) if positions else None
        found = torch.empty(0, dtype=torch.int64) if found is None else found
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
    """A version of a job that a follower has received, and not written to a model yet."""

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
        """The bytes that were received for the version. Of a full copy, 0 until it is applied."""
        return self._received.bytes

    @property
    def changed_fraction(self) -> float | None:
        """The fraction of all elements that differ from the version that the model had before: 1.0
        for a full copy, None for another version until it is applied."""
        return self._received.changed_fraction

    @property
    def copied(self) -> str | None:
        """The reason for a full copy: ``"joined"``, ``"behind"``, ``"rewound"``, ``"differed"`` or
        ``"interrupted"``. None if only changes were received."""
        return self._received.copied

    def apply(self, model: nn.Module) -> None:
        """Gives the parameters and buffers of ``model`` the values of this version, in place.

        The model must have the values of the version that was applied before: this is checked
        before the first value is written. If the program has written to the model meanwhile, all
        values of the newest version are fetched, and :attr:`number` is then its number.

        Raises:
            InvalidArgumentError: a tensor of the model is missing in the job, or has another shape
                or dtype; or the model is missing one that is followed. The model is unchanged.
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
        """The tensors of the model, by the index of the job's tensor that owns the storage."""
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
    """The versions of a job, as they are made."""

    def __init__(self, follower: Follower) -> None:
        self._follower: Follower | None = follower

    def __iter__(self) -> Iterator[FollowedVersion]:
        return self

    def __next__(self) -> FollowedVersion:
        """Waits for a version after the last one, and returns the newest one.

        Raises:
            TimeoutError: there was no version within ``seconds``.
            UnknownJobError: the job has been deleted.
        """
        follower = self._open()
        return FollowedVersion(follower, follower.next())

    @property
    def copies(self) -> dict[str, int]:
        """The number of full copies that were applied, for each reason
        (:attr:`FollowedVersion.copied`)."""
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
    address: str | None = None,
    token: str | None = None,
) -> Versions:
    """Follows a job: this program receives what each step has changed, and applies it to a model of
    its own, while training goes on.

    The program need not take part in the job. The first version is a full copy; afterwards a
    version takes a small part of it. A program that asks seldom skips versions, and delays
    nobody::

        with zeroshard.torch.follow("train", dtype=torch.bfloat16, address=...) as versions:
            for version in versions:
                version.apply(model)
                generate(model)

    Args:
        job: the name of the job, or of its run (``zeroshard.init(name=...)``).
        dtype: the dtype of the parameters of the model: float32, bfloat16 or float16. The servers
            round the parameters to it. Buffers have the dtype of the job's model.
        tensors: the names of the tensors to follow; by default all.
        seconds: the longest wait for a version.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Raises:
        InvalidArgumentError: no job, or more than one, has this name; an unknown tensor or dtype.
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
    )
    return Versions(follower)
