"""``shard_dataloader``: batches as distributed tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import Replicate, Shard

from .._dataloader import ShardDataloaderBase, ShardDim
from ._dtensor import assembled
from ._mesh import check_mesh, dimension
from ._placement import broadcast


class ShardDataloader(ShardDataloaderBase[Any]):
    """The result of :func:`shard_dataloader`. Iterate over it, or over the result of calling it."""

    def _check_mesh(self, mesh: object) -> Any:
        return check_mesh(mesh, "meshes")

    def _placements(self, mesh: Any, dim: ShardDim) -> list[Any]:
        placements: list[Any] = [Replicate()] * mesh.ndim
        if dim is not None:
            placements[dimension(mesh, dim)] = Shard(0)
        return placements

    def _is_tensor(self, value: object) -> bool:
        return isinstance(value, paddle.Tensor)

    def _assembled(self, value: Any, mesh: Any, placements: Sequence[Any]) -> Any:
        shape = list(value.shape)
        for parts, placement in zip(mesh.shape, placements, strict=True):
            if placement.is_shard():
                shape[0] *= parts
        return assembled(value, shape, mesh, placements)

    def _distributed(self, value: Any, mesh: Any, placements: Sequence[Any]) -> Any:
        # Without comparing the ranks' arguments, which takes longer than a step.
        broadcast(value, mesh)
        return dist.shard_tensor(value, mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: Any | Sequence[Any],
    input_keys: Sequence[str] | None = None,
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader that distributes the batches of another one.

    Every rank of a mesh must iterate. On a mesh of all ranks, all use the batches of its first
    rank, so shuffling loaders need no common seed. With ``is_dataset_splitted`` the batch of each
    rank is already its local tensor.

    Args:
        dataloader: an iterable of batches: tensors, lists of tensors or dicts of tensors.
        meshes: one mesh, or one for each element of a batch.
        input_keys: the keys of batches that are dicts, in the order of ``meshes``.
        shard_dims: the mesh dimension over which dimension 0 of a batch is sharded, by name or
            number; one for all meshes or one for each. None: the batch is replicated.
        is_dataset_splitted: whether the loaders of the ranks yield different data.
    """
    return ShardDataloader(dataloader, meshes, shard_dims, input_keys, is_dataset_splitted)
