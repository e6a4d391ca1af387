"""The programs of Paddle's documentation run on two processes, with changed import lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "client/python/examples"
NAMES = (
    "data_parallel",
    "fused_allreduce",
    "no_sync",
    "group_sharded",
    "shard_layer",
    "dist_model",
)
TIMEOUT = 90


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Starts all programs at once, since Paddle's ranks poll for each other every three seconds."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PADDLE_", "ZEROSHARD_"))
    }
    found: dict[str, tuple[subprocess.Popen[str], Path]] = {}
    try:
        for name in NAMES:
            folder = tmp_path_factory.mktemp(name)
            launch = [
                "-m",
                "paddle.distributed.launch",
                "--nproc_per_node",
                "2",
                "--log_dir",
                str(folder / "log"),
            ]
            command = [
                sys.executable,
                *([] if name == "data_parallel" else launch),
                str(EXAMPLES / f"paddle_{name}.py"),
            ]
            with (folder / "said").open("w") as said:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=said,
                    stderr=said,
                    text=True,
                    start_new_session=True,
                )
            found[name] = process, folder
        yield found
    finally:
        for process, _ in found.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(running: dict[str, tuple[subprocess.Popen[str], Path]], name: str) -> dict[int, list[str]]:
    """The output of each of the two ranks of an example."""
    process, folder = running[name]
    status = process.wait(TIMEOUT)
    text = "".join(
        path.read_text() for path in [folder / "said", *sorted(folder.glob("log/workerlog.*"))]
    )
    assert status == 0, text
    found: dict[int, list[str]] = {0: [], 1: []}
    # Two processes that share an output may write their lines into one.
    for line in dict.fromkeys(re.findall(r"rank \d: .*?(?=rank \d: |$)", text, re.MULTILINE)):
        found[int(line[5])].append(line[8:])
    return found


@pytest.mark.parametrize("name", ["data_parallel", "fused_allreduce", "no_sync", "group_sharded"])
def test_ranks_end_with_the_same_values(running: Any, name: str) -> None:
    found = said(running, name)
    last = [re.findall(r"(?:weights|gradient|state) (\S+)", found[rank][-1]) for rank in (0, 1)]
    assert last[0] and last[0] == last[1]


def test_each_rank_has_a_part_of_a_sharded_layer(running: Any) -> None:
    found = said(running, "shard_layer")
    expected = ["fc1.weight [Shard(dim=0)], here [4, 8]", "fc2.weight [Replicate()]"]
    assert found == {0: expected, 1: expected}


def test_a_dist_model_trains_is_evaluated_and_predicts(running: Any) -> None:
    found = said(running, "dist_model")
    assert found[0] == found[1]
    train, evaluated, predicted = found[0]
    assert float(evaluated.split()[1]) < float(train.split()[1])
    assert predicted == "predict paddle.Size([4, 8])"
