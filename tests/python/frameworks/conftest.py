"""Sets the environment of the test processes before anything is imported, and provides the
fixtures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
# What the tests of all frameworks share, and the ranks and models of the tests with torch.
sys.path[:0] = [str(TESTS), str(TESTS / "torch")]

import environment  # noqa: F401

# Nothing is downloaded.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch

import ranks
from fixtures import cluster, processes

__all__ = ["cluster", "processes"]

torch.set_num_threads(1)
ranks.preload("accelerate", "transformers.trainer", "lightning.pytorch")
