"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import environment  # noqa: F401
import torch

from fixtures import cluster, processes

__all__ = ["cluster", "processes"]

torch.set_num_threads(1)
