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
    """What :func:`shard_dataloader` makes: iterate over it, or over what calling it returns."""

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

    def _cut(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        return distribute_tensor(value.detach(), mesh, placements)


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: DeviceMesh | Sequence[DeviceMesh],
    shard_dims: ShardDim | Sequence[ShardDim] = None,
    input_keys: Sequence[str] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardDataloader:
    """A loader whose tensors are DTensors.

    Every rank of a mesh iterates. The batches of the mesh's first rank count, so that shuffled
    loaders need no common seed; with ``is_dataset_splitted`` each rank's own batch is its part
    already.

    Args:
        dataloader: whatever gives batches: tensors, lists of tensors or dicts of them.
        meshes: one mesh, or one for each part of a batch.
        shard_dims: the mesh dimension along which dimension 0 of a batch is cut, by name or number;
            one for all meshes or one for each. None: every rank has the whole batch.
        input_keys: of batches that are dicts, the parts that are used, in the order of ``meshes``.
        is_dataset_splitted: whether the ranks' loaders give different data.
    """
    return ShardDataloader(dataloader, meshes, shard_dims, input_keys, is_dataset_splitted)
