"""Optimizers of other people's packages run on the ranks. The packages are those of
requirements-optimizers.txt; `tests/run long` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import models
import optimizers_on_ranks
import ranks
import zeroshard as zs
from optimizers_on_ranks import (
    STAGES,
    assert_equal_state,
    matrices,
    others,
    train_plain,
    train_sharded,
)
from training import assert_same
from zeroshard.torch import shard

bitsandbytes = pytest.importorskip("bitsandbytes", reason="it needs the packages of tests/run long")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
prodigyopt = pytest.importorskip("prodigyopt")

STEPS = 12
#: The small parameters of the models have 8-bit state, too.
EIGHT_BITS = {"min_8bit_size": 16}

Build = Callable[[nn.Module], list[torch.optim.Optimizer]]
PACKAGES: dict[str, Build] = {
    "AdamW8bit of bitsandbytes": lambda model: [
        bitsandbytes.optim.AdamW8bit(model.parameters(), lr=3e-3, **EIGHT_BITS)
    ],
    "Lion8bit of bitsandbytes, and AdaBelief": lambda model: [
        bitsandbytes.optim.Lion8bit(matrices(model), lr=1e-3, **EIGHT_BITS),
        pytorch_optimizer.AdaBelief(others(model), lr=3e-3),
    ],
    "SOAP": lambda model: [
        pytorch_optimizer.SOAP(model.parameters(), lr=3e-3, precondition_frequency=3)
    ],
    "Shampoo": lambda model: [pytorch_optimizer.Shampoo(model.parameters(), lr=1e-2)],
    "Adan": lambda model: [pytorch_optimizer.Adan(model.parameters(), lr=1e-3)],
    "Prodigy": lambda model: [prodigyopt.Prodigy(model.parameters(), lr=1.0)],
}


@pytest.fixture(autouse=True, scope="module")
def packages() -> Any:
    optimizers_on_ranks.OPTIMIZERS.update(PACKAGES)
    yield
    for name in PACKAGES:
        del optimizers_on_ranks.OPTIMIZERS[name]


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_has_the_bits_of_torch(name: str, stage: int, cluster: zs.Session) -> None:
    [(state, of_optimizers)] = train_sharded(name, stage, [STEPS]).values()
    reference, of_reference = train_plain(name, STEPS)
    assert_same(state, reference)
    assert_equal_state(of_optimizers, of_reference)


def test_a_state_of_objects_is_refused() -> None:
    model = models.build("mlp")
    optimizer = pytorch_optimizer.ScalableShampoo(model.parameters())
    with pytest.raises(zs.Error, match="the state of ScalableShampoo has a PreConditioner"):
        shard(model, optimizer)


def train_all(rank: int) -> Any:
    optimizers_on_ranks.OPTIMIZERS.update(PACKAGES)
    with zs.init():
        return {
            (name, stage): train_sharded(name, stage, [STEPS], rank, 2)
            for name in PACKAGES
            for stage in STAGES
        }


def test_two_ranks_have_the_bits_of_torch(pair: ranks.Team, processes: dict[str, str]) -> None:
    for outcomes in pair.run(train_all, env=processes):
        for (name, _), outcome in outcomes.items():
            state, of_optimizers = outcome[STEPS]
            reference, of_reference = train_plain(name, STEPS, 2)
            assert_same(state, reference)
            assert_equal_state(of_optimizers, of_reference)
