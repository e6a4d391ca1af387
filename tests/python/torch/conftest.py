"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import environment  # noqa: F401
import torch

import pytest
import ranks
from fixtures import cluster, processes

__all__ = ["cluster", "pair", "processes"]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair() -> Iterator[ranks.Team]:
    """Two ranks that all tests share whose functions leave nothing behind."""
    team = ranks.Team(2)
    yield team
    team.end()
