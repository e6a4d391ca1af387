"""Compares 8-bit optimizer state with f32 and with bitsandbytes, on the CPU.

    python tests/python/torch/eight_bits.py [--steps 500] [--elements 33554432]

Trains a small transformer with AdamW: of torch, with the state on an embedded server as f32 and as
int8, and with AdamW8bit of bitsandbytes. Prints the mean losses of ten parts of the training. Then
measures the steps of bitsandbytes with one thread, in G parameters/s; `zs-bench optimizer` measures
ours. Fails if the last losses with int8 differ from those with f32 by more than 0.5%.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from torch import nn

import models
import zeroshard as zs
from zeroshard.torch import group_sharded_parallel

TOLERANCE = 0.005


def losses(
    steps: int, optimizer: Callable[[Any], torch.optim.Optimizer], state_dtype: str | None
) -> list[float]:
    """The losses of a training. ``state_dtype`` is that of the servers; None: without servers."""
    model: Any = models.build("gpt")
    made = optimizer(model.parameters())
    if state_dtype is not None:
        model, made, _ = group_sharded_parallel(model, made, "os", state_dtype=state_dtype)
    found = []
    for step in range(steps):
        loss = model(*models.batch("gpt", step, 32))
        loss.backward()
        made.step()
        made.zero_grad()
        found.append(loss.item())
    return found


def speed(elements: int) -> float:
    """The G parameters/s of bitsandbytes with one thread."""
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.randn(elements)
    optimizer = bitsandbytes.optim.AdamW8bit([parameter])
    optimizer.step()
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return elements / sorted(seconds)[len(seconds) // 2] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--elements", type=int, default=1 << 25)
    options = parser.parse_args()

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3)

    def eight_bits(parameters: Any) -> torch.optim.Optimizer:
        # By default, it keeps f32 state for tensors of fewer than 4,096 elements.
        return bitsandbytes.optim.AdamW8bit(parameters, lr=3e-3, min_8bit_size=0)

    part = options.steps // 10
    found = {}
    with zs.init():
        for name, optimizer, state_dtype in (
            ("torch", adamw, None),
            ("f32 state", adamw, "f32"),
            ("int8 state", adamw, "int8"),
            ("bitsandbytes", eight_bits, None),
        ):
            curve = found[name] = losses(options.steps, optimizer, state_dtype)
            means = [sum(curve[i * part : (i + 1) * part]) / part for i in range(10)]
            print(f"{name:14}" + "".join(f"{mean:9.5f}" for mean in means), flush=True)
    print(f"bitsandbytes, one thread: {speed(options.elements):.3f} G parameters/s")
    ours, exact = (sum(found[name][-part:]) for name in ("int8 state", "f32 state"))
    if abs(ours - exact) > TOLERANCE * exact:
        sys.exit(f"the last losses differ by {ours / exact - 1:.2%}")


if __name__ == "__main__":
    main()
