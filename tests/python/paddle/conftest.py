"""What the tests share: a cluster in this process, and one of server processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# One thread a process, as every rank has, and nothing of a launcher's environment. Before Paddle is imported.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
for name in list(os.environ):
    if name.startswith(("PADDLE_", "ZEROSHARD_")) and not name.startswith("ZEROSHARD_TEST"):
        del os.environ[name]

import pytest
import zeroshard as zs

from servers import servers


@pytest.fixture(scope="session")
def cluster() -> Iterator[zs.Session]:
    """An embedded cluster in the tests' own process: one rank."""
    # A test that should have failed before it came so far may have left one.
    zs.shutdown()
    with zs.init() as session:
        yield session


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[str, str]]:
    """Two shard servers as processes; the environment in which ranks find them."""
    with servers(2) as address:
        yield {"ZEROSHARD_ADDRESS": address}
