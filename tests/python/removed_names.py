"""Removes private names of a library from the view of the package, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import zeroshard as zs
from zeroshard._private_names import REGISTERED, PrivateName

#: What a removed name is called instead.
_GONE = "_gone_from_this_version"


def names(library: str) -> list[str]:
    """The paths of the private names of a library, for ``parametrize``."""
    return [name.path for name in REGISTERED[library]]


def named(path: str) -> PrivateName:
    """The private name with this path."""
    [found] = [name for each in REGISTERED.values() for name in each if name.path == path]
    return found


@contextlib.contextmanager
def removed(*paths: str) -> Iterator[None]:
    """A context in which the package finds the library as if it had renamed these names."""
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.setattr(named(path), "attribute", _GONE)
        yield


def check_is_named(path: str) -> None:
    """Checks that ``zs.check()`` names a removed name and what is lost, and no other name."""
    before = {name.name for name in zs.check().missing}
    with removed(path):
        found = zs.check()
    assert {name.name for name in found.missing} - before == {path} - before
    assert found.lost == tuple(sorted(named(path).features))
    assert found.ok == (not found.lost)
    assert path in str(found)
    assert all(feature in str(found) for feature in found.lost)
    assert all(name.without.endswith(".") for name in found.missing)
