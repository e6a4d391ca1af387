"""Trains a small model, which the tests observe."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import servers  # noqa: E402

__all__ = ["JOB", "TOKEN", "tiers", "training"]

JOB = "observed"
#: The token of the cluster.
TOKEN = "a-token-of-the-observed-cluster"


def tiers(directory: Path) -> list[str]:
    """Returns the flags of a shard server whose memory budget is too small for its slices."""
    return ["--host-memory", "64KiB", "--disk", str(directory), "--disk-bytes", "256MiB"]


@contextlib.contextmanager
def training(address: str, directory: Path) -> Iterator[None]:
    """Trains with two workers and two replicas of each slice, and saves the job."""
    (directory / "checkpoints").mkdir()
    command: list[Any] = [servers.BINARY.with_name("zeroshard-worker"), "train", "--json"]
    command += ["--address", address, "--job", JOB, "--shards", 3, "--replicas", 2, "--workers", 2]
    command += ["--data", ROOT / "proto", "--out", directory / "out", "--steps", 1_000_000]
    command += ["--width", 32, "--blocks", 1, "--heads", 2, "--batch", 4, "--context", 16]
    command += ["--checkpoint", f"file://{directory}/checkpoints", "--checkpoint-every", 50]
    environment = {**os.environ, "ZEROSHARD_TOKEN": TOKEN}
    with (directory / "training.log").open("w") as log:
        parts = [str(part) for part in command]
        process = subprocess.Popen(parts, stdout=log, stderr=log, env=environment)
        try:
            yield
            assert process.poll() is None, (directory / "training.log").read_text()[-2000:]
        finally:
            process.kill()
            process.wait()
