"""``paddle.distributed.fleet.utils`` under this package's path."""

from __future__ import annotations

from typing import Any

import paddle.distributed.fleet.utils as _utils

from . import hybrid_parallel_util

__all__ = ["hybrid_parallel_util"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_utils, name)
