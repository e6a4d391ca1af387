"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# One thread a process, as every rank has, and nothing of a launcher's environment. Before Paddle is
# imported.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
for name in list(os.environ):
    if name.startswith(("PADDLE_", "ZEROSHARD_")) and not name.startswith("ZEROSHARD_TEST"):
        del os.environ[name]

import pytest
import ranks
from fixtures import cluster, processes

__all__ = ["cluster", "pair", "processes"]


@pytest.fixture(scope="session")
def pair() -> Iterator[ranks.Team]:
    """Two ranks that all tests share whose functions leave nothing behind."""
    team = ranks.Team(2)
    yield team
    team.end()
