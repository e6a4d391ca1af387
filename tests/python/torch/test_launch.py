"""`zeroshard launch`, `plan` and `doctor`, with the servers and zsctl that the workspace built."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import servers

PROGRAMS = servers.BINARY.parent
TRAINING = """
import torch, zeroshard as zs
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
zs.init()
zs.shard(model, optimizer)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("servers", len(zs.status().servers))
raise SystemExit(7)
"""


def start(*arguments: str, path: str | None = None) -> subprocess.Popen[str]:
    """Starts `zeroshard`. As after the installation of a wheel, the programs are on the path."""
    search = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]) if path is None else path
    return subprocess.Popen(
        [sys.executable, "-m", "zeroshard", *arguments],
        env={**os.environ, "PATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets its background processes ignore Ctrl-C, and the tests may be one of them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def servers_of(pid: int) -> list[int]:
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def has_gone(pids: list[int]) -> bool:
    """Waits until none of the processes is there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                # It can be read when the process has ended.
                if not select.select([process], [], [], 60)[0]:
                    return False
            finally:
                os.close(process)
    return True


def running(*arguments: str) -> tuple[subprocess.Popen[str], str, list[int]]:
    """Starts a cluster without a command. Returns the launcher, the coordinator's address, and the
    processes of the servers."""
    launcher = start("launch", *arguments)
    assert launcher.stdout is not None
    address = launcher.stdout.readline().split()[1]
    for line in launcher.stdout:
        if "ZEROSHARD_ADDRESS" in line:
            return launcher, address, servers_of(launcher.pid)
    raise AssertionError(launcher.communicate())


def test_a_command_runs_with_the_address_of_a_cluster_that_ends_after_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = ["--servers", "2", "--memory", "1GiB", "--", sys.executable, str(script)]
    output, errors = (launcher := start("launch", *command)).communicate(timeout=120)
    assert launcher.returncode == 7, errors
    assert "servers 2" in output
    assert "WARN" not in errors and "ERROR" not in errors


def test_ctrl_c_and_sigterm_stop_all_servers() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        launcher, _, processes = running("--servers", "2", "--port", "0")
        assert len(processes) == 3
        launcher.send_signal(number)
        launcher.communicate(timeout=60)
        assert launcher.returncode == code
        assert not any(map(is_there, processes))


def test_a_killed_launcher_leaves_no_servers() -> None:
    launcher, _, processes = running("--port", "0")
    launcher.kill()
    launcher.communicate(timeout=60)
    assert has_gone(processes)


def test_a_cluster_whose_server_dies_is_stopped() -> None:
    launcher, _, processes = running("--port", "0")
    os.kill(processes[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "server-1 has ended (exit code -9)" in errors
    assert not any(map(is_there, processes))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["launch", "--servers", "0"], 2, "the number of servers must be between 1 and 256"),
        (["launch", "--memory", "7x"], 1, "server-1 has not started (exit code 2)"),
        (["launch", "--", "no-such-program"], 1, "cannot run 'no-such-program'"),
        ([], 2, "required: COMMAND"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], code: int, message: str) -> None:
    launcher = start(*arguments)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert message in errors


def test_without_the_programs_the_error_names_the_wheel() -> None:
    launcher = start("launch", path="/nowhere")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "zeroshard-server is not installed; install the wheel of a release" in errors


def test_plan_and_doctor_are_those_of_zsctl() -> None:
    flags = ["--parameters", "1000000", "--ranks", "2", "--json"]
    output, errors = start("plan", *flags).communicate(timeout=60)
    assert json.loads(output)["servers_bytes"] == 16_000_000, errors
    doctor = start("doctor", "--address", "127.0.0.1:1", "--timeout", "1")
    output, _ = doctor.communicate(timeout=60)
    assert doctor.returncode == 3
    assert "127.0.0.1:1 is unavailable" in output
