"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# What the tests of all frameworks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# One thread a process, as every rank has, and nothing of a launcher's environment. Before Paddle is
# imported.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
for name in list(os.environ):
    if name.startswith(("PADDLE_", "ZEROSHARD_")) and not name.startswith("ZEROSHARD_TEST"):
        del os.environ[name]

from fixtures import cluster, processes

__all__ = ["cluster", "processes"]
