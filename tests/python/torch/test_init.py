"""Connecting to a cluster, using it and disconnecting: in a single process, on several ranks, and
after errors."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import zeroshard as zs
from environment import IS_LONG
from servers import BINARY, servers
from zeroshard._native import Cluster
from zeroshard.torch import group_sharded_parallel

#: A script of a user's, for one rank or several.
SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel


def train():
    torch.manual_seed(0)
    model = nn.Linear(30, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g")
    for _ in range(3):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # In one piece: the ranks share standard output.
    os.write(1, f"hash {optimizer.state_hash()} ".encode())


def spawned(rank, file):
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    zs.init()
    train()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.spawn(spawned, (sys.argv[1],), nprocs=2)
    else:
        zs.init()
        train()
"""
#: What a script may take, in seconds.
TIMEOUT = 90


def run_script(folder: Path, *command: str) -> str:
    """Runs SCRIPT. Returns its output."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    full = [sys.executable, *(str(script) if part == "SCRIPT" else part for part in command)]
    done = subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "panicked" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def sharded(numel: int = 40, level: str = "os") -> tuple[Any, Any]:
    """A small sharded model and its optimizer."""
    model = nn.Linear(numel, 1, bias=False)
    return group_sharded_parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), level)[:2]


def finds_every_way(rank: int) -> None:
    """A single process with an embedded cluster, repeatedly, and as a context manager."""
    assert os.environ.get("ZEROSHARD_ADDRESS") is None
    with pytest.raises(zs.NotInitialisedError):
        zs.status()
    zs.shutdown()
    session = zs.init(shards=3)
    assert session.address.startswith("127.0.0.1:") and len(session.status().servers) == 3
    with pytest.raises(zs.InvalidArgumentError, match="other values of shards.*shutdown"):
        zs.init()
    model, optimizer = sharded()
    status = zs.status()
    assert len(status.servers) == 3
    assert [(job.parameters, job.joined) for job in status.jobs] == [(40, [0])]
    assert "3 shard servers" in str(status) and "40 parameters" in str(status)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    assert zs.status().jobs[0].version == 1
    zs.shutdown()
    zs.shutdown()
    with pytest.raises(zs.NotInitialisedError):
        zs.status()
    with pytest.raises(zs.Error):
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    # The former name of `timeout` is still accepted.
    with zs.init(deadline=60.0) as session:
        assert len(zs.status().servers) == 1
        sharded()
    with pytest.raises(zs.NotInitialisedError):
        zs.status()
    # Its embedded cluster has ended: nobody would answer.
    with pytest.raises(zs.NotInitialisedError, match="closed by"):
        session.status()
    # Without init, the first use starts a cluster.
    kept = sharded()
    assert len(zs.status().jobs) == 1
    del kept


def test_an_embedded_cluster_starts_and_stops() -> None:
    ranks.run(1, finds_every_way, init=None)


def finds_servers(rank: int, address: str, by_argument: bool) -> tuple[str, int, int]:
    """The servers and jobs that a rank finds."""
    with zs.init(address if by_argument else None):
        kept = sharded()
        dist.barrier()
        status = zs.status()
        ours = [job for job in status.jobs if job.parameters == 40]
        result = status.address, len(status.servers), len(ours)
        dist.barrier()
        del kept
    return result


#: What a process keeps until it ends.
KEPT: list[Any] = []


def goes_on_without_rank_0(rank: int) -> None:
    """Rank 1 uses the cluster inside rank 0 after rank 0 has returned."""
    KEPT.append(sharded())
    while rank == 1 and zs.status().jobs[0].joined != [1]:
        pass


def test_a_process_of_multiprocessing_hosts_the_cluster_until_the_others_have_left() -> None:
    ranks.run(2, goes_on_without_rank_0, init="env", timeout=30)


def names_of_jobs(rank: int) -> list[str]:
    """The name of the job of each run."""
    names = []
    for script, name in (
        ("/home/me/train gpt.py", None),
        ("-c", None),
        ("", None),
        ("train.py", "my-run.2"),
    ):
        sys.argv = [script]
        with zs.init(name=name):
            model = nn.Linear(4, 2)
            kept = group_sharded_parallel(model, torch.optim.SGD(model.parameters(), 0.1), "os")
            names += [job.name for job in zs.status().jobs]
            del kept
    for wrong in ("", "a/b", "x" * 65):
        with pytest.raises(zs.InvalidArgumentError, match="name is '"):
            zs.init(name=wrong)
    return names


def test_jobs_have_the_name_of_the_script_or_a_given_one() -> None:
    (names,) = ranks.run(1, names_of_jobs, init=None)
    for found, expected in zip(names, ("train_gpt", "c", "python", "my-run.2"), strict=True):
        assert re.fullmatch(rf"{expected}-[0-9a-f]{{8}}/sharded-0/all", found)


def test_servers_are_found_by_environment_and_argument(processes: dict[str, str]) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    for by_argument in (False, True):
        found = ranks.run(
            2, finds_servers, address, by_argument, env={} if by_argument else processes
        )
        assert found == [(address, 2, 1)] * 2


def finds_rank_0(rank: int, when: str) -> str:
    """Ranks that only know each other."""
    if when == "after init_process_group":
        dist.init_process_group("gloo")
    zs.init()
    if when == "before init_process_group":
        dist.init_process_group("gloo")
    model, optimizer = sharded()
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    hash: str = optimizer.state_hash()
    zs.shutdown()
    # Once more, in the same processes.
    zs.init()
    sharded()
    zs.shutdown()
    return hash


@pytest.mark.parametrize(
    "when", ["before init_process_group", "after init_process_group", "without a process group"]
)
def test_rank_0_hosts_the_cluster_and_the_others_find_it(when: str) -> None:
    first, second = ranks.run(2, finds_rank_0, when, init="env")
    assert first == second


def leaves_and_stays(rank: int) -> float:
    """Rank 0 closes its session, and rank 1 uses the job for another second. Returns when rank 0
    had closed it, or when rank 1 began to."""
    zs.init()
    _, optimizer = sharded()
    if rank == 0:
        zs.shutdown()
        return time.monotonic()
    while zs.status().jobs[0].joined != [1]:
        pass
    until = time.monotonic() + 1
    while time.monotonic() < until:
        optimizer.state_hash()
    began = time.monotonic()
    zs.shutdown()
    return began


def test_rank_0_keeps_the_cluster_until_the_others_have_left() -> None:
    closed, others_began = ranks.run(2, leaves_and_stays, init="env")
    assert closed >= others_began


@pytest.mark.skipif(
    not IS_LONG, reason="torchrun starts examples, too, and tests/run long this script"
)
def test_script_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run_script(tmp_path, *launcher, "SCRIPT")
    hashes = re.findall(r"hash (\w+)", printed)
    assert len(hashes) == 2 and hashes[0] == hashes[1], printed


def test_script_with_mp_spawn(tmp_path: Path) -> None:
    printed = run_script(tmp_path, "SCRIPT", str(tmp_path / "rendezvous"))
    hashes = re.findall(r"hash (\w+)", printed)
    assert len(hashes) == 2 and hashes[0] == hashes[1], printed


def interrupted(rank: int) -> float:
    """Rank 0 waits for a rank that never joins. Returns the seconds from Ctrl-C to the end of the
    wait."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ranks.LOOPBACK,
        "MASTER_PORT": str(ranks.free_port()),
    }
    zs.init()
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1.0, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        model, optimizer = sharded()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    return time.monotonic() - sent[0]


