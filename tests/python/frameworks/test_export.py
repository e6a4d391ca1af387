"""Transformers loads the models that ``zsctl checkpoint export`` writes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zeroshard as zs

import ranks
import tiny
from servers import BINARY
from training import SEGMENT
from zeroshard.torch import group_sharded_parallel

STEPS = 2
#: Seconds until a checkpoint is complete.
SAVED_WITHIN = 30
TOKENS = torch.arange(8).view(1, 8)


def zsctl(*arguments: str) -> list[Any]:
    """Runs ``zsctl checkpoint``. Returns what it prints."""
    command = [str(BINARY.with_name("zsctl")), "checkpoint", "--json", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in output.stdout.splitlines()]


def train(rank: int, directory: Path, dtype: torch.dtype) -> Any:
    """Trains GPT-2, and waits for a checkpoint of its last version. Returns the logits."""
    model: Any = tiny.build("gpt2").to(dtype)
    with zs.init():
        checkpoints = zs.Checkpoints(f"file://{directory}", every=STEPS)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        wrapped, optimizer, _ = group_sharded_parallel(
            model, optimizer, "os", segment_size=SEGMENT, checkpoints=checkpoints
        )
        for example in tiny.examples("gpt2", STEPS):
            wrapped(**{name: value[None] for name, value in example.items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        until = time.monotonic() + SAVED_WITHIN
        while not list(directory.glob(f"*/{STEPS:020}/manifest.json")):
            assert time.monotonic() < until, list(directory.glob("**/*"))
            time.sleep(0.02)
        return wrapped.eval()(TOKENS).logits.detach().float().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [10**9, 10_000], ids=["one file", "several files"])
def test_a_trained_gpt2_has_the_same_logits(
    processes: dict[str, str], tmp_path: Path, dtype: torch.dtype, size: int
) -> None:
    directory = tmp_path / "checkpoints"
    place = f"file://{directory}"
    [logits] = ranks.run(1, train, directory, dtype, env=processes)
    [checkpoint] = zsctl("ls", "--url", place)
    assert checkpoint["version"] == STEPS
    folder = tmp_path / "model"
    zsctl(
        "export", checkpoint["job"], "--to", str(folder), "--file-bytes", str(size), "--url", place
    )
    tiny.build("gpt2").config.save_pretrained(folder)  # type: ignore[operator,union-attr]
    loaded: Any = hf.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.eval()(TOKENS).logits.float(), torch.from_numpy(logits))
