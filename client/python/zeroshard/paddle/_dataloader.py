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
from ._placement import share


class ShardDataloader(ShardDataloaderBase[Any]):
    """What :func:`shard_dataloader` makes: iterate over it, or over what calling it returns."""

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

    def _cut(self, value: Any, mesh: Any, placements: Sequence[Any]) -> Any:
        # Without asking whether the ranks agree, which takes longer than a step.
        share(value, mesh)
        return dist.shard_tensor(value, mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: Any | Sequence[Any],
    input_keys: Sequence[str] | None = None,
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader whose tensors are distributed.

    Every rank of a mesh iterates. The batches of a mesh's first rank count, if it has all ranks, so
    that shuffled loaders need no common seed; with ``is_dataset_splitted`` each rank's own batch is
    its part already.

    Args:
        dataloader: whatever gives batches: tensors, lists of tensors or dicts of them.
        meshes: one mesh, or one for each part of a batch.
        input_keys: of batches that are dicts, the parts that are used, in the order of ``meshes``.
        shard_dims: the mesh dimension along which dimension 0 of a batch is cut, by name or number;
            one for all meshes or one for each. None: every rank has the whole batch.
        is_dataset_splitted: whether the ranks' loaders give different data.
    """
    return ShardDataloader(dataloader, meshes, shard_dims, input_keys, is_dataset_splitted)