def test_ctrl_c_ends_a_wait_at_once() -> None:
    assert ranks.run(1, interrupted, init=None)[0] < 1.0


def waits_for_nobody(rank: int) -> str:
    """A rank whose peer never joins. Returns its error."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ranks.LOOPBACK,
        "MASTER_PORT": str(ranks.free_port()),
    }
    zs.init(timeout=2.0)
    with pytest.raises(zs.TimeoutError) as raised:
        model, optimizer = sharded()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    return str(raised.value)


def test_a_wait_for_a_rank_that_never_joins_times_out_and_names_it() -> None:
    assert re.search(r"rank.*1", ranks.run(1, waits_for_nobody, init=None)[0])


def test_an_unreachable_address_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    """In its own process, to check its whole output."""
    code = "import zeroshard as zs; zs.init('127.0.0.1:%d', timeout=2.0)" % ranks.free_port()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 1 and time.monotonic() - began < 10
    assert re.search(
        r"^zeroshard\.errors\.UnavailableError: .*127\.0\.0\.1",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    assert "panicked" not in done.stderr
    with pytest.raises((zs.Error, ValueError)):
        zs.init("not an address", timeout=2.0)


@pytest.fixture(scope="module")
def unreachable() -> Iterator[dict[str, str]]:
    """Addresses at which no coordinator answers, by the cause."""
    with contextlib.ExitStack() as stack:

        def listener(backlog: int) -> tuple[str, int]:
            listening = stack.enter_context(socket.socket())
            listening.bind((ranks.LOOPBACK, 0))
            listening.listen(backlog)
            address: tuple[str, int] = listening.getsockname()
            return address

        silent, full = listener(8), listener(0)
        for _ in range(3):  # the kernel drops further connections, like a host that is gone
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full)
        yield {
            "Connection refused": f"{ranks.LOOPBACK}:{ranks.free_port()}",
            "there was no answer": f"{silent[0]}:{silent[1]}",
            "deadline has elapsed": f"{full[0]}:{full[1]}",
        }


def test_an_address_without_a_coordinator_is_named_with_the_cause_after_the_connect_timeout(
    unreachable: dict[str, str],
) -> None:
    def connect(address: str) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(zs.UnavailableError) as raised:
            Cluster.connect(address, connect_timeout=2.0)
        return str(raised.value), time.monotonic() - began

    with ThreadPoolExecutor(len(unreachable)) as pool:
        found = list(pool.map(connect, unreachable.values()))
    for (cause, address), (message, seconds) in zip(unreachable.items(), found, strict=True):
        assert address in message and cause in message and "2s" in message, message
        # Much less than the default timeout of operations.
        assert "zeroshard-server coordinator" in message and seconds < 60.0


def connects_to_nothing(rank: int, address: str) -> str:
    """Every rank passes the same address. Returns the error."""
    with pytest.raises(zs.UnavailableError) as raised:
        zs.init(address, connect_timeout=0.5)
    return str(raised.value)


def test_every_rank_gets_the_error_of_rank_0_which_connects_first(
    unreachable: dict[str, str],
) -> None:
    address = unreachable["Connection refused"]
    messages = ranks.run(2, connects_to_nothing, address)
    assert all(address in message for message in messages)
    assert "rank 0 could not connect" in messages[1]


def tries_tokens(rank: int, address: str) -> None:
    """Connects with a wrong, a missing and the right token."""
    for token in ("wrong", None):
        with pytest.raises(zs.UnauthenticatedError):
            with zs.init(address, token, timeout=5.0):
                zs.status()
        zs.shutdown()
    with zs.init(address, "secret") as session:
        sharded()
        assert session.address == address
    os.environ["ZEROSHARD_TOKEN"] = "secret"
    with zs.init(address):
        assert len(zs.status().servers) == 1


def test_only_the_right_token_opens_a_cluster() -> None:
    with servers(1, ["--token", "secret"]) as address:
        ranks.run(1, tries_tokens, address, init=None)


def tries_certificates(rank: int, address: str, directory: str) -> None:
    """Connects without TLS, then without a certificate, then with an operator's certificate."""
    with pytest.raises(zs.TlsError, match="set ZEROSHARD_TLS_CA"), zs.init(address):
        pass
    os.environ["ZEROSHARD_TLS_CA"] = f"{directory}/ca.pem"
    with pytest.raises(zs.UnauthenticatedError), zs.init(address):
        pass
    os.environ["ZEROSHARD_TLS_CERT"] = f"{directory}/admin.pem"
    with pytest.raises(zs.InvalidArgumentError, match="key"), zs.init(address):
        pass
    os.environ["ZEROSHARD_TLS_KEY"] = f"{directory}/admin-key.pem"
    with zs.init(address):
        sharded()
    # A cluster that the program starts itself does not use TLS.
    with zs.init():
        sharded()
    del os.environ["ZEROSHARD_TLS_CA"]
    with pytest.raises(zs.InvalidArgumentError, match="ZEROSHARD_TLS_CA"), zs.init(address):
        pass


