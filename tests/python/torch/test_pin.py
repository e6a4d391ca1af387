# promise: consistent-reads
"""Programs that read a job's parameters while it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from servers import servers
from training import LEVELS, SEGMENT, assert_same
from zeroshard.torch import group_sharded_parallel, pin


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(*models.batch("cnn", number, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def complete_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def read_while_training(rank: int, address: str) -> None:
    with zs.init(address, name="watched"):
        for number, level in enumerate(LEVELS):
            torch.manual_seed(number)
            bare = models.cnn()
            optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
            model, optimizer, _ = group_sharded_parallel(
                bare, optimizer, level, segment_size=SEGMENT, sync_buffers=True
            )
            for index in range(3):
                step(model, optimizer, index)
            expected = complete_state(model)
            job = zs.status().jobs[-1].name
            # One reader uses the session, the other one its own connection.
            with pin(job) as third, pin(job, address=address) as other:
                step(model, optimizer, 3)
                step(model, optimizer, 4)
                assert complete_state(model).keys() == expected.keys()
                for pinned in (third, other):
                    assert pinned.version == 3
                    fresh = models.cnn()
                    pinned.load(fresh)
                    assert_same(fresh.state_dict(), expected)
                    assert torch.equal(pinned["layers.0.weight"], expected["layers.0.weight"])
            with pin(job, tensors=["layers.8.bias"]) as latest:
                assert latest.version == 5
                bias = complete_state(model)["layers.8.bias"]
                assert torch.equal(latest["layers.8.bias"], bias)
                step(model, optimizer, 5)
                with pytest.raises(zs.InvalidArgumentError, match="not pinned"):
                    latest["layers.0.weight"]
                assert torch.equal(latest["layers.8.bias"], bias)


def test_a_reader_gets_every_tensor_of_one_version_at_each_level() -> None:
    with servers(2) as address:
        ranks.run(1, read_while_training, address, init=None)


def read_the_optimizer_state(rank: int, address: str) -> None:
    with zs.init(address, name="states"):
        bare = models.cnn()
        optimizer: Any = torch.optim.AdamW(bare.parameters(), lr=0.01)
        model, optimizer, _ = group_sharded_parallel(bare, optimizer, "p_g_os")
        with pin("states", optimizer_state=True) as initial:
            assert initial.optimizer_state("layers.0.weight") == {}
        for index in range(2):
            step(model, optimizer, index)
        expected = optimizer.state_dict()["state"]
        values = complete_state(model)
        names = [name for name, _ in model.named_parameters()]
        with pin("states", optimizer_state=True) as pinned, pin("states") as without:
            for index in range(2, 4):
                step(model, optimizer, index)
            for number, name in enumerate(names):
                state = pinned.optimizer_state(name)
                assert state.pop("step") == 2 == pinned.version
                assert_same(state, {k: v for k, v in expected[number].items() if k != "step"})
                assert torch.equal(pinned[name], values[name])
            assert pinned.optimizer_state("layers.1.running_mean") == {}
            with pytest.raises(zs.InvalidArgumentError, match="optimizer state is not pinned"):
                without.optimizer_state(names[0])


def test_a_pin_keeps_values_and_optimizer_state_of_one_version() -> None:
    with servers(2) as address:
        ranks.run(1, read_the_optimizer_state, address, init=None)


def read_in_error(rank: int, address: str) -> None:
    with pytest.raises(zs.NotInitialisedError, match="ZEROSHARD_ADDRESS"):
        pin("job")
    with zs.init(address, name="errors"):
        model = models.mlp()
        with pytest.raises(zs.InvalidArgumentError, match="0 jobs"):
            pin("errors")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, sharded, _ = group_sharded_parallel(model, optimizer, "os")
        with pin("errors", seconds=5) as pinned:
            before = complete_state(deeper := nn.Sequential(nn.Linear(2, 2)))
            with pytest.raises(zs.InvalidArgumentError, match=r"Missing key.*0\.weight"):
                pinned.load(deeper)
            wider = models.Classifier(nn.Linear(models.FEATURES, 33))
            with pytest.raises(zs.InvalidArgumentError, match=r"layers.0.weight.*\[33, 20\]"):
                pinned.load(wider)
            with pytest.raises(zs.InvalidArgumentError, match="'nothing'"):
                pinned["nothing"]
            assert_same(deeper.state_dict(), before)
        with pytest.raises(zs.InvalidArgumentError, match="closed"):
            pinned["layers.0.weight"]
        with pytest.raises(zs.InvalidArgumentError, match='"nothing"'):
            pin("errors", tensors=["nothing"])
        trained(*models.batch("mlp", 0, 8)).backward()
        sharded.step()
        with pytest.raises(zs.VersionGoneError, match="version 0"):
            pin("errors", version=0)


def test_a_reader_learns_why_it_cannot_read() -> None:
    with servers(1) as address:
        ranks.run(1, read_in_error, address, init=None)
