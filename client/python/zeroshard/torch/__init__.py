"""ZeroShard for PyTorch."""

from __future__ import annotations

from .._strategy import ShardingStage1, ShardingStage2, ShardingStage3, Strategy
from . import optim, parallel
from ._averaged import averaged
from ._clip import ClipGradByGlobalNorm, clip_grad_norm_
from ._data_parallel import DataParallel, fused_allreduce_gradients
from ._dataloader import ShardDataloader, shard_dataloader
from ._dist_model import DistModel, to_static
from ._follow import FollowedVersion, Versions, follow
from ._join import join
from ._layer import shard_layer
from ._load import load_weights
from ._mesh import Partial, ProcessMesh, Replicate, Shard
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._pin import pin
from ._placement import reshard, shard_tensor
from ._save import load_group_sharded_model, save_group_sharded_model
from ._scaler import GradScaler
from ._shard import ShardOptions, shard
from ._shard_optimizer import shard_optimizer
from ._sharded import group_sharded_parallel
from .optim import *  # noqa: F403

__all__ = [
    "ClipGradByGlobalNorm",
    "DataParallel",
    "DistModel",
    "FollowedVersion",
    "GradScaler",
    "GroupSharded",
    "Partial",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "ShardDataloader",
    "ShardOptions",
    "ShardedOptimizer",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "Strategy",
    "Versions",
    "averaged",
    "clip_grad_norm_",
    "follow",
    "fused_allreduce_gradients",
    "group_sharded_parallel",
    "join",
    "load_group_sharded_model",
    "load_weights",
    "parallel",
    "pin",
    "reshard",
    "save_group_sharded_model",
    "shard",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "to_static",
]
__all__ += optim.__all__
