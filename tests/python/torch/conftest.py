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


#: The files that take longest, some of them because their tests wait for the loss of a server.
LONGEST = (
    "test_resumed_steps.py",
    "test_examples.py",
    "test_checkpoints.py",
    "test_restart.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files, so that the processes that share the files end at about the
    same time."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
