"""How a job is saved, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from .._native import CheckpointPolicy


@dataclass(frozen=True)
class Saving:
    """The checkpoints of a job."""

    #: When and where the servers save it.
    policy: CheckpointPolicy
    #: The directory or prefix of the checkpoints.
    url: str
    #: ``True`` if it starts from the latest checkpoint. Otherwise there must be none.
    resumes: bool
