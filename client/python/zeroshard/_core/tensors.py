"""Adapter interface: the framework's tensors, and the memory from and to which values are
transferred."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from .._native import Array, Box, Layout
from ..errors import InvalidArgumentError
from .layout import local_box

#: A tensor of the framework.
T = TypeVar("T")


class Incoming(Protocol):
    """Memory that receives the values of a tensor: the tensor's own, or a host buffer."""

    array: Array

    def finish(self) -> None:
        """Copies the buffer to the tensor, if there is one. Called after the transfer."""


class Tensors(ABC, Generic[T]):
    """The shapes and dtypes of tensors, and transfers of their values."""

    @abstractmethod
    def shape(self, tensor: T) -> tuple[int, ...]: ...

    def layout(self, tensor: T) -> Layout | None:
        """The tensor's layout on a mesh of ranks. None: this rank has the whole tensor."""
        return None

    def local_shape(self, tensor: T) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return self.shape(tensor)

    @abstractmethod
    def dtype(self, tensor: T) -> str | None:
        """``"f32"``, ``"bf16"`` or ``"f16"``; None if the servers do not support the dtype."""

    @abstractmethod
    def dtype_text(self, tensor: T) -> str:
        """The framework's own name of the dtype."""

    @abstractmethod
    def element_size(self, tensor: T) -> int:
        """Bytes per element."""

    def numel(self, tensor: T) -> int:
        """The number of elements of the local tensor."""
        return math.prod(self.local_shape(tensor))

    def largest_numel(self, tensor: T) -> int:
        """The number of elements of the largest local tensor of any rank. All ranks compute the
        same number."""
        layout = self.layout(tensor)
        if layout is None:
            return self.numel(tensor)
        # As in torch.chunk, no part is larger than the first.
        return local_box(layout, self.shape(tensor), layout.mesh.ranks[0]).numel

    def nbytes(self, tensor: T) -> int:
        """The number of bytes of the local tensor."""
        return self.numel(tensor) * self.element_size(tensor)

    def words(self, tensor: T) -> int:
        """The number of 4-byte words that hold the local tensor."""
        return math.ceil(self.nbytes(tensor) / 4)

    def dtype_of(self, what: str, tensor: T) -> str:
        """The dtype for the servers. Raises :class:`~zeroshard.InvalidArgumentError` if they do not
        support it."""
        dtype = self.dtype(tensor)
        if dtype is None:
            raise InvalidArgumentError(
                f"the dtype of {what} is {self.dtype_text(tensor)}; "
                "it must be float32, bfloat16 or float16"
            )
        return dtype

    # ---- the memory of local tensors, for transfers

    @abstractmethod
    def host(self, shape: Sequence[int]) -> T:
        """An uninitialised contiguous f32 tensor in host memory."""

    @abstractmethod
    def array(self, host: T, box: Box | None = None) -> Array:
        """The memory of a contiguous host tensor. ``box`` is the part of the fetched tensor that it
        receives."""

    @abstractmethod
    def zeros_like(self, tensor: T) -> T:
        """Contiguous zeros with the tensor's shape, dtype and device."""

    @abstractmethod
    def outgoing(self, tensor: T) -> Array:
        """The values of ``tensor`` for a push: its own memory, or a copy if it is not contiguous
        host memory.

        A copy from a device is ordered after the work on the current stream. Transfers wait for
        it, and the program must not change the tensor meanwhile.
        """

    @abstractmethod
    def incoming(self, tensor: T) -> Incoming:
        """Memory that receives the values of ``tensor``."""

    @abstractmethod
    def outgoing_words(self, tensor: T) -> Array:
        """The raw memory of a tensor of any dtype as :meth:`words` f32 words, for buffers that the
        servers only store."""

    @abstractmethod
    def incoming_words(self, tensor: T) -> Incoming:
        """Memory that receives the words of :meth:`outgoing_words`."""
