"""Follows a job while it trains, and receives what each step has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from .. import _follow
from .._follow import Access, FollowedVersion, Versions
from ._dtensor import local
from ._framework import PADDLE

__all__ = ["FollowedVersion", "Versions", "follow"]

_DTYPES = {paddle.float32: "f32", paddle.bfloat16: "bf16", paddle.float16: "f16"}


class _Host:
    """Host memory, and how it gets to the tensor."""

    def __init__(self, tensor: Any, target: Any | None, raw: bool = False) -> None:
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
            values = host.numpy().view(np.uint8)[: PADDLE.nbytes(target)]
            host = values.view(target.numpy().dtype).reshape(target.shape)
        Tensor.set_value(target, host)


class _PaddleAccess(Access[Tensor]):
    # Paddle cannot write single elements of every dtype on every device.
    gathers = False

    def local(self, tensor: Tensor) -> Any:
        return local(tensor).detach()

    def is_host(self, tensor: Tensor) -> bool:
        return bool(tensor.place.is_cpu_place() and tensor.is_contiguous())

    def host(self, tensor: Tensor, *, with_values: bool) -> _Host:
        if self.is_host(tensor):
            return _Host(tensor, None)
        host = (
            tensor.cpu().contiguous()
            if with_values
            else paddle.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        )
        return _Host(host, tensor)

    def host_words(self, tensor: Tensor) -> _Host:
        words = np.zeros(PADDLE.words(tensor), np.float32)
        source = tensor.numpy().reshape(-1).view(np.uint8)
        words.view(np.uint8)[: source.size] = source
        return _Host(paddle.to_tensor(words, place=paddle.CPUPlace()), tensor, raw=True)


_ACCESS = _PaddleAccess(PADDLE)


def follow(
    job: str,
    *,
    dtype: paddle.dtype = paddle.float32,
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

        with zeroshard.paddle.follow("train", dtype=paddle.bfloat16, address=...) as versions:
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