def test_a_certificate_opens_a_cluster_with_tls(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    subprocess.run([BINARY, "dev-certs", directory], check=True, stdout=subprocess.DEVNULL)
    flags = [
        f"--tls-ca={directory}/ca.pem",
        f"--tls-cert={directory}/server.pem",
        f"--tls-key={directory}/server-key.pem",
    ]
    with servers(1, flags) as address:
        ranks.run(1, tries_certificates, address, str(directory), init=None)


def names_no_collector(rank: int) -> None:
    """An endpoint that is not a URL."""
    os.environ["ZEROSHARD_OTLP_ENDPOINT"] = "nowhere"
    with zs.init(), pytest.raises(zs.InvalidArgumentError, match="OTLP"):
        sharded()


def test_a_collector_of_traces_that_is_no_url_is_refused() -> None:
    ranks.run(1, names_no_collector, init=None)


def test_the_spans_of_a_script_are_sent_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector only receives. The spans are not compressed, so their names are readable."""
    received = bytearray()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            while not all(name in received for name in (b"zeroshard-worker", b"commit", b"apply")):
                piece = connection.recv(65536)
                if not piece:
                    break
                received.extend(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = threading.Thread(target=receive, daemon=True)
        reader.start()
        collector = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("ZEROSHARD_OTLP_ENDPOINT", collector)
        run_script(tmp_path, "SCRIPT")
        reader.join(TIMEOUT)
    for name in (b"zeroshard-worker", b"push", b"receive", b"commit", b"apply"):
        assert name in received, bytes(received)


def uploads(rank: int, terminal: bool) -> str:
    """The output on standard error during an upload of 280 MB."""
    read, write = pty.openpty() if terminal else os.pipe()
    os.environ["TERM"] = "xterm"
    before = os.dup(2)
    os.dup2(write, 2)
    zs.init()
    text = bytearray()
    done = threading.Event()

    def drain() -> None:
        while not done.is_set() or select.select([read], [], [], 0)[0]:
            if select.select([read], [], [], 0.05)[0]:
                text.extend(os.read(read, 65536))

    reader = threading.Thread(target=drain)
    reader.start()
    sharded(70_000_000)
    zs.shutdown()
    done.set()
    reader.join()
    os.dup2(before, 2)
    return text.decode()


def test_progress_shows_on_a_terminal_only() -> None:
    assert "MiB" in ranks.run(1, uploads, True, init=None)[0]
    (line,) = ranks.run(1, uploads, False, init=None)[0].splitlines()
    assert line.startswith("zeroshard: ") and "70.0 M parameters" in line
