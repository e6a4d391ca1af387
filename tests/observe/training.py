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
import servers

__all__ = ["FRAGILE", "JOB", "TOKEN", "fragile", "tiers", "training"]

JOB = "observed"
#: A job that does not survive the loss of a server.
FRAGILE = "fragile"
#: The token of the cluster.
TOKEN = "a-token-of-the-observed-cluster"


def tiers(directory: Path) -> list[str]:
    """Returns the flags of a shard server whose memory budget is too small for its slices."""
    return ["--host-memory", "64KiB", "--disk", str(directory), "--disk-bytes", "256MiB"]


@contextlib.contextmanager
def training(address: str, directory: Path) -> Iterator[None]:
    """Trains with two workers and two replicas of each slice, and saves the job."""
    (directory / "checkpoints").mkdir()
    flags = ["--replicas", 2, "--workers", 2, "--checkpoint-every", 50]
    flags += ["--checkpoint", f"file://{directory}/checkpoints"]
    with _worker(address, directory, JOB, flags) as (process, log):
        yield
        assert process.poll() is None, log.read_text()[-2000:]


@contextlib.contextmanager
def fragile(address: str, directory: Path) -> Iterator[None]:
    """Trains without replicas and checkpoints, so that the loss of a server fails the job."""
    with _worker(address, directory, FRAGILE, ["--workers", 1]):
        yield


@contextlib.contextmanager
def _worker(
    address: str, directory: Path, job: str, flags: list[Any]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    command: list[Any] = [servers.BINARY.with_name("zeroshard-worker"), "train", "--json"]
    command += ["--address", address, "--job", job, "--shards", 3]
    command += ["--data", ROOT / "proto", "--out", directory / job, "--steps", 1_000_000]
    command += ["--width", 32, "--blocks", 1, "--heads", 2, "--batch", 4, "--context", 16]
    environment = {**os.environ, "ZEROSHARD_TOKEN": TOKEN}
    path = directory / f"{job}.log"
    with path.open("w") as log:
        parts = [str(part) for part in (*command, *flags)]
        process = subprocess.Popen(parts, stdout=log, stderr=log, env=environment)
        try:
            yield process, path
        finally:
            process.kill()
            process.wait()
