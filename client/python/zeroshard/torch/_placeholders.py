"""State dicts without the values that are on the servers, for those who write them to a file one
tensor after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._core.entry import Entry
from .._core.sharding import Sharding
from .._native import Box
from . import _conversion
from ._one_version import OneVersion
from ._shards import read_parameters


class Placeholders:
    """Tensors in host memory that stand for values on the servers. Nothing is written to them, so
    that the system gives them addresses and no memory."""

    def __init__(self, sharding: Sharding[Tensor], version: OneVersion) -> None:
        self.sharding = sharding
        self.version = version
        #: By the address of its memory: the tensor, and what reads its values.
        self._tensors: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        #: Those of parameters, by the id of the parameter.
        self._of_parameters: dict[int, Tensor] = {}

    def of_parameter(self, entry: Entry[Tensor]) -> Tensor:
        """The placeholder of a whole parameter."""
        job, key, fetch = self.sharding.job, id(entry.tensor), self.version.fetch

        def read() -> Tensor:
            if isinstance(entry.tensor, DTensor):
                host = job.framework.host(entry.shape)
                whole = job.framework.array(host, Box.whole(entry.shape))
                fetch([(entry.index, whole)], "")
                return host.to(entry.tensor.dtype)
            return read_parameters(job, [entry], fetch, None, torch.device("cpu"))[key]

        if key not in self._of_parameters:
            self._of_parameters[key] = self._add(entry.shape, entry.tensor.dtype, read)
        return self._of_parameters[key]

    def of_state(self, entry: Entry[Tensor], name: str) -> Tensor:
        """The placeholder of a whole state tensor of the optimizer."""
        framework = self.sharding.job.framework
        box = _conversion.state_box(name, Box.whole(entry.shape), entry.shape)

        def read() -> Tensor:
            host = framework.host(box.size)
            self.version.fetch([(entry.index, framework.array(host, box))], name)
            return host

        return self._add(box.size, torch.float32, read)

    def read_slot(self, entry: Entry[Tensor]) -> Tensor:
        """The values of a tensor that the servers keep for an optimizer that runs on the ranks."""
        framework = self.sharding.job.framework
        host = torch.empty(entry.shape, dtype=entry.tensor.dtype, device="cpu")
        incoming = framework.incoming_words(host) if entry.raw else framework.incoming(host)
        self.version.fetch([(entry.index, incoming.array)], "")
        incoming.finish()
        return host

    def of_slot(self, entry: Entry[Tensor]) -> Tensor:
        """The placeholder of such a tensor."""
        return self._add(entry.shape, entry.tensor.dtype, lambda: self.read_slot(entry))

    def values(self, tensor: Tensor) -> Tensor:
        """What is to be written for a tensor of a state dict: its own values, or those on the
        servers, for which it stands."""
        _, read = self._tensors.get(tensor.data_ptr(), (None, None))
        return tensor if read is None else read()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._tensors

    def _add(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if tensor.numel():
            self._tensors[tensor.data_ptr()] = tensor, read
        return tensor


class _Placing(threading.local):
    """What this thread makes state dicts with."""

    current: Placeholders | None = None


_placing = _Placing()


@contextlib.contextmanager
def placing(sharding: Sharding[Tensor], version: OneVersion) -> Iterator[Placeholders]:
    """A context in which the state dicts of a model and its optimizer have placeholders for what
    the servers have at a version."""
    before, _placing.current = _placing.current, Placeholders(sharding, version)
    try:
        yield _placing.current
    finally:
        _placing.current = before


def placed(sharding: Sharding[Tensor]) -> Placeholders | None:
    """The placeholders that state dicts of this thread get now, if they are to get some."""
    current = _placing.current
    return current if current is not None and current.sharding is sharding else None
