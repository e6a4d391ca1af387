"""``zeroshard launch``: a cluster of separate processes on this machine."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from ._native import available_memory
from ._programs import program

#: Seconds that a server may take to listen, and to stop.
START_TIMEOUT = 30.0
STOP_TIMEOUT = 30.0
#: prctl: the signal that the kernel sends to a process when its parent has died.
PR_SET_PDEATHSIG = 1

DESCRIPTION = """\
Start a coordinator and shard servers on this machine.

With a command, set ZEROSHARD_ADDRESS for it, run it, and stop the cluster when it ends:

  zeroshard launch -- torchrun --nproc-per-node 2 train.py

Without a command, run the cluster until Ctrl-C. The servers listen on loopback only. For several
machines, start zeroshard-server on each, or use the containers of a release."""


class StartError(Exception):
    """A server or the command has not started."""


#: Set while the servers stop: they tell each other that they leave, which nobody needs to read.
_stopping = threading.Event()


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``zeroshard launch``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--servers", type=_count, default=1, metavar="N", help="number of shard servers [1]"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each server, such as 16GiB [an equal part of this machine's]",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help="port of the coordinator [7400; any with a command]",
    )
    parser.add_argument(
        "--log", default="warn", metavar="FILTER", help="log filter of the servers [warn]"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run"
    )


def run(options: argparse.Namespace) -> int:
    """Runs a cluster. Returns the exit code."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    port = options.port if options.port is not None else (0 if command else 7400)
    signal.signal(signal.SIGTERM, _terminate)
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        address = _start(processes, options, port)
        if command:
            return _run_command(command, address, processes)
        print(
            f"\nWorkers find the cluster with ZEROSHARD_ADDRESS={address}. Ctrl-C stops it.",
            flush=True,
        )
        return _first_end(processes)
    except StartError as error:
        print(f"zeroshard launch: {error}", file=sys.stderr)
        return 1
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _stop(processes)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 256:
        raise argparse.ArgumentTypeError("the number of servers must be between 1 and 256")
    return count


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise Terminated


def _start(
    processes: dict[str, subprocess.Popen[str]], options: argparse.Namespace, port: int
) -> str:
    """Starts the servers, and adds them to the processes. Returns the coordinator's address."""
    memory = options.memory or _part_of_memory(options.servers)
    listen = ["--listen", f"127.0.0.1:{port}"]
    said = _serve(processes, "coordinator", ["coordinator", *listen, "--log", options.log])
    address = said["address"]
    print(f"coordinator  {address}   status page http://{said['admin']}", flush=True)
    for number in range(1, options.servers + 1):
        name = f"server-{number}"
        flags = ["--coordinator", address, "--id", name, "--log", options.log]
        flags += ["--memory", memory] if memory else []
        said = _serve(processes, name, ["shard", *flags, "--listen", "127.0.0.1:0"])
        print(f"{name:11}  {said['address']}   metrics http://{said['admin']}", flush=True)
    return address


def _part_of_memory(servers: int) -> str | None:
    """An equal part of the memory of this machine or container, if the system tells how much that
    is."""
    memory = available_memory()
    return None if memory is None else str(memory // servers)


def _serve(
    processes: dict[str, subprocess.Popen[str]], name: str, arguments: Sequence[str]
) -> dict[str, str]:
    """Starts a server. Returns the line in which it reports its addresses."""
    process = subprocess.Popen(
        [program("zeroshard-server"), *arguments, "--admin-listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C reaches only this process, which stops the servers after the command has ended.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    processes[name] = process
    assert process.stdout is not None
    log = threading.Thread(target=_show_log, args=(name, process), daemon=True)
    log.start()
    timer = threading.Timer(START_TIMEOUT, process.kill)
    timer.daemon = True
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line:
        log.join()
        raise StartError(f"{name} has not started (exit code {process.wait()})")
    said: dict[str, str] = json.loads(line)
    return said


def _show_log(name: str, process: subprocess.Popen[str]) -> None:
    """Copies the log of a server to standard error."""
    assert process.stderr is not None
    for line in process.stderr:
        if not _stopping.is_set():
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)


def _stop(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Stops all servers."""
    _stopping.set()
    for process in processes.values():
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT
    for process in processes.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Lets the kernel stop this process when the launcher has been killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _run_command(
    command: Sequence[str], address: str, processes: dict[str, subprocess.Popen[str]]
) -> int:
    """Runs a command with the address of the cluster. Returns its exit code."""
    try:
        worker = subprocess.Popen(command, env={**os.environ, "ZEROSHARD_ADDRESS": address})
    except OSError as error:
        raise StartError(f"cannot run {command[0]!r}: {error.strerror}") from error
    lost = ""
    while True:
        try:
            _wait_for_an_end()
            if worker.poll() is not None:
                break
            ended = _ended(processes)
            if ended and not lost:
                # The job may continue on other servers. Otherwise its workers say why not.
                lost = ended
                print(f"zeroshard launch: {lost}", file=sys.stderr)
        except Terminated:
            worker.terminate()
        except KeyboardInterrupt:
            pass  # The terminal has sent Ctrl-C to the command, too, which ends when it is ready.
    code = worker.returncode
    return code if code >= 0 else 128 - code


def _first_end(processes: dict[str, subprocess.Popen[str]]) -> int:
    """Waits until a server ends, which only happens after a failure."""
    while not (ended := _ended(processes)):
        _wait_for_an_end()
    print(f"zeroshard launch: {ended}; the cluster is stopped", file=sys.stderr)
    return 1


def _wait_for_an_end() -> None:
    """Waits until a child process has ended that nobody has asked for its exit code yet."""
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def _ended(processes: dict[str, subprocess.Popen[str]]) -> str:
    """Asks all servers for their exit codes. Names the first one that has ended; empty if all
    run."""
    ended = [
        f"{name} has ended (exit code {process.returncode})"
        for name, process in processes.items()
        if process.poll() is not None
    ]
    return ended[0] if ended else ""
