"""save_group_sharded_model, and loading into plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_same
from zeroshard.torch import (
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
)


def begin(level: str, name: str = "unfrozen") -> tuple[Any, Any]:
    """A model with frozen or tied ("gpt") parameters, at a level."""
    model = models.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT, sync_buffers=True)[
        :2
    ]


def step(model: Any, optimizer: Any, index: int, name: str, rank: int = 0, world: int = 1) -> float:
    """Makes a step. Returns its loss."""
    optimizer.zero_grad()
    loss = model(*models.share(models.batch(name, index, 8), rank, world))
    loss.backward()
    optimizer.step()
    return loss.item()


def saved(
    rank: int, level: str, name: str, output: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trains on a part of each batch and saves. Returns the state dicts."""
    model, optimizer = begin(level, name)
    for index in range(3):
        step(model, optimizer, index, name, rank, 2)
    save_group_sharded_model(model, output, optimizer)
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("name", ["unfrozen", "gpt", "cnn"])
@pytest.mark.parametrize("level", LEVELS)
def test_saved_model_loads_into_plain_torch(
    level: str, name: str, pair: ranks.Team, tmp_path: Path, processes: dict[str, str]
) -> None:
    output = tmp_path / "made" / "by us"
    (state, optimizer_state), other = pair.run(saved, level, name, str(output), env=processes)
    assert_same(state, other[0])
    plain = models.build(name)
    plain.load_state_dict(torch.load(output / "model.pt", weights_only=True))
    assert_same(plain.state_dict(), state)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain_optimizer.load_state_dict(torch.load(output / "optimizer.pt", weights_only=True))
    loaded = plain_optimizer.state_dict()
    assert loaded["param_groups"] == optimizer_state["param_groups"]
    assert list(loaded["state"]) == list(optimizer_state["state"]) and loaded["state"]
    for index, tensors in loaded["state"].items():
        assert_same(tensors, optimizer_state["state"][index])
    assert sorted(path.name for path in output.iterdir()) == ["model.pt", "optimizer.pt"]


@pytest.mark.parametrize("name", ["unfrozen", "gpt"])
def test_training_continues_from_a_saved_state(
    name: str, tmp_path: Path, cluster: zs.Session
) -> None:
    for level, next_level in zip(LEVELS, (*LEVELS[1:], LEVELS[0])):
        output = str(tmp_path / level)
        model, optimizer = begin(level, name)
        for index in range(4):
            step(model, optimizer, index, name)
        save_group_sharded_model(model, output, optimizer)
        again, again_optimizer = begin(next_level, name)
        load_group_sharded_model(again, output, again_optimizer)
        assert_same(again.state_dict(), model.state_dict())
        losses = [step(model, optimizer, index, name) for index in range(4, 8)]
        assert losses == [step(again, again_optimizer, index, name) for index in range(4, 8)]
        assert_same(again.state_dict(), model.state_dict())


def test_a_model_can_be_saved_without_an_optimizer(tmp_path: Path, cluster: zs.Session) -> None:
    model, _ = begin("p_g_os")
    save_group_sharded_model(model, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]


@pytest.mark.parametrize("level", LEVELS)
def test_tied_parameters_are_tied_in_saved_files(
    level: str, tmp_path: Path, cluster: zs.Session
) -> None:
    model, optimizer = begin(level, "gpt")
    step(model, optimizer, 0, "gpt")
    kept = model.state_dict()["tokens.weight"]
    save_group_sharded_model(model, str(tmp_path))
    states = [model.state_dict(), torch.load(tmp_path / "model.pt")]
    for state in states:
        assert state["tokens.weight"].data_ptr() == state["head.weight"].data_ptr()
        assert state["tokens.weight"].data_ptr() != kept.data_ptr() or level != "p_g_os"
    assert torch.equal(model.module.head.state_dict()["weight"], kept)


def test_output_must_be_a_directory_and_the_model_sharded(
    tmp_path: Path, cluster: zs.Session
) -> None:
    model, optimizer = begin("os")
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(zs.InvalidArgumentError, match="file"):
        save_group_sharded_model(model, str(file), optimizer)
    assert file.read_text() == "mine"
    with pytest.raises(zs.InvalidArgumentError, match="group_sharded_parallel"):
        save_group_sharded_model(nn.Linear(2, 2), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
