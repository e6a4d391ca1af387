"""What a rank at p_g_os holds of a model with 24 layers: at most three layers' parameters and
gradients at a time.

Measured twice: what tensors hold, and by how much the process grows. glibc keeps freed blocks of
this size in its heap, for speed, and the heap spreads to five layers' worth; so the process is run
with every large block mapped on its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroshard.torch import group_sharded_parallel

LAYERS, WIDTH, BATCH = 24, 1024, 2
#: Bytes of a layer's parameters and gradients: 8 MiB each.
LAYER = 2 * 2 * WIDTH * WIDTH * 4
#: Beside them: activations (0.4 MB), gradients of activations, what the allocator and two
#: interpreters' pages waste.
SLACK = 8 << 20


class Layer(nn.Module):
    """Two matrices and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(torch.relu(self.rise(x)))


def resident(field: str) -> int:
    """Resident bytes of this process: current ("VmRSS") or maximum ("VmHWM")."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def settle() -> None:
    """Returns free memory to the system, and resets the maximum."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peaks() -> tuple[int, int, int]:
    """The maximum bytes of parameters and gradients in tensors, the growth of the process, and the
    bytes of the whole model."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        tensors = [
            *parameters,
            # A gradient that was sent has no memory.
            *(parameter.grad for parameter in parameters if type(parameter.grad) is Tensor),
        ]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
        }
        most = max(most, sum(storages.values()))

    # Before the package's own hooks where these give something back, after them where they fetch
    # it.
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    for module in model.modules():
        module.register_forward_hook(look)
    model, optimizer, _ = group_sharded_parallel(
        model, optimizer, "p_g_os", segment_size=WIDTH, accumulation_steps=1
    )
    for module in model.modules():
        module.register_forward_pre_hook(look)
    for step in range(4):
        if step == 1:
            settle()
            before = resident("VmRSS")
        optimizer.zero_grad()
        model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
    return (
        most,
        resident("VmHWM") - before,
        sum(2 * 4 * parameter.numel() for parameter in parameters),
    )


def test_three_layers_at_a_time(processes: dict[str, str]) -> None:
    environment = {**os.environ, **processes, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    held, grown, everything = json.loads(done.stdout)
    print(
        f"held {held / LAYER:.2f} layers, grown by {grown / LAYER:.2f} layers, "
        f"of {everything / LAYER:.0f}"
    )
    assert everything == LAYERS * LAYER
    assert held <= 3 * LAYER
    assert grown <= 3 * LAYER + SLACK


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(peaks()))
