"""Server processes of the release binary, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "zeroshard-server"
#: Seconds that a server may take to shut down.
TIMEOUT = 10


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Runs a server. Returns the address that it listens on."""
    command = [
        str(BINARY),
        *arguments,
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "off",
        "--json",
        "--log",
        "error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT)
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def servers(shards: int, flags: Sequence[str] = ()) -> Iterator[str]:
    """Runs a coordinator and this number of shard servers. Returns the coordinator's address."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server("coordinator", *flags))
        for _ in range(shards):
            stack.enter_context(server("shard", "--coordinator", address, *flags))
        yield address
