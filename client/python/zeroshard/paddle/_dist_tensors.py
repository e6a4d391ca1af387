"""The tensors of a ``DistModel``: plain and distributed ones."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from .._dist_tensors import DistTensors
from ._dtensor import assembled, local, redistributed, whole
from ._mesh import mesh_text


class PaddleDistTensors(DistTensors[Any]):
    """Tensors of Paddle."""

    name = "paddle.Tensor"

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, paddle.Tensor)

    def mesh_of(self, value: Any) -> Any | None:
        return value.process_mesh if value.is_dist() else None

    def mesh_text(self, mesh: Any) -> str:
        return mesh_text(mesh)

    def shards(self, value: Any) -> list[tuple[int, int]]:
        if not value.is_dist():
            return []
        sizes = zip(value.process_mesh.shape, value.placements, strict=True)
        return [(parts, placement.get_dim()) for parts, placement in sizes if placement.is_shard()]

    def local(self, value: Any) -> Any:
        return local(
            redistributed(
                value, [dist.Replicate() if p.is_partial() else p for p in value.placements]
            )
        )

    def local_shape(self, value: Any) -> list[int]:
        return list(local(value).shape)

    def whole(self, value: Any) -> Any:
        return whole(value)

    def replicated(self, value: Any, mesh: Any) -> Any:
        everywhere = [dist.Replicate()] * mesh.ndim
        if value.is_dist():
            return dist.reshard(value, mesh, everywhere)
        return assembled(value, value.shape, mesh, everywhere)

    def assembled_as(self, part: Any, sharded: Any) -> Any:
        shape = [sharded.shape[0], *part.shape[1:]]
        return assembled(part, shape, sharded.process_mesh, sharded.placements)
