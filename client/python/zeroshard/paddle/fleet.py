"""``paddle.distributed.fleet`` under this package's path. All of its names are Paddle's."""

from __future__ import annotations

from typing import Any

import paddle.distributed.fleet as _fleet


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_fleet, name)
