"""What every framework's ``shard_dataloader`` has in common: which part of a batch goes onto which
mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

from .errors import InvalidArgumentError

#: A mesh of the framework.
M = TypeVar("M")

#: The dimension of a mesh along which batches are cut, by name or number.
ShardDim = str | int | None


class ShardDataloaderBase(ABC, Generic[M]):
    """What ``shard_dataloader`` makes: iterate over it, or over what calling it returns."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        meshes: M | Sequence[M],
        shard_dims: ShardDim | Sequence[ShardDim] = None,
        input_keys: Sequence[str] | None = None,
        is_dataset_splitted: bool = False,
    ) -> None:
        """As ``shard_dataloader`` says."""
        several = list(meshes) if isinstance(meshes, Sequence) else [meshes]
        if not several:
            raise InvalidArgumentError("meshes is empty; it must be a mesh, or a list of them")
        checked = [self._check_mesh(mesh) for mesh in several]
        if not isinstance(dataloader, Iterable):
            raise InvalidArgumentError(
                f"dataloader is a {type(dataloader).__name__}; it must be something to iterate over"
            )
        dims: list[ShardDim] = (
            list(shard_dims)
            if isinstance(shard_dims, Sequence) and not isinstance(shard_dims, str)
            else [shard_dims] * len(checked)
        )
        if len(dims) != len(checked):
            raise InvalidArgumentError(
                f"shard_dims has {len(dims)} and meshes {len(checked)}; there must be one for each mesh"
            )
        self.dataloader = dataloader
        self._places = [
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
        """Batches, if the loader knows."""
        if not isinstance(self.dataloader, Sized):
            raise TypeError(f"a {type(self.dataloader).__name__} has no length")
        return len(self.dataloader)

    def _placed(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            keys = list(batch) if self._keys is None else self._keys
            missing = [key for key in keys if key not in batch]
            if missing:
                raise InvalidArgumentError(f"input_keys has {missing}; a batch has {list(batch)}")
            return {
                key: self._place(batch[key], number, len(keys)) for number, key in enumerate(keys)
            }
        if self._keys is not None:
            raise InvalidArgumentError(
                f"input_keys is given, and a batch is a {type(batch).__name__}; it must be a dict"
            )
        if isinstance(batch, (list, tuple)):
            return [self._place(value, number, len(batch)) for number, value in enumerate(batch)]
        return self._place(batch, 0, 1)

    def _place(self, value: Any, number: int, count: int) -> Any:
        """One part of a batch, on its mesh."""
        if len(self._places) not in (1, count):
            raise InvalidArgumentError(
                f"meshes has {len(self._places)} and a batch {count} parts; there must be one mesh, or one for each part"
            )
        if isinstance(value, (list, tuple)):
            return [self._place(each, number, count) for each in value]
        if not self._is_tensor(value):
            return value
        mesh, placements = self._places[number if len(self._places) > 1 else 0]
        return (
            self._assembled(value, mesh, placements)
            if self._splitted
            else self._cut(value, mesh, placements)
        )

    # ---- what a framework knows

    @abstractmethod
    def _check_mesh(self, mesh: object) -> M:
        """One of ``meshes``, if it is a mesh."""

    @abstractmethod
    def _placements(self, mesh: M, dim: ShardDim) -> Sequence[Any]:
        """Dimension 0 of a batch cut along a dimension of the mesh; whole, if that is None."""

    @abstractmethod
    def _is_tensor(self, value: object) -> bool:
        """Whether this goes onto a mesh; what is none is left as it is."""

    @abstractmethod
    def _assembled(self, value: Any, mesh: M, placements: Sequence[Any]) -> Any:
        """The distributed tensor of which each rank has given its part."""

    @abstractmethod
    def _cut(self, value: Any, mesh: M, placements: Sequence[Any]) -> Any:
        """The distributed tensor of the whole that the first rank has given."""
