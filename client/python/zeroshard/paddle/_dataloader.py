"""``shard_dataloader``: batches as distributed tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import Replicate, Shard

from .._dataloader import ShardDataloaderBase, ShardDim
from ..errors import InvalidArgumentError
from ._dtensor import assembled, local
from ._mesh import check_mesh, dimension
from ._placement import broadcast


class ShardDataloader(ShardDataloaderBase[Any]):
    """The result of :func:`shard_dataloader`. Iterate over it, or over the result of calling it."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        meshes: Any | Sequence[Any],
        input_keys: Sequence[str] | None = None,
        shard_dims: ShardDim | Sequence[ShardDim] = None,
        is_dataset_splitted: bool = False,
        dense_tensor_idx: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(dataloader, meshes, shard_dims, input_keys, is_dataset_splitted)
        self._dense = None if dense_tensor_idx is None else list(map(list, dense_tensor_idx))

    def _placed(self, batch: Any) -> Any:
        placed = super()._placed(batch)
        if self._dense is None:
            return placed
        keys = list(placed) if isinstance(placed, dict) else range(len(placed))
        if len(keys) != len(self._dense):
            raise InvalidArgumentError(
                f"dense_tensor_idx has {len(self._dense)} elements and a batch {len(keys)}; "
                "they must have the same number"
            )
        for key, dense in zip(keys, self._dense, strict=True):
            placed[key] = _with_local(placed[key], dense)
        return placed

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
    dense_tensor_idx: Sequence[Sequence[int]] | None = None,
) -> ShardDataloader:
    """A loader that distributes the batches of another one.

    Every rank of a mesh must iterate. On a mesh of all ranks, all use the batches of its first
    rank, so shuffling loaders need no common seed. With ``is_dataset_splitted`` the batch of each
    rank is already its local tensor.

    Args:
        dataloader: an iterable of batches: tensors, lists of tensors or dicts of tensors.
        meshes: one mesh, or one for each element of a batch.
        input_keys: the keys of batches that are dicts, in the order of ``meshes``. Other batches
            are not affected.
        shard_dims: the mesh dimension over which dimension 0 of a batch is sharded, by name or
            number; one for all meshes or one for each. None: the batch is replicated.
        is_dataset_splitted: whether the loaders of the ranks yield different data.
        dense_tensor_idx: for each element of a batch the indices of its tensors that stay plain
            tensors, as this rank's part; if the element is a tensor, any index selects it.
    """
    return ShardDataloader(
        dataloader, meshes, input_keys, shard_dims, is_dataset_splitted, dense_tensor_idx
    )


def _with_local(value: Any, dense: Sequence[int]) -> Any:
    """An element of a batch, with the local tensors of those that ``dense`` selects."""
    if isinstance(value, list):
        return [_with_local(each, [0] if i in dense else []) for i, each in enumerate(value)]
    return local(value) if dense and isinstance(value, paddle.Tensor) else value
