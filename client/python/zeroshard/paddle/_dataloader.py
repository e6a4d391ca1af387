"""``shard_dataloader``: batches as distributed tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import Replicate, Shard

from ..errors import InvalidArgument
from ._dtensor import assembled
from ._mesh import check_mesh, dimension
from ._placement import share

#: The dimension of a mesh along which batches are cut, by name or number.
ShardDim = str | int | None


class ShardDataloader:
    """What :func:`shard_dataloader` makes: iterate over it, or over what calling it returns."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        meshes: list[Any],
        shard_dims: list[ShardDim],
        input_keys: list[str] | None,
        is_dataset_splitted: bool,
    ) -> None:
        self.dataloader = dataloader
        self._places = [(mesh, _placements(mesh, dim)) for mesh, dim in zip(meshes, shard_dims, strict=True)]
        self._keys = input_keys
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
                raise InvalidArgument(f"input_keys has {missing}; a batch has {list(batch)}")
            return {key: self._place(batch[key], number, len(keys)) for number, key in enumerate(keys)}
        if self._keys is not None:
            raise InvalidArgument(f"input_keys is given, and a batch is a {type(batch).__name__}; it must be a dict")
        if isinstance(batch, (list, tuple)):
            return [self._place(value, number, len(batch)) for number, value in enumerate(batch)]
        return self._place(batch, 0, 1)

    def _place(self, value: Any, number: int, count: int) -> Any:
        """One part of a batch, on its mesh."""
        if len(self._places) not in (1, count):
            raise InvalidArgument(
                f"meshes has {len(self._places)} and a batch {count} parts; there must be one mesh, or one for each part"
            )
        if isinstance(value, (list, tuple)):
            return [self._place(each, number, count) for each in value]
        if not isinstance(value, paddle.Tensor):
            return value
        mesh, placements = self._places[number if len(self._places) > 1 else 0]
        if not self._splitted:
            # Without asking whether the ranks agree, which takes longer than a step.
            share(value, mesh)
            return dist.shard_tensor(value, mesh, placements)
        shape = list(value.shape)
        for parts, placement in zip(mesh.shape, placements, strict=True):
            if placement.is_shard():
                shape[0] *= parts
        return assembled(value, shape, mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: Any | Sequence[Any],
    input_keys: Sequence[str] | None = None,
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader whose tensors are distributed.

    Every rank of a mesh iterates. The batches of a mesh's first rank count, if it has all ranks, so that shuffled loaders
    need no common seed; with ``is_dataset_splitted`` each rank's own batch is its part already.

    Args:
        dataloader: whatever gives batches: tensors, lists of tensors or dicts of them.
        meshes: one mesh, or one for each part of a batch.
        input_keys: of batches that are dicts, the parts that are used, in the order of ``meshes``.
        shard_dims: the mesh dimension along which dimension 0 of a batch is cut, by name or number; one for all meshes or
            one for each. None: every rank has the whole batch.
        is_dataset_splitted: whether the ranks' loaders give different data.
    """
    several = list(meshes) if isinstance(meshes, Sequence) else [meshes]
    if not several:
        raise InvalidArgument("meshes is empty; it must be a mesh, or a list of them")
    checked = [check_mesh(mesh, "meshes") for mesh in several]
    if not isinstance(dataloader, Iterable):
        raise InvalidArgument(f"dataloader is a {type(dataloader).__name__}; it must be something to iterate over")
    dims: list[ShardDim] = (
        list(shard_dims)
        if isinstance(shard_dims, Sequence) and not isinstance(shard_dims, str)
        else [shard_dims] * len(checked)
    )
    if len(dims) != len(checked):
        raise InvalidArgument(f"shard_dims has {len(dims)} and meshes {len(checked)}; there must be one for each mesh")
    return ShardDataloader(dataloader, checked, dims, list(input_keys) if input_keys else None, is_dataset_splitted)


def _placements(mesh: Any, dim: ShardDim) -> list[Any]:
    placements: list[Any] = [Replicate()] * mesh.ndim
    if dim is not None:
        placements[dimension(mesh, dim)] = Shard(0)
    return placements
