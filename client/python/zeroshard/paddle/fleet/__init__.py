"""``paddle.distributed.fleet`` under this package's path. All of its names are Paddle's, except
``utils.hybrid_parallel_util.fused_allreduce_gradients``."""

from __future__ import annotations

from typing import Any

import paddle.distributed.fleet as _fleet

from . import utils

__all__ = ["utils"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_fleet, name)
