"""``zeroshard.paddle`` under the path that it has in Paddle."""

from __future__ import annotations

from typing import Any

import zeroshard.paddle as _dist
from zeroshard.paddle import *  # noqa: F403

__all__ = _dist.__all__


def __getattr__(name: str) -> Any:
    return getattr(_dist, name)
