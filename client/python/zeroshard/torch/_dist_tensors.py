"""The tensors of a ``DistModel``: plain ones and DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._dist_tensors import DistTensors
from ._dtensor import local
from ._mesh import mesh_text
from ._placement import reshard


class TorchDistTensors(DistTensors[Tensor]):
    """Tensors of torch."""

    name = "torch.Tensor"

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, Tensor)

    def mesh_of(self, value: Tensor) -> DeviceMesh | None:
        return value.device_mesh if isinstance(value, DTensor) else None

    def mesh_text(self, mesh: DeviceMesh) -> str:
        return mesh_text(mesh)

    def shards(self, value: Tensor) -> list[tuple[int, int]]:
        if not isinstance(value, DTensor):
            return []
        sizes = zip(value.device_mesh.shape, value.placements, strict=True)
        return [
            (parts, placement.dim) for parts, placement in sizes if isinstance(placement, Shard)
        ]

    def local(self, value: Tensor) -> Tensor:
        assert isinstance(value, DTensor)
        complete: list[Placement] = [
            Replicate() if isinstance(p, Partial) else p for p in value.placements
        ]
        return value.redistribute(placements=complete).to_local()

    def local_shape(self, value: Tensor) -> torch.Size:
        return local(value).shape

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def replicated(self, value: Tensor, mesh: DeviceMesh) -> Tensor:
        everywhere = [Replicate()] * mesh.ndim
        if isinstance(value, DTensor):
            return reshard(value, mesh, everywhere)
        return DTensor.from_local(value, mesh, everywhere, run_check=False)

    def assembled_as(self, part: Tensor, sharded: Tensor) -> Tensor:
        assert isinstance(sharded, DTensor)
        return DTensor.from_local(part, sharded.device_mesh, sharded.placements, run_check=False)
