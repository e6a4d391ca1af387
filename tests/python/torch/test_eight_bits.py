"""Training with 8-bit optimizer state."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import servers
from torch import Tensor, nn
from training import LEVELS, SEGMENT
from zeroshard.torch import Lion, group_sharded_parallel

import models
import ranks
import zeroshard as zs

STEPS = 8


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return models.Classifier(
        nn.Linear(models.FEATURES, 48), nn.Tanh(), nn.Linear(48, 24), nn.Linear(24, models.CLASSES)
    )


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sharded(model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    wrapped, of_servers, _ = group_sharded_parallel(
        model, optimizer, options.pop("level", "os_g"), segment_size=SEGMENT, **options
    )
    return wrapped, of_servers


def train(model: Any, optimizer: Any, steps: range, name: str = "mlp") -> list[float]:
    losses = []
    for step in steps:
        loss = model(*models.batch(name, step, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: Lion(p, lr=0.001),
    ],
    ids=["Adam", "AdamW", "SGD", "Lion"],
)
def test_losses_are_close_to_those_with_f32_state(cluster: zs.Session, optimizer: Any) -> None:
    losses = {}
    for state_dtype in ("f32", "int8"):
        model: Any = models.build("gpt")
        wrapped = sharded(model, optimizer(model.parameters()), state_dtype=state_dtype)
        losses[state_dtype] = train(*wrapped, range(80), "gpt")
    last = {name: sum(found[-10:]) / 10 for name, found in losses.items()}
    assert losses["f32"] != losses["int8"]
    assert last["f32"] < 0.8 * losses["f32"][0], losses["f32"]
    assert last["int8"] < 1.05 * last["f32"] + 0.02, last


def test_levels_and_runs_give_the_same_bits(cluster: zs.Session) -> None:
    found = []
    for level in (*LEVELS, "os"):
        model, optimizer = sharded(bare := network(), adamw(bare), level=level, state_dtype="int8")
        train(model, optimizer, range(5))
        found.append(values(model))
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())


def test_state_is_f32_for_the_script_and_what_it_writes_is_rounded(cluster: zs.Session) -> None:
    model, optimizer = sharded(bare := network(), adamw(bare), state_dtype="int8")
    train(model, optimizer, range(3))
    weight = next(iter(optimizer.state))
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert state["exp_avg"].shape == weight.shape and state["exp_avg"].abs().max() > 0
    assert (state["exp_avg_sq"] >= 0).all()
    before = state["exp_avg"].clone()
    with torch.no_grad():
        optimizer.state[weight]["exp_avg"].mul_(1.01)
        optimizer.state[weight]["exp_avg_sq"].fill_(0.25)
    train(model, optimizer, range(3, 4))
    assert not torch.equal(optimizer.state[weight]["exp_avg"], before)
    after = optimizer.state[weight]["exp_avg_sq"]
    assert after.min() > 0.2 and after.max() < 0.35


def test_a_loaded_state_continues_with_the_same_bits(cluster: zs.Session) -> None:
    model, optimizer = sharded(bare := network(), adamw(bare), state_dtype="int8")
    train(model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(4, 6))
    other = network(1)
    other.load_state_dict(saved[0])
    made = adamw(other)
    made.load_state_dict(saved[1])
    # The random numbers depend on the number of steps, which are in the state.
    again, of_servers = sharded(other, made, state_dtype="int8")
    train(again, of_servers, range(4, 6))
    found, expected = values(again), values(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # The same into the optimizer that is already sharded.
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(4, 6))
    found = values(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_cannot_have_8_bit_state_is_refused(cluster: zs.Session) -> None:
    for optimizer in (
        torch.optim.AdamW(network().parameters(), amsgrad=True),
        torch.optim.RMSprop(network().parameters()),
        torch.optim.NAdam(network().parameters()),
    ):
        model = network()
        optimizer.param_groups[0]["params"] = list(model.parameters())
        with pytest.raises(zs.Error, match="cannot have state_dtype int8"):
            sharded(model, optimizer, state_dtype="int8")
    with pytest.raises(zs.InvalidArgumentError, match="state_dtype is 'float8'"):
        sharded(bare := network(), adamw(bare), state_dtype="float8")
    # There is no state that could be f32.
    model, optimizer = sharded(
        bare := network(), torch.optim.SGD(bare.parameters(), lr=0.1), state_dtype="int8"
    )
    train(model, optimizer, range(2))


def train_from_checkpoint(rank: int, directory: str, until: int) -> dict[str, Any]:
    """Trains each level until a step, from the last checkpoint. Returns the first step, and the
    hash of the state."""
    found = {}
    with zs.init(name="eight-bits"):
        for level in LEVELS:
            bare = network()
            checkpoints = zs.Checkpoints(f"file://{directory}", every=3)
            model, optimizer = sharded(
                bare, adamw(bare), level=level, state_dtype="int8", checkpoints=checkpoints
            )
            first, _ = checkpoints.resume()
            for step in range(first, until):
                data = models.share(models.batch("mlp", step, 16), rank, 2)
                model(*data).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert checkpoints.save() == until
            found[level] = (first, optimizer.state_hash())
    return found


@pytest.fixture
def directories() -> Iterator[list[Path]]:
    """Directories for the checkpoints of two runs."""
    with tempfile.TemporaryDirectory() as found:
        yield [Path(found) / "once", Path(found) / "twice"]


def test_a_run_continues_from_its_checkpoint_with_the_same_bits(directories: list[Path]) -> None:
    once, twice = map(str, directories)

    def run(shards: int, directory: str, until: int) -> list[dict[str, Any]]:
        with servers(shards) as address:
            environment = {"ZEROSHARD_ADDRESS": address}
            return list(ranks.run(2, train_from_checkpoint, directory, until, env=environment))

    run(1, twice, 5)
    resumed = run(3, twice, STEPS)
    expected = run(2, once, STEPS)
    for level in LEVELS:
        (first, state), (_, uninterrupted) = resumed[0][level], expected[0][level]
        assert (first, state) == (5, uninterrupted), level
