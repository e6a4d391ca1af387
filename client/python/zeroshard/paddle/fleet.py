"""As ``paddle.distributed.fleet``. All of its names are Paddle's, except
``fused_allreduce_gradients``."""

from __future__ import annotations

from typing import Any

import paddle.distributed.fleet as _fleet

from ._data_parallel import fused_allreduce_gradients

__all__ = ["fused_allreduce_gradients"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_fleet, name)
