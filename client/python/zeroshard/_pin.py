"""Readers: one version of a job's parameters, in a program that does not take part in the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from ._averages import by_part
from ._core.entry import Entry
from ._core.framework import Framework
from ._native import Array
from ._native import Pinned as _Pinned
from ._readers import cluster_at, full_name
from .errors import InvalidArgumentError

T = TypeVar("T")


class Pinned(Generic[T]):
    """One version of a job's parameters, which the shard servers keep while training goes on. They
    release it at the end of the ``with`` block, or at the time limit."""

    def __init__(
        self, framework: Framework[T], pinned: _Pinned, average: str | None = None
    ) -> None:
        """``average``: the average that is read instead of the parameters."""
        self._framework = framework
        self._pinned = pinned
        self._average = average
        self._tensors = {
            name: (index, shape, dtype, buffer)
            for index, (name, shape, dtype, buffer) in enumerate(pinned.tensors)
        }

    @property
    def version(self) -> int:
        """The number of steps after which the parameters had these values."""
        return self._pinned.version

    @property
    def names(self) -> list[str]:
        """The names of the job's tensors: parameters and buffers, as the model of the job has
        them."""
        return list(self._tensors)

    def __getitem__(self, name: str) -> T:
        """The tensor with this name, as float32 on the CPU. A buffer of another dtype is part of
        :meth:`load` only.

        Raises:
            InvalidArgumentError: the job has no such tensor.
        """
        self._check_name(name)
        index, shape, _, _ = self._tensors[name]
        host = self._framework.host(shape)
        self._pull([(index, self._framework.array(host))])
        return host

    def _pull(self, arrays: list[tuple[int, Array]]) -> None:
        """Fills arrays with parameters, or with the average of those that train."""
        if self._average is None:
            self._pinned.pull(arrays)
            return
        for some, part in by_part(arrays, self._pinned.trains, self._average, None):
            self._pinned.pull(some, part=part)

    def optimizer_state(self, name: str) -> dict[str, T | int]:
        """The optimizer state of the tensor with this name: its state tensors as float32 on the
        CPU, with the servers' names, and under ``"step"`` the number of steps that were applied to
        it. Empty if there were none, and for tensors that do not train.

        Raises:
            InvalidArgumentError: the job has no such tensor, or the version was pinned without
                ``optimizer_state=True``.
        """
        self._check_name(name)
        index, shape, _, _ = self._tensors[name]
        applied, _ = self._pinned.applied_steps()[index]
        if not applied:
            return {}
        found: dict[str, T | int] = {"step": applied}
        for part in self._pinned.state_names(index):
            host = self._framework.host(shape)
            self._pinned.pull([(index, self._framework.array(host))], part=part)
            found[part] = host
        return found

    def load(self, model: Any) -> None:
        """Gives the parameters and buffers of ``model`` the values of this version.

        The model has the names, shapes and dtypes of the job's model before it was wrapped. A job
        sends its buffers with each step if it has checkpoints, or with ``sync_buffers``; without
        them, buffers have their initial values.

        Raises:
            InvalidArgumentError: a tensor of the model is missing in the job, or has another shape.
                The model is unchanged.
            VersionGoneError: the time limit has passed, or the job was restored.
            UnavailableError: a server was lost.
        """
        framework = self._framework
        named = [(name, tensor, False) for name, tensor in framework.parameters(model)]
        named += [(name, tensor, True) for name, tensor in framework.buffers(model)]
        missing = [name for name, _, _ in named if name not in self._tensors]
        if missing:
            raise InvalidArgumentError(f"Missing key(s) in the job: {missing}")
        incoming = []
        for name, tensor, buffer in named:
            index, shape, _, _ = self._tensors[name]
            dtype = framework.dtype(tensor)
            raw = dtype is None or (buffer and dtype != "f32")
            entry = Entry(framework, name, tensor, False, buffer, 0, index, raw)
            if list(entry.wire_shape) != shape:
                raise InvalidArgumentError(
                    f"tensor {name!r} of the model has the shape {list(entry.wire_shape)}, and "
                    f"{shape} in the job; create the model with the sizes of the job's model"
                )
            incoming.append((index, entry.incoming()))
        self._pull([(index, memory.array) for index, memory in incoming])
        for _, memory in incoming:
            memory.finish()

    def _check_name(self, name: str) -> None:
        if name not in self._tensors:
            raise InvalidArgumentError(
                f"the job has no tensor {name!r}; its tensors are {self.names}"
            )

    def close(self) -> None:
        """Releases the version."""
        self._pinned.close()

    def __enter__(self) -> Pinned[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Kept:
    """What a pin keeps."""

    version: int | None
    tensors: Sequence[str] | None
    optimizer_state: bool
    average: str | None
    seconds: float


def pin(
    framework: Framework[T], job: str, kept: Kept, address: str | None, token: str | None
) -> Pinned[T]:
    cluster = cluster_at(address, token)
    pinned = cluster.pin(
        full_name(cluster, job),
        version=kept.version,
        tensors=None if kept.tensors is None else list(kept.tensors),
        optimizer_state=kept.optimizer_state,
        averages=None if kept.average is None else [kept.average],
        seconds=kept.seconds,
    )
    return Pinned(framework, pinned, kept.average)
