"""By how much a rank grows while a model at stage 3 is saved and loaded: by the result that it
asked for, the largest tensor, and what libraries need. `tests/run long` does this with 300 million
parameters. The figures are printed.

What is measured is the memory that the process does not share and cannot get back from a file: the
pages of a file that it maps are the system's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions

import ranks
from environment import IS_LONG, LONG
from zeroshard.torch import load_group_sharded_model, save_group_sharded_model, shard

WIDTH = 2048 if IS_LONG else 1024
LAYERS = 64 if IS_LONG else 40
#: Rows of the largest tensor.
ROWS = 8 * WIDTH
PARAMETERS = LAYERS * WIDTH * WIDTH + ROWS * WIDTH
MODEL, LARGEST = 4 * PARAMETERS, 4 * ROWS * WIDTH
#: What is fetched at a time, buffers of transfers and of gloo, and what torch imports.
SLACK = (300 if IS_LONG else 150) << 20
MIB = 1 << 20


class Net(nn.Module):
    """Square matrices, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).square().mean()


def own_bytes() -> int:
    """The memory of this process that belongs to no file and to no other process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system does not tell RssAnon")


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Measures by how much the process grows. The list gets the growth in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, most, ended, growth = own_bytes(), [0], threading.Event(), []

    def look() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield growth
    finally:
        ended.set()
        thread.join()
        growth.append(max(most[0], own_bytes()) - before)


def sharded(step: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard(model, optimizer, 3)
    if step:
        model(torch.ones(1, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def growths(rank: int, folder: str) -> dict[str, tuple[int, int]]:
    """The growth of each operation, and the bytes of its result on this rank."""
    world = dist.get_world_size()
    path, found = Path(folder), {}
    model, optimizer = sharded(step=True)

    def measure(name: str, result: int, call: Callable[[], Any]) -> None:
        dist.barrier()
        began = time.monotonic()
        with peak() as growth:
            call()
        found[name] = growth[0], result
        if rank == 0:
            seconds = time.monotonic() - began
            print(f"{name}: {growth[0] // MIB} MiB, {seconds:.1f} s", flush=True)

    def save() -> None:
        ours, of_optimizer = dsd.get_state_dict(model, optimizer)
        dcp.save({"model": ours, "optim": of_optimizer}, checkpoint_id=path / "dcp")

    def load() -> None:
        ours, of_optimizer = dsd.get_state_dict(model, optimizer)
        states = {"model": ours, "optim": of_optimizer}
        dcp.load(states, checkpoint_id=path / "dcp")
        dsd.set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"]
        )

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    measure("DCP save", 3 * MODEL // world, save)
    measure(
        "get_model_state_dict(full_state_dict, cpu_offload)",
        0 if rank else MODEL,
        lambda: dsd.get_model_state_dict(model, options=whole),
    )
    measure("state_dict()", MODEL, lambda: model.state_dict())
    measure(
        "save_group_sharded_model",
        0,
        lambda: save_group_sharded_model(model, path / "whole", optimizer),
    )
    del model, optimizer
    gc.collect()
    model, optimizer = sharded(step=False)
    measure("DCP load", 3 * MODEL // world, load)
    measure(
        "load_group_sharded_model",
        0,
        lambda: load_group_sharded_model(model, path / "whole", optimizer),
    )
    return found


@pytest.mark.parametrize("world", [1, 2] if IS_LONG else [2])
def test_a_rank_needs_its_result_and_the_largest_tensor(
    world: int, tmp_path: Path, processes: dict[str, str]
) -> None:
    by_rank = ranks.run(world, growths, str(tmp_path), env=processes, timeout=LONG)
    print(json.dumps({"parameters": PARAMETERS, "growth, result": by_rank}))
    for rank, found in enumerate(by_rank):
        for name, (growth, result) in found.items():
            assert growth <= result + LARGEST + SLACK, (rank, name, growth // MIB, result // MIB)
