"""``zeroshard.paddle`` under the path that it has in Paddle."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import zeroshard.paddle as _dist
from zeroshard.paddle import *  # noqa: F403

__all__ = _dist.__all__

for _name in ("fleet", "fleet.utils", "fleet.utils.hybrid_parallel_util"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"zeroshard.paddle.{_name}")


def __getattr__(name: str) -> Any:
    return getattr(_dist, name)
