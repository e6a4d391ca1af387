"""Ranks with different numbers of batches under ``join``, compared with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close, assert_same
from zeroshard.torch import DataParallel, group_sharded_parallel, join

SYSTEMS = ("ddp", "DataParallel", *LEVELS)
#: The systems that have the gradients of a batch as soon as its backward pass has ended.
REPLICATED = ("ddp", "DataParallel")


@dataclass(frozen=True)
class Case:
    """A training with a different number of batches on each rank."""

    #: The number of batches of each rank in each epoch.
    epochs: tuple[tuple[int, ...], ...] = ((5, 3),)
    model: str = "mlp"
    #: Backward passes for each step; "no_sync" announces that one is not the last.
    micro: int = 1
    no_sync: bool = False
    max_norm: float | None = None
    max_value: float | None = None
    scaled: bool = False
    divide_by_initial_world_size: bool = True
    sync_buffers: bool = False


CASES = {
    "rank 0 has more": Case(),
    "rank 1 has more, in two epochs": Case(epochs=((2, 4), (3, 1))),
    "none": Case(epochs=((0, 2), (2, 2))),
    "divided by the active ranks": Case(divide_by_initial_world_size=False, max_norm=0.5),
    "accumulation": Case(epochs=((6, 4), (4, 4)), micro=2),
    "accumulation without sync": Case(epochs=((6, 3), (4, 4)), micro=2, no_sync=True),
    "clipped by norm, scaled": Case(epochs=((5, 3), (2, 2)), max_norm=0.5, scaled=True),
    "clipped by value": Case(max_value=0.01),
    "clipped by value, divided by the active ranks": Case(
        max_value=0.01, divide_by_initial_world_size=False
    ),
    "buffers": Case(epochs=((5, 3), (2, 3)), model="cnn", sync_buffers=True),
    "tied": Case(model="gpt", epochs=((3, 2), (1, 2))),
}


def build(case: Case, system: str) -> tuple[Any, Any, Any]:
    model = models.build(case.model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler: Any = torch.amp.GradScaler(
        "cpu", init_scale=256.0, growth_interval=2, enabled=case.scaled
    )
    if system == "ddp":
        return DistributedDataParallel(model), optimizer, scaler
    if system == "DataParallel":
        return DataParallel(model), optimizer, scaler
    return group_sharded_parallel(
        model, optimizer, system, scaler, segment_size=SEGMENT, sync_buffers=case.sync_buffers
    )


def train_epoch(
    case: Case, rank: int, first: int, count: int, built: tuple[Any, Any, Any]
) -> list[float]:
    """Trains with ``count`` batches. Returns their losses."""
    model, optimizer, scaler = built
    losses = []
    for index in range(count):
        data = models.share(models.batch(case.model, first + index, 8), rank, 2)
        last = (index + 1) % case.micro == 0
        quiet = not last and case.no_sync
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = model(*data)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if not last:
            continue
        parameters = list(model.parameters())
        if case.max_norm is not None or case.max_value is not None:
            scaler.unscale_(optimizer)
        if case.max_norm is not None:
            losses.append(float(nn.utils.clip_grad_norm_(parameters, case.max_norm)))
        if case.max_value is not None:
            nn.utils.clip_grad_value_(parameters, case.max_value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def train(case: Case, system: str, rank: int) -> tuple[list[float], dict[str, Tensor], str]:
    """The losses of this rank, the final state and its hash on the servers."""
    built = build(case, system)
    model, optimizer, scaler = built
    losses, first = [], 0
    for counts in case.epochs:
        options = {"divide_by_initial_world_size": case.divide_by_initial_world_size}
        with model.join(**options) if system == "ddp" else join(model, **options):
            losses += train_epoch(case, rank, first, counts[rank], built)
        if system in REPLICATED:
            # Each rank has its own optimizer, and only the parameters are made equal.
            optimizer.state.clear()
            if scaler.is_enabled():
                states: list[Any] = [None, None]
                dist.all_gather_object(states, scaler.state_dict())
                scaler.load_state_dict(states[0])
        else:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        optimizer.zero_grad()
        first += max(counts)
    bare = model.module if system == "ddp" else model
    state = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    return losses, state, "" if system in REPLICATED else optimizer.state_hash()


def train_all(rank: int, name: str) -> None:
    """Trains with every system, and compares them."""
    case = CASES[name]
    with zs.init():
        losses, state, _ = train(case, "ddp", rank)
        hashes = []
        for system in SYSTEMS[1:]:
            ours, found, hash = train(case, system, rank)
            assert len(ours) == len(losses), system
            for one, other in zip(ours, losses, strict=True):
                assert math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6), (system, ours, losses)
            assert_close(found, state, rtol=1e-6, atol=1e-6)
            if system in LEVELS:
                hashes.append(hash)
                if system == "os":
                    reference = found
                assert_same(found, reference)
            whole: list[Mapping[str, Tensor]] = [{}, {}]
            dist.all_gather_object(whole, found)
            assert_same(whole[0], whole[1])
        assert len(set(hashes)) == 1, hashes


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_ddp_and_the_same_at_every_level(name: str) -> None:
    ranks.run(2, train_all, name)
