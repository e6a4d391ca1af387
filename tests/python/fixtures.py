"""Fixtures for the tests of every framework: an embedded cluster, and a cluster of server
processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zeroshard as zs

from servers import servers


@pytest.fixture(scope="session")
def cluster() -> Iterator[zs.Session]:
    """An embedded cluster in the process of the tests, which is a single rank."""
    # An earlier test may have left a session open.
    zs.shutdown()
    with zs.init() as session:
        yield session


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[str, str]]:
    """Two shard server processes. Returns the environment in which ranks find them."""
    with servers(2) as address:
        yield {"ZEROSHARD_ADDRESS": address}
