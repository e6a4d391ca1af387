# promise: durability
"""Programs train on while the coordinator is killed and started again."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import torch

import models
import ranks
import zeroshard as zs
from servers import server, start
from training import LEVELS, SEGMENT
from zeroshard.torch import DataParallel, group_sharded_parallel

SYSTEMS = ("DataParallel", *LEVELS)
STEPS = 12
#: The coordinator is killed when rank 0 has begun the forward pass of these steps.
KILLED_AT = (3, 7, 8)


def train(rank: int, system: str, kill: int | None) -> tuple[list[float], str]:
    """The losses of this rank, and the hash of the state. ``kill``: a pipe into which a byte is
    written when the coordinator is to be killed."""
    model: Any = models.build("mlp")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if system == "DataParallel":
        model = DataParallel(model)
    else:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, system, segment_size=SEGMENT)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*models.share(models.batch("mlp", step, 8), rank, 2))
        if rank == 0 and kill is not None and step in KILLED_AT:
            os.write(kill, b"k")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, "" if system == "DataParallel" else optimizer.state_hash()


def train_all(rank: int, pipe: str) -> dict[str, tuple[Any, Any]]:
    """What each system finds undisturbed, and while the coordinator is killed."""
    kill = os.open(pipe, os.O_WRONLY)
    with zs.init():
        return {
            system: (train(rank, system, None), train(rank, system, kill)) for system in SYSTEMS
        }


def test_losses_and_state_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    pipe = str(tmp_path / "kill")
    os.mkfifo(pipe)
    coordinator, address = start("coordinator")
    kills = 0

    def restart() -> None:
        nonlocal coordinator, kills
        with open(pipe, "rb", buffering=0) as requests:
            while requests.read(1):
                coordinator.kill()
                coordinator.communicate()
                coordinator, _ = start("coordinator", listen=address)
                kills += 1

    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server("shard", "--coordinator", address))
        restarts = threading.Thread(target=restart)
        restarts.start()
        try:
            environment = {"ZEROSHARD_ADDRESS": address}
            found = ranks.run(2, train_all, pipe, env=environment, timeout=120)
        finally:
            # The thread ends with the last writer.
            os.close(os.open(pipe, os.O_RDWR))
            restarts.join()
            coordinator.kill()
            coordinator.communicate()
    assert kills == len(KILLED_AT) * len(SYSTEMS)
    for results in found:
        for system, (calm, disturbed) in results.items():
            assert disturbed == calm, system
    hashes = {results[level][1][1] for results in found for level in LEVELS}
    assert len(hashes) == 1
