"""Starts the server binary that tests/run has built, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "try" / "zeroshard-server"
#: Seconds that a server may take to shut down.
TIMEOUT = 10


def _launch(
    arguments: Sequence[str], listen: str, admin: str
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Starts a server. Returns its process, and what it has said of its addresses."""
    command = [
        str(BINARY),
        *arguments,
        "--listen",
        listen,
        "--admin-listen",
        admin,
        "--json",
        "--log",
        "error",
    ]
    # A busy machine may stand still for longer than a worker may.
    environment = {**os.environ, "ZEROSHARD_KEEPALIVE_SECONDS": "20"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        return process, json.loads(process.stdout.readline())
    except BaseException:
        process.kill()
        raise


def start(*arguments: str, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
    """Starts a server. Returns its process, and the address that it listens on."""
    process, listening = _launch(arguments, listen, "off")
    return process, listening["address"]


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Shuts a server down at the end."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT)
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Runs a server. Returns the address that it listens on."""
    process, address = start(*arguments)
    with _ended(process):
        yield address


@contextlib.contextmanager
def observed(*arguments: str) -> Iterator[str]:
    """Runs a server. Returns the address of its metrics."""
    process, listening = _launch(arguments, "127.0.0.1:0", "127.0.0.1:0")
    with _ended(process):
        yield listening["admin"]


@contextlib.contextmanager
def observed_servers(
    flags: Sequence[Sequence[str]], token: str
) -> Iterator[tuple[str, list[str], list[subprocess.Popen[str]]]]:
    """Runs a coordinator, and a shard server for each list of flags, which a test may kill. Returns
    the coordinator's address, the addresses of the metrics (the coordinator's first), and the
    processes of the shard servers. The metrics are reachable from other machines, and therefore
    require the token."""
    with contextlib.ExitStack() as stack:
        metrics, running = [], []

        def launch(*arguments: str) -> str:
            command = [*arguments, "--token", token]
            process, listening = _launch(command, "127.0.0.1:0", "0.0.0.0:0")
            stack.enter_context(_ended(process))
            metrics.append(listening["admin"].replace("0.0.0.0", "127.0.0.1"))
            running.append(process)
            return listening["address"]

        address = launch("coordinator")
        for of_shard in flags:
            launch("shard", "--coordinator", address, *of_shard)
        yield address, metrics, running[1:]


@contextlib.contextmanager
def servers(shards: int, flags: Sequence[str] = ()) -> Iterator[str]:
    """Runs a coordinator and this number of shard servers. Returns the coordinator's address."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server("coordinator", *flags))
        for _ in range(shards):
            stack.enter_context(server("shard", "--coordinator", address, *flags))
        yield address


@contextlib.contextmanager
def killable(shards: int) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Runs a coordinator and shard servers, which a test may kill. Returns the coordinator's
    address, and the processes of the shard servers."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server("coordinator"))
        running = []
        for _ in range(shards):
            process, _ = start("shard", "--coordinator", address)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            running.append(process)
        yield address, running
