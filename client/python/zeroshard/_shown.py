"""Parameters that servers show, before this process forks or leaves the servers."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from ._native import own_panes


class Holder(Protocol):
    """Something that keeps parameters while servers show them, and can fetch them again."""

    def free_shown(self) -> None:
        """Frees the parameters that the program does not use, if the program uses them in this
        thread only."""


#: All of this process.
holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def own() -> None:
    """Copies the shown parameters that the program uses into memory of this process, so that later
    steps do not change them."""
    for holder in list(holders):
        holder.free_shown()
    own_panes()


# Otherwise the child would see values of later steps. It has no connection to fetch any itself.
os.register_at_fork(before=own, after_in_child=holders.clear)
