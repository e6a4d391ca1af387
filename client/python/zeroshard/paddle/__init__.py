"""ZeroShard for Paddle.

It can be imported in place of ``paddle.distributed`` (``import zeroshard.paddle as dist``): names
that it does not define are Paddle's.
"""

from __future__ import annotations

try:
    import paddle as _paddle  # noqa: F401
except ImportError as error:
    raise ImportError("zeroshard.paddle needs Paddle; run pip install paddlepaddle") from error

from typing import Any

import paddle.distributed as _distributed

from .._strategy import ShardingStage1, ShardingStage2, ShardingStage3
from . import fleet, sharding
from ._averaged import averaged
from ._clip import clip_grad_norm_
from ._data_parallel import DataParallel, fused_allreduce_gradients
from ._dataloader import ShardDataloader, shard_dataloader
from ._dist_model import DistModel, to_static
from ._follow import FollowedVersion, Versions, follow
from ._layer import shard_layer
from ._mesh import Partial, Placement, ProcessMesh, Replicate, Shard
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._pin import pin
from ._placement import reshard, shard_tensor
from ._save import load_group_sharded_model, save_group_sharded_model
from ._scaler import GradScaler
from ._shard_optimizer import shard_optimizer
from ._sharded import group_sharded_parallel
from ._strategy import Strategy

__all__ = [
    "DataParallel",
    "DistModel",
    "FollowedVersion",
    "GradScaler",
    "GroupSharded",
    "Partial",
    "Placement",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "ShardDataloader",
    "ShardedOptimizer",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "Strategy",
    "Versions",
    "clip_grad_norm_",
    "fleet",
    "averaged",
    "follow",
    "fused_allreduce_gradients",
    "group_sharded_parallel",
    "load_group_sharded_model",
    "pin",
    "reshard",
    "save_group_sharded_model",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "sharding",
    "to_static",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's own ``init_parallel_env``, ``spawn``, collectives, and so on."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_distributed, name)
