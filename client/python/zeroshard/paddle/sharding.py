"""As ``paddle.distributed.sharding``: ``from zeroshard.paddle.sharding import
group_sharded_parallel, save_group_sharded_model``."""

from __future__ import annotations

from ._save import load_group_sharded_model, save_group_sharded_model
from ._sharded import group_sharded_parallel

__all__ = ["group_sharded_parallel", "load_group_sharded_model", "save_group_sharded_model"]
