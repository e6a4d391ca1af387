"""``shard_dataloader``: batches as DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from .._dataloader import ShardDataloaderBase, ShardDim
from ._mesh import check_mesh, dimension


class ShardDataloader(ShardDataloaderBase[DeviceMesh]):
    """The result of :func:`shard_dataloader`. Iterate over it, or over the result of calling it."""

    def _check_mesh(self, mesh: object) -> DeviceMesh:
        return check_mesh(mesh, "meshes")

    def _placements(self, mesh: DeviceMesh, dim: ShardDim) -> tuple[Placement, ...]:
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if dim is not None:
            placements[dimension(mesh, dim)] = Shard(0)
        return tuple(placements)

    def _is_tensor(self, value: object) -> bool:
        return isinstance(value, Tensor)

    def _assembled(
        self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DTensor:
        return DTensor.from_local(value, mesh, placements, run_check=False)

    def _distributed(
        self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DTensor:
        return distribute_tensor(value.detach(), mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: DeviceMesh | Sequence[DeviceMesh],
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    input_keys: Sequence[str] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader that distributes the batches of another one as DTensors.

    Every rank of a mesh must iterate. All ranks use the batches of the mesh's first rank, so
    shuffling loaders need no common seed. With ``is_dataset_splitted`` the batch of each rank is
    already its local tensor.

    Args:
        dataloader: an iterable of batches: tensors, lists of tensors or dicts of tensors.
        meshes: one mesh, or one for each element of a batch.
        shard_dims: the mesh dimension over which dimension 0 of a batch is sharded, by name or
            number; one for all meshes or one for each. None: the batch is replicated.
        input_keys: the keys of batches that are dicts, in the order of ``meshes``.
        is_dataset_splitted: whether the loaders of the ranks yield different data.
    """
    return ShardDataloader(dataloader, meshes, shard_dims, input_keys, is_dataset_splitted)
