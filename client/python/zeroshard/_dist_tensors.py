"""Adapter interface: the tensors of a ``DistModel``, which may be distributed over a mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from .errors import InvalidArgumentError

T = TypeVar("T")


class DistTensors(ABC, Generic[T]):
    """What is done with inputs, outputs and losses before and after a model computes."""

    # ---- implemented by each framework

    #: The name of the class of tensors, such as ``torch.Tensor``.
    name: str

    @abstractmethod
    def is_tensor(self, value: object) -> bool:
        """Returns whether the value is a tensor."""

    @abstractmethod
    def mesh_of(self, value: T) -> Any | None:
        """The mesh of a tensor. None if it is not distributed."""

    @abstractmethod
    def mesh_text(self, mesh: Any) -> str:
        """The text of a mesh in errors."""

    @abstractmethod
    def shards(self, value: T) -> Sequence[tuple[int, int]]:
        """The number of shards and the tensor dimension, for each mesh dimension that shards the
        tensor."""

    @abstractmethod
    def local(self, value: T) -> T:
        """The local tensor, with partial values reduced."""

    @abstractmethod
    def local_shape(self, value: T) -> Sequence[int]:
        """The shape of the local tensor."""

    @abstractmethod
    def whole(self, value: T) -> T:
        """The whole tensor. A plain tensor is returned as it is."""

    @abstractmethod
    def replicated(self, value: T, mesh: Any) -> T:
        """The whole tensor on every rank of the mesh."""

    @abstractmethod
    def assembled_as(self, part: T, sharded: T) -> T:
        """The distributed tensor with the local tensor ``part`` and the layout of ``sharded``,
        which is sharded on dimension 0."""

    # ---- the same in all frameworks

    def common_mesh(self, layer: Any) -> Any | None:
        """The mesh of a layer's distributed parameters. None if it has none."""
        found: Any | None = None
        for name, parameter in layer.named_parameters():
            mesh = self.mesh_of(parameter)
            if mesh is not None and found is not None and mesh != found:
                raise InvalidArgumentError(
                    f"parameter {name!r} is on the mesh {self.mesh_text(mesh)}, other parameters "
                    f"are on {self.mesh_text(found)}; all parameters must be on one mesh"
                )
            found = found if mesh is None else mesh
        return found

    def placed(self, value: T, mesh: Any | None) -> T:
        """The tensor as a model on a mesh needs it; None: as a model that is not distributed needs
        it, which is this rank's part of the batch, or all of it."""
        own = self.mesh_of(value)
        if mesh is not None:
            return value if own == mesh else self.replicated(value, mesh)
        return value if own is None else self._local_input(value)

    def _local_input(self, value: Any) -> T:
        for parts, dim in self.shards(value):
            if value.shape[dim] % parts:
                raise InvalidArgumentError(
                    f"a batch has {value.shape[dim]} samples; "
                    f"it must be divisible by the {parts} ranks, whose losses are averaged"
                )
        return self.local(value)

    def is_distributed(self, value: object) -> bool:
        """Returns whether the value is a tensor that is distributed over a mesh."""
        return self.is_tensor(value) and self.mesh_of(value) is not None  # type: ignore[arg-type]

    def whole_output(self, output: Any, inputs: Sequence[Any]) -> Any:
        """The whole output on every rank, if the inputs were distributed over the batch."""
        if not self.is_tensor(output):
            return output
        if self.mesh_of(output) is None:
            sharded = next(
                (value for value in inputs if any(dim == 0 for _, dim in self.shards(value))), None
            )
            if sharded is None or not output.shape:
                return output
            if output.shape[0] != self.local_shape(sharded)[0]:
                return output
            output = self.assembled_as(output, sharded)
        return self.whole(output)
