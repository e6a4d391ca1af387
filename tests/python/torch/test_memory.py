"""What a rank at p_g_os holds of a model with 24 layers: at most three layers' parameters and
gradients at a time. While a model on the meta device is initialised: one module's parameters.

Measured twice: what tensors hold, and by how much the process grows, from the first step on. glibc
allocates gradients as it does by default, and the number of backward passes is not announced.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.torch import _panes, group_sharded_parallel

LAYERS, WIDTH, BATCH, STEPS = 24, 1024, 2, 8
#: Modules of the model on the meta device, and the bytes of each.
UNITS, UNIT = 64, WIDTH * WIDTH * 4
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


def grown_by(before: int) -> int:
    """The growth of the process to its maximum. Memory that it shares with servers is theirs."""
    return resident("VmHWM") - resident("RssShmem") - before


def settle() -> None:
    """Returns free memory to the system, and resets the maximum."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def shown(address: int) -> bool:
    """Returns whether servers show what is at an address. It is no memory of the process then."""
    memory = _panes._memories.get(address)
    return memory is not None and bool(memory.pane.shown)  # type: ignore[attr-defined]


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
            if not shown(tensor.untyped_storage().data_ptr())
        }
        most = max(most, sum(storages.values()))

    # Before the package's own hooks where these give something back, after them where they fetch
    # it.
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    for module in model.modules():
        module.register_forward_hook(look)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os", segment_size=WIDTH)
    for module in model.modules():
        module.register_forward_pre_hook(look)
    settle()
    before = resident("VmRSS") - resident("RssShmem")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
    return (
        most,
        grown_by(before),
        sum(2 * 4 * parameter.numel() for parameter in parameters),
    )


def initial_peaks() -> tuple[int, int, int]:
    """The same for the initialisation of a model on the meta device, with its parameters only."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
        small = nn.Linear(2, 2)
    parameters = list(model.parameters())
    most = 0

    def initialise(module: Any) -> None:
        nonlocal most
        nn.init.normal_(module.weight)
        held = [p.untyped_storage().nbytes() for p in parameters if not p.is_meta]
        most = max(most, sum(held))

    # Connects to the servers, and imports what is imported once.
    _ = group_sharded_parallel(small, torch.optim.SGD(small.parameters()), "p_g_os")
    optimizer = torch.optim.SGD(model.parameters())
    settle()
    before = resident("VmRSS") - resident("RssShmem")
    # The wrapped model fetches its first unit.
    wrapped = group_sharded_parallel(
        model, optimizer, "p_g_os", segment_size=WIDTH, param_init_fn=initialise
    )
    grown = grown_by(before)
    del wrapped
    return most, grown, UNITS * UNIT


def measured(function: Callable[[], Any], variables: dict[str, str]) -> list[int]:
    """The result of a function in a process of its own."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, __file__, function.__name__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


#: The layers by which the process may grow. Over gRPC it has parameters, which are pages of servers
#: over shared memory, and the buffers of the network.
GROWTH = {"shm": 3, "grpc": 4}


@pytest.mark.parametrize("transport", GROWTH)
def test_three_layers_at_a_time(transport: str, processes: dict[str, str]) -> None:
    held, grown, everything = measured(peaks, processes | {"ZEROSHARD_TRANSPORT": transport})
    print(
        f"held {held / LAYER:.2f} layers, grown by {grown / LAYER:.2f} layers, "
        f"of {everything / LAYER:.0f}"
    )
    assert everything == LAYERS * LAYER
    assert held <= 3 * LAYER
    assert grown <= GROWTH[transport] * LAYER + SLACK


def test_one_module_at_a_time_is_initialised(processes: dict[str, str]) -> None:
    held, grown, everything = measured(initial_peaks, processes)
    print(
        f"held {held / UNIT:.2f} modules, grown by {grown / UNIT:.2f} modules, "
        f"of {everything / UNIT:.0f}"
    )
    assert held == UNIT
    # The heap keeps three, and has pages of 2 MiB.
    assert grown <= 12 * UNIT + SLACK


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(globals()[sys.argv[1]]()))
