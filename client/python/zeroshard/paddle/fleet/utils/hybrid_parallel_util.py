"""``fused_allreduce_gradients`` under the path that it has in Paddle. Other names are Paddle's."""

from __future__ import annotations

from typing import Any

import paddle.distributed.fleet.utils.hybrid_parallel_util as _util

from ..._data_parallel import fused_allreduce_gradients

__all__ = ["fused_allreduce_gradients"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_util, name)
