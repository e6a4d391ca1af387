"""The code of the guides does what the other system did."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import zeroshard as zs
from torch import Tensor
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import group_sharded_parallel

README = Path(__file__).resolve().parents[3] / "client" / "python" / "README.md"
PASSES, CLIP = 3, 0.05


class Engine:
    """What an engine of DeepSpeed does on one rank, as its documentation describes it."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.passes = 0

    def backward(self, loss: Tensor) -> None:
        (loss / PASSES).backward()
        self.passes += 1

    def step(self) -> None:
        if self.passes % PASSES:
            return
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def code_under(heading: str) -> str:
    """The first block of Python under a heading of the README."""
    section = README.read_text().split(f"\n{heading}\n", 1)[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("level", LEVELS)
def test_the_guide_replaces_an_engine_of_deepspeed(level: str, cluster: zs.Session) -> None:
    batches = [models.batch("mlp", step, 8) for step in range(4 * PASSES)]
    plain: Any = models.build("mlp")
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = Engine(plain, optimizer, scheduler)
    for batch in batches:
        engine.backward(plain(*batch))
        engine.step()
    ours: Any = models.build("mlp")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, _ = group_sharded_parallel(ours, optimizer, level, segment_size=SEGMENT)
    names = {
        "batches": batches,
        "contextlib": contextlib,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": CLIP,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "torch": torch,
    }
    exec(code_under("### An engine of DeepSpeed"), names)
    assert_close(dict(model.state_dict()), plain.state_dict(), rtol=2e-5, atol=2e-6)
