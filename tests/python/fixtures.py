"""Fixtures of every framework's tests: a cluster in this process, and one of server processes."""

from __future__ import annotations

from collections.abc import Iterator

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
