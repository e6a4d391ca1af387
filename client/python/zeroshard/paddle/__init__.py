"""ZeroShard for Paddle."""

from __future__ import annotations

try:
    import paddle as _paddle  # noqa: F401
except ImportError as error:
    raise ImportError("zeroshard.paddle needs Paddle: pip install paddlepaddle") from error

from . import _autograd
from ._clip import clip_grad_norm_
from ._data_parallel import DataParallel, fused_allreduce_gradients
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._save import load_group_sharded_model, save_group_sharded_model
from ._scaler import GradScaler
from ._sharded import group_sharded_parallel

_autograd.install()

__all__ = [
    "DataParallel",
    "GradScaler",
    "GroupSharded",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "fused_allreduce_gradients",
    "group_sharded_parallel",
    "load_group_sharded_model",
    "save_group_sharded_model",
]
