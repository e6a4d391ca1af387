"""ZeroShard for PyTorch."""

from __future__ import annotations

from ._clip import ClipGradByGlobalNorm, clip_grad_norm_
from ._data_parallel import DataParallel, fused_allreduce_gradients
from ._mesh import Partial, ProcessMesh, Replicate, Shard
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._save import load_group_sharded_model, save_group_sharded_model
from ._scaler import GradScaler
from ._sharded import group_sharded_parallel
from .optim import LAMB, Lion

__all__ = [
    "LAMB",
    "ClipGradByGlobalNorm",
    "DataParallel",
    "GradScaler",
    "GroupSharded",
    "Lion",
    "Partial",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "fused_allreduce_gradients",
    "group_sharded_parallel",
    "load_group_sharded_model",
    "save_group_sharded_model",
]
