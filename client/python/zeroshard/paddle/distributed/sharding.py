"""``zeroshard.paddle.sharding`` under the path that it has in Paddle."""

from __future__ import annotations

from ..sharding import group_sharded_parallel, load_group_sharded_model, save_group_sharded_model

__all__ = ["group_sharded_parallel", "load_group_sharded_model", "save_group_sharded_model"]
