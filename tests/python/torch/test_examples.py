"""The examples run in a single process and under torchrun, and the sharded ones differ from plain
torch by a few lines."""

from __future__ import annotations

import difflib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environment import IS_LONG
from pages import Block, of_kinds
from processes import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "client" / "python" / "examples"
#: What an example may take, in seconds: several times what it promises, since other tests run at
#: the same time.
TIMEOUT = 300
#: Texts enough for a GPT, which are found faster than those of the whole repository.
TEXTS = ["--data", str(ROOT / "client")]
#: What ends a script for reasons that are not its own: threads of torch's process groups now and
#: then end a rank that has done everything already, and another process may take the port that
#: Lightning has found free.
NOT_ITS_OWN = ("terminate called without an active exception", "EADDRINUSE")
#: The variables of a launcher. Lightning sets them in the process of a test that trains with it,
#: and that process may still listen at the port.
LAUNCHED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"}
#: Launchers of a script.
ALONE, TORCHRUN, TWO_RANKS = "alone", "torchrun", "two ranks"


@functools.cache
def run(script: Path, *arguments: str, launcher: str = ALONE, cwd: Path | None = None) -> str:
    """The output of a script, on two ranks that of rank 0."""
    command = [sys.executable, str(script), *arguments]
    if launcher == TORCHRUN:
        own = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command[1:1] = own
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    for _ in range(2):
        environments = rank_environments() if launcher == TWO_RANKS else [{}]
        running = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=cwd,
                env={**inherited, **environment},
            )
            for environment in environments
        ]
        try:
            printed = [process.communicate(timeout=TIMEOUT) for process in running]
        finally:
            for process in running:
                process.kill()
        if not any(cause in errors for _, errors in printed for cause in NOT_ITS_OWN):
            break
    everything = "".join(output + errors for output, errors in printed)
    for process, (_, errors) in zip(running, printed, strict=True):
        assert process.returncode == 0, everything
        assert "panicked" not in errors and "Traceback" not in errors, errors
    return printed[0][0]


def rank_environments() -> list[dict[str, str]]:
    """The environments that torchrun gives two ranks. Importing torch for torchrun itself takes
    seconds, so one test uses it."""
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        # torchrun sets it too, if there is more than one rank.
        "OMP_NUM_THREADS": "1",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_sharded_examples_differ_from_plain_ones_by_a_few_lines(name: str) -> None:
    plain, sharded = (
        (EXAMPLES / f"{name}{kind}.py").read_text().splitlines() for kind in ("", "_sharded")
    )
    changes = [
        line for line in difflib.ndiff(plain, sharded) if line[0] in "+-" and line[2:].strip()
    ]
    assert 3 <= len(changes) <= 5 and all(line.startswith("+") for line in changes)


@pytest.mark.parametrize("launcher", [ALONE, TORCHRUN])
def test_digits_are_learned(launcher: str) -> None:
    printed = run(EXAMPLES / "digits_sharded.py", "--epochs", "2", launcher=launcher)
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert len(accuracies) == 2 and accuracies[-1] > 0.9


@pytest.mark.parametrize("launcher", [ALONE, TWO_RANKS])
def test_gpt_learns(launcher: str) -> None:
    printed = run(EXAMPLES / "gpt_sharded.py", "--steps", "20", *TEXTS, launcher=launcher)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]
    # A guess among 256 bytes has a loss of 5.5.
    assert len(losses) == 2 and losses[-1] < 4.0
    assert re.search(r"accuracy 0\.\d+$", printed.strip())


def test_in_a_single_process_the_sharded_example_prints_the_same_losses() -> None:
    plain, sharded = (
        run(EXAMPLES / f"digits{kind}.py", "--epochs", "2") for kind in ("", "_sharded")
    )
    first, second = (
        [float(number) for number in re.findall(r"\d\.\d+", text)] for text in (plain, sharded)
    )
    assert len(first) == 4 and first == pytest.approx(second, abs=0.02)


@pytest.mark.parametrize("block", of_kinds("script"), ids=str)
def test_scripts_in_the_documentation_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block.text)
    losses = [
        float(number)
        for number in re.findall(r"loss (\d+\.\d+)", run(Path("script.py"), cwd=tmp_path))
    ]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not IS_LONG, reason="tests/run long trains it, for more than a minute")
def test_a_gpt_on_a_mesh_writes_the_same_text_in_plain_torch() -> None:
    script = EXAMPLES / "gpt_tensor_parallel.py"
    printed = run(script, "--steps", "20", *TEXTS, launcher=TWO_RANKS)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 1 and losses[-1] < 4.0
    assert printed.strip().endswith("loaded into plain torch it writes the same")


def test_parallel_styles_train_as_the_dense_network() -> None:
    printed = run(EXAMPLES / "tensor_parallel.py", "--steps", "60", launcher=TWO_RANKS)
    losses = [
        tuple(map(float, pair)) for pair in re.findall(r"loss (\d\.\d+) -> (\d\.\d+)", printed)
    ]
    assert len(losses) == 4 and losses[0][1] < losses[0][0] / 10
    assert all(pair == pytest.approx(losses[0], rel=1e-3) for pair in losses)
    parameters, here = map(int, re.findall(r"parameters (\d+), on this rank (\d+)", printed)[0])
    # All but the last bias is cut.
    assert here == (parameters - 32) / 2 + 32


def test_a_model_on_a_mesh_trains_evaluates_and_predicts() -> None:
    printed = run(EXAMPLES / "dist_model.py", "--steps", "80", "--programs", launcher=TWO_RANKS)
    first, last, evaluated = map(
        float, re.findall(r"loss (\d\.\d+) -> (\d\.\d+), evaluated (\d\.\d+)", printed)[0]
    )
    assert last < first / 2 and evaluated < first / 2
    assert float(re.findall(r"accuracy (\d\.\d+)", printed)[0]) > 0.7
    assert printed.count("dist main program of ") == 3 and "push" in printed


@pytest.mark.skipif(not IS_LONG, reason="five processes of torch: tests/run long runs it")
def test_a_policy_learns_while_its_rollout_processes_are_killed() -> None:
    printed = run(EXAMPLES / "policy_gradient.py", "--steps", "40", "--kill-every", "2")
    rewards = [float(number) for number in re.findall(r"reward (\d\.\d+)", printed)]
    # A random digit has a mean reward of 0.1.
    assert len(rewards) == 2 and rewards[-1] > rewards[0] + 0.03
    lines = printed.strip().splitlines()[-5:]
    assert lines[0].split()[:4] == ["rollout", "processes", "versions", "copies"]
    places = [[int(number) for number in line.split()[:4]] for line in lines[1:]]
    assert [number for number, *_ in places] == [0, 1, 2, 3]
    # Each process makes a full copy when it begins, unless it is killed before, and no other one.
    assert all(copies <= processes for _, processes, _, copies in places)
    assert sum(copies for *_, copies in places) > len(places)
    assert sum(versions for _, _, versions, _ in places) == 40
