"""The common part of ``shard_dataloader`` in all frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

from .errors import InvalidArgumentError

#: A mesh of the framework.
M = TypeVar("M")

#: The mesh dimension over which batches are sharded, by name or index.
ShardDim = str | int | None


class ShardDataloaderBase(ABC, Generic[M]):
    """The result of ``shard_dataloader``. Iterate over it, or over the result of calling it."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        meshes: M | Sequence[M],
        shard_dims: ShardDim | Sequence[ShardDim] = None,
        input_keys: Sequence[str] | None = None,
        is_dataset_splitted: bool = False,
    ) -> None:
        """The arguments are those of ``shard_dataloader``."""
        several = list(meshes) if isinstance(meshes, Sequence) else [meshes]
        if not several:
            raise InvalidArgumentError("meshes is empty; it must be a mesh or a list of meshes")
        checked = [self._check_mesh(mesh) for mesh in several]
        if not isinstance(dataloader, Iterable):
            raise InvalidArgumentError(
                f"dataloader is a {type(dataloader).__name__}; it must be iterable"
            )
        dims: list[ShardDim] = (
            list(shard_dims)
            if isinstance(shard_dims, Sequence) and not isinstance(shard_dims, str)
            else [shard_dims] * len(checked)
        )
        if len(dims) != len(checked):
            raise InvalidArgumentError(
                f"shard_dims has {len(dims)} elements and meshes {len(checked)}; "
                "they must have the same number"
            )
        self.dataloader = dataloader
        self._targets = [
            (mesh, self._placements(mesh, dim)) for mesh, dim in zip(checked, dims, strict=True)
        ]
        self._keys = list(input_keys) if input_keys else None
        self._splitted = is_dataset_splitted

    def __call__(self) -> Iterator[Any]:
        """One pass over the batches."""
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield self._placed(batch)

    def __len__(self) -> int:
        """The number of batches, if the loader has a length."""
        if not isinstance(self.dataloader, Sized):
            raise TypeError(f"a {type(self.dataloader).__name__} has no length")
        return len(self.dataloader)

    def _placed(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            keys = list(batch) if self._keys is None else self._keys
            missing = [key for key in keys if key not in batch]
            if missing:
                raise InvalidArgumentError(
                    f"the keys {missing} of input_keys are not in a batch, which has {list(batch)}"
                )
            return {
                key: self._place(batch[key], number, len(keys)) for number, key in enumerate(keys)
            }
        if isinstance(batch, (list, tuple)):
            return [self._place(value, number, len(batch)) for number, value in enumerate(batch)]
        return self._place(batch, 0, 1)

    def _place(self, value: Any, number: int, count: int) -> Any:
        """Distributes one element of a batch."""
        if len(self._targets) not in (1, count):
            raise InvalidArgumentError(
                f"meshes has {len(self._targets)} elements and a batch {count}; "
                "pass one mesh, or one per element"
            )
        if isinstance(value, (list, tuple)):
            return [self._place(each, number, count) for each in value]
        if not self._is_tensor(value):
            return value
        mesh, placements = self._targets[number if len(self._targets) > 1 else 0]
        return (
            self._assembled(value, mesh, placements)
            if self._splitted
            else self._distributed(value, mesh, placements)
        )

    # ---- implemented by each framework

    @abstractmethod
    def _check_mesh(self, mesh: object) -> M:
        """Returns the mesh, or raises an error if it is not one."""

    @abstractmethod
    def _placements(self, mesh: M, dim: ShardDim) -> Sequence[Any]:
        """The placements of a batch that is sharded on dimension 0 over the mesh dimension, or
        replicated."""

    @abstractmethod
    def _is_tensor(self, value: object) -> bool:
        """Returns whether the value is a tensor. Other values are passed on unchanged."""

    @abstractmethod
    def _assembled(self, value: Any, mesh: M, placements: Sequence[Any]) -> Any:
        """The distributed tensor with this local tensor."""

    @abstractmethod
    def _distributed(self, value: Any, mesh: M, placements: Sequence[Any]) -> Any:
        """Distributes the first rank's tensor."""
