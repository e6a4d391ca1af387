"""``shard_dataloader``: batches as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..errors import InvalidArgument
from ._mesh import check_mesh, dimension

#: The dimension of a mesh along which batches are cut, by name or number.
ShardDim = str | int | None


class ShardDataloader:
    """What :func:`shard_dataloader` makes: iterate over it, or over what calling it returns."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        meshes: list[DeviceMesh],
        shard_dims: list[ShardDim],
        input_keys: list[str] | None,
        is_dataset_splitted: bool,
    ) -> None:
        self.dataloader = dataloader
        self._places = [
            (mesh, _placements(mesh, dim)) for mesh, dim in zip(meshes, shard_dims, strict=True)
        ]
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
                f"meshes has {len(self._places)} and a batch {count} parts; it must have one, or one for each part"
            )
        if isinstance(value, (list, tuple)):
            return [self._place(each, number, count) for each in value]
        if not isinstance(value, Tensor):
            return value
        mesh, placements = self._places[number if len(self._places) > 1 else 0]
        if self._splitted:
            return DTensor.from_local(value, mesh, placements, run_check=False)
        return distribute_tensor(value.detach(), mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: DeviceMesh | Sequence[DeviceMesh],
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    input_keys: Sequence[str] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader whose tensors are DTensors.

    Every rank of a mesh iterates. The batches of the mesh's first rank count, so that shuffled loaders need no common
    seed; with ``is_dataset_splitted`` each rank's own batch is its part already.

    Args:
        dataloader: whatever gives batches: tensors, lists of tensors or dicts of them.
        meshes: one mesh, or one for each part of a batch.
        shard_dims: the mesh dimension along which dimension 0 of a batch is cut, by name or number; one for all meshes
            or one for each. None: every rank has the whole batch.
        input_keys: of batches that are dicts, the parts that are used, in the order of ``meshes``.
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


def _placements(mesh: DeviceMesh, dim: ShardDim) -> tuple[Placement, ...]:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if dim is not None:
        placements[dimension(mesh, dim)] = Shard(0)
    return tuple(placements)
