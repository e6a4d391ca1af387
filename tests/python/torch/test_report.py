"""``zeroshard.report``, the lines at the beginning and the end of a training, and the parameters of
a small model that a worker keeps."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import ranks
import zeroshard as zs
from zeroshard.torch import DataParallel, group_sharded_parallel, to_static

#: Of the model below: 6 blocks, whose matrices have 25,600 to 76,800 elements.
WIDTH, LAYERS = 160, 6
STEPS = 2


def gpt(level: str, **options: Any) -> tuple[Any, Any]:
    """A sharded GPT and its optimizer."""
    torch.manual_seed(0)
    model = models.GPT(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return group_sharded_parallel(model, optimizer, level, **options)[:2]


def train(model: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*models.batch("gpt", step, 2)).backward()
        optimizer.step()


def nbytes(model: Any) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_a_report_has_the_bytes_on_both_sides_and_on_the_way(
    cluster: zs.Session, level: str
) -> None:
    model, optimizer = gpt(level, accumulation_steps=1)
    fresh = zs.report(model)
    train(model, optimizer)
    report = zs.report(model)
    whole = nbytes(model)
    assert (report.level, report.steps, fresh.steps) == (level, STEPS, 0)
    assert report.job in [job.name for job in zs.status().jobs]
    # Each step pushes all gradients and pulls all parameters: at p_g_os twice, forward and
    # backward, unless servers show them.
    pushed, pulled = (
        report.pushed_bytes - fresh.pushed_bytes,
        report.pulled_bytes - fresh.pulled_bytes,
    )
    assert pushed == STEPS * whole
    if level != "p_g_os":
        assert pulled == STEPS * whole
        assert report.parameter_bytes == whole and report.peak_gathered_bytes == 0
    else:
        assert STEPS * whole < pulled < (2 * STEPS + 1) * whole
        assert report.parameter_bytes < whole / 2
    assert report.gradient_bytes == (whole if level == "os" else 0)
    assert report.waited["commit"] > fresh.waited["commit"]
    assert sum(report.waited.values()) < report.seconds


def test_a_report_is_a_table(cluster: zs.Session) -> None:
    model, optimizer = gpt("p_g_os")
    train(model, optimizer)
    lines = str(zs.report(model)).splitlines()
    assert lines[0].startswith(f"job {zs.report(model).job}, level p_g_os: {STEPS} steps in ")
    assert lines[1].split() == ["parameters", "gradients", "optimizer", "state"]
    assert lines[2].split()[:2] == ["this", "worker"]
    assert lines[3].split()[:2] == ["server", "at"]
    assert len({len(line) for line in lines[1:4]}) == 1
    assert lines[-2].startswith("pulled ") and "at a time" in lines[-2]
    assert lines[-1].startswith("waited ")


def test_a_report_is_a_flat_dict_of_numbers_for_loggers(cluster: zs.Session) -> None:
    model, optimizer = gpt("p_g_os")
    train(model, optimizer)
    report = zs.report(model)
    numbers = report.as_dict()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert {name.removeprefix("zeroshard/") for name in numbers} == {
        *("steps", "seconds", "parameter_bytes", "gradient_bytes", "peak_gathered_bytes"),
        *("pulled_bytes", "pushed_bytes", "server_bytes"),
        *("waited_seconds/pull", "waited_seconds/push", "waited_seconds/commit"),
    }
    assert numbers["zeroshard/steps"] == STEPS
    assert numbers["zeroshard/pushed_bytes"] == report.pushed_bytes
    assert numbers["zeroshard/waited_seconds/commit"] == report.waited["commit"]


def test_a_report_accepts_what_belongs_to_a_sharded_model(cluster: zs.Session) -> None:
    model, optimizer = gpt("os")
    plain = torch.nn.Linear(20, 2)
    distributed = to_static(
        plain, loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD(plain.parameters(), lr=0.1)
    )
    jobs = [zs.report(one).job for one in (model, optimizer, model.module, model.blocks[0])]
    assert len(set(jobs)) == 1
    assert zs.report(distributed).job == zs.report(plain).job != jobs[0]
    for other in (torch.nn.Linear(2, 2), 3):
        with pytest.raises(zs.InvalidArgumentError, match="not sharded"):
            zs.report(other)


def by_unit(rank: int) -> None:
    """Over gRPC, because over shared memory servers show the parameters."""
    with zs.init(transport="grpc"):
        cut, kept = gpt("p_g_os"), gpt("p_g_os", segment_size=2**20)
        for model, optimizer in (cut, kept):
            train(model, optimizer)
        report = zs.report(cut[0])
        assert 0 < report.peak_gathered_bytes <= nbytes(cut[0]) / LAYERS
        # Norms, biases and the embedding of 32 tokens stay.
        assert report.parameter_bytes <= nbytes(cut[0]) / LAYERS * 2
        assert zs.report(kept[0]).peak_gathered_bytes == 0
        assert cut[1].state_hash() == kept[1].state_hash()


def test_by_default_a_small_gpt_is_on_the_worker_by_unit_with_the_same_bits() -> None:
    ranks.run(1, by_unit, init=None)


def in_two_sessions(rank: int) -> tuple[list[str], str]:
    """The messages of a rank that shards a model, then of one that uses DataParallel; and the text
    of a report."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect()
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    zs.init(name="first")
    model, optimizer = gpt("p_g_os")
    train(model, optimizer)
    # Servers report within a second.
    end = time.monotonic() + 30
    while (server := zs.report(model).servers[0]).state_bytes == 0:
        assert time.monotonic() < end, server
    assert (server.master_bytes, server.state_bytes) == (nbytes(model), 2 * nbytes(model))
    text = str(zs.report(model))
    zs.shutdown()
    zs.init(name="second")
    plain = torch.nn.Linear(20, 2)
    averaged = DataParallel(plain)
    averaged(torch.ones(2, 20)).sum().backward()
    zs.shutdown()
    zs.init(name="third")
    gpt("os_g")  # makes no step
    zs.shutdown()
    return messages, text


def test_rank_0_says_what_is_held_where_and_what_the_training_has_cost() -> None:
    (messages, _), (of_rank_1, text) = ranks.run(2, in_two_sessions)
    assert of_rank_1 == []
    assert "level p_g_os" in text
    start, end, averaged, other = messages
    assert start.startswith("first-") and ", level p_g_os: 1.2 M parameters on 1 shard " in start
    assert "each worker keeps 15,040 of them" in start and "the largest has 76,800;" in start
    assert start.endswith("gradients and optimizer state are on the servers")
    assert end.startswith("first-") and f": {STEPS} steps in " in end and " waited " in end
    assert averaged.startswith("second-") and ": 1 step in " in averaged
    assert other.startswith("third-") and "each worker holds all parameters;" in other


#: Prints what it has to say on standard output.
SCRIPT = """
import logging, sys, torch
import zeroshard as zs
from zeroshard.torch import group_sharded_parallel

for name in ("loud", "silent", "warnings"):
    with zs.init(name=name):
        model = torch.nn.Linear(20, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        print(name)
    if name == "loud":
        logging.getLogger("zeroshard").setLevel(logging.WARNING)
    else:
        logging.getLogger("zeroshard").setLevel(logging.NOTSET)
        logging.basicConfig(level=logging.WARNING)
try:
    zs.report(model)
except zs.NotInitialisedError:
    print("ended")
"""


def test_without_logging_the_lines_are_on_standard_error_until_they_are_silenced(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loud\nsilent\nwarnings\nended\n"
    said = done.stderr.splitlines()
    assert len(said) == 2 and all(line.startswith("zeroshard: loud-") for line in said), said
