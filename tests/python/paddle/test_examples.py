"""The programs of Paddle's own pages run on two processes, with their import lines changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "client/python/examples"
TIMEOUT = 60


def said(name: str, folder: Path) -> dict[int, list[str]]:
    """What each of two ranks of an example has printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "ZEROSHARD_"))}
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(folder / "log")]
    script = str(EXAMPLES / f"paddle_{name}.py")
    command = [sys.executable, script] if name == "data_parallel" else [sys.executable, *launch, script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    text = done.stdout + "".join(path.read_text() for path in sorted(folder.glob("log/workerlog.*")))
    assert done.returncode == 0, text + done.stderr
    found: dict[int, list[str]] = {0: [], 1: []}
    for line in dict.fromkeys(re.findall(r"rank \d: .*", text)):
        found[int(line[5])].append(line[8:])
    return found


@pytest.mark.parametrize("name", ["data_parallel", "fused_allreduce", "no_sync", "group_sharded"])
def test_ranks_have_the_same_in_the_end(tmp_path: Path, name: str) -> None:
    found = said(name, tmp_path)
    last = [re.findall(r"(?:weights|gradient|state) (\S+)", found[rank][-1]) for rank in (0, 1)]
    assert last[0] and last[0] == last[1]


def test_a_sharded_layer_is_there_in_part(tmp_path: Path) -> None:
    found = said("shard_layer", tmp_path)
    expected = ["fc1.weight [Shard(dim=0)], here [4, 8]", "fc2.weight [Replicate()]"]
    assert found == {0: expected, 1: expected}


def test_a_dist_model_trains_is_evaluated_and_predicts(tmp_path: Path) -> None:
    found = said("dist_model", tmp_path)
    assert found[0] == found[1]
    train, evaluated, predicted = found[0]
    assert float(evaluated.split()[1]) < float(train.split()[1])
    assert predicted == "predict paddle.Size([4, 8])"
