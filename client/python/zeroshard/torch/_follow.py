"""Follows a job while it trains, and receives what each step has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import _follow
from .._follow import Access, FollowedVersion, Versions
from .._native import Array
from ._dtensor import local
from ._framework import TORCH

__all__ = ["FollowedVersion", "Versions", "follow"]

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class _Host:
    """Host memory, and how it gets to the tensor."""

    def __init__(self, tensor: Tensor, target: Tensor | None, raw: bool = False) -> None:
        """``target``: the tensor to which :meth:`finish` copies the memory. None: it is the memory
        of the tensor."""
        self.tensor = tensor
        self._target = target
        self._is_raw = raw

    def finish(self) -> None:
        host, target = self.tensor, self._target
        if target is None:
            return
        if self._is_raw:
            values = host.view(torch.uint8)[: TORCH.nbytes(target)]
            host = values.view(target.dtype).reshape(target.shape)
        target.copy_(host)


class _Gathered:
    """The changed elements of a tensor, in host memory. The tensor may be on a device."""

    def __init__(self, tensor: Tensor, positions: bytes) -> None:
        self._tensor = tensor
        # A view, or a copy of a tensor that is not contiguous.
        self._flat = tensor.reshape(-1)
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
        self._flat.index_copy_(0, self._positions, self._changed.to(self._flat.device))
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


class _TorchAccess(Access[Tensor]):
    gathers = True

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor).detach()

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_contiguous()

    def host(self, tensor: Tensor, *, with_values: bool) -> _Host:
        if self.is_host(tensor):
            return _Host(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if with_values:
            host.copy_(tensor)
        return _Host(host, tensor)

    def host_words(self, tensor: Tensor) -> _Host:
        host = torch.zeros(TORCH.words(tensor), dtype=torch.float32, device="cpu")
        source = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        host.view(torch.uint8)[: source.numel()] = source
        return _Host(host, tensor, raw=True)

    def gather(self, tensor: Tensor, positions: bytes) -> _Gathered:
        return _Gathered(tensor, positions)


_ACCESS = _TorchAccess(TORCH)


def follow(
    job: str,
    *,
    dtype: torch.dtype = torch.float32,
    tensors: Sequence[str] | None = None,
    boxes: Mapping[str, Sequence[tuple[int, int]]] | None = None,
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
        tensors: the names of the tensors to follow; by default all parameters and buffers of the
            job's model.
        boxes: the parts to follow of tensors of which your model has only a part, by name: the
            first index and the number of indices along each dimension. Other tensors are followed
            as a whole.
        seconds: how long to wait for a version.
        mirror: the ``host:port`` of a mirror (``zsctl mirror``) that sends the values instead of
            the servers.
        address: the coordinator's ``host:port``; by default the cluster of ``zeroshard.init``, or
            that of ``ZEROSHARD_ADDRESS``.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default.

    Raises:
        InvalidArgumentError: no job or several jobs have this name, or a tensor or the dtype is
            unknown, or a box does not fit its tensor, or ``mirror`` is not an address, or it is
            combined with boxes.
    """
    followed = _follow.Followed(dtype, tensors, boxes, seconds, mirror)
    return _follow.follow(_ACCESS, _DTYPES, job, followed, address, token)
