"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# One thread a process, as every rank has, and nothing of a launcher's environment. Before torch is
# imported.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
for name in (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ZEROSHARD_ADDRESS",
    "ZEROSHARD_TOKEN",
):
    os.environ.pop(name, None)

import torch

from fixtures import cluster, processes

__all__ = ["cluster", "processes"]

torch.set_num_threads(1)
