"""``torch.distributed.checkpoint`` saves and loads sharded models. Its files are those of FSDP2, in
both directions."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ranks
from facts import Facts
from test_state_dict_options import (
    assert_same_states,
    in_place,
    named_states,
    net,
    step,
    trained,
    wrapped,
)
from training import assert_same, worst

#: Each level, and each API at the one at which parameters are on the servers.
WAYS = ((in_place, 1), (wrapped, 2), (in_place, 3), (wrapped, 3))
WHOLE = StateDictOptions(full_state_dict=True)
#: The largest relative difference of a loss to that of plain torch, which rounds differently.
TOLERANCE = 1e-5

_kept: list[Any] = []


def folder() -> Path:
    """A new directory of all ranks."""
    name: list[Any] = [None]
    if dist.get_rank() == 0:
        _kept.append(tempfile.TemporaryDirectory())
        name = [_kept[-1].name]
    dist.broadcast_object_list(name)
    return Path(name[0]) / "checkpoint"


def fsdp2(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of torch's FSDP2."""
    model = net(seed)
    for module in (model[0], model[3], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index in range(steps):
        step(model, optimizer, index)
    return model, optimizer


def plain_like(model: Any, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model and optimizer with the same values and state."""
    state, of_optimizer = dsd.get_state_dict(model, optimizer, options=WHOLE)
    plain = net(5)
    its = torch.optim.AdamW(plain.parameters(), lr=0.01)
    dsd.set_state_dict(plain, its, model_state_dict=state, optim_state_dict=of_optimizer)
    return plain, its


def save(model: Any, optimizer: Any, path: Path) -> None:
    ours, of_optimizer = dsd.get_state_dict(model, optimizer)
    dcp.save({"model": ours, "optim": of_optimizer}, checkpoint_id=path)


def load(model: Any, optimizer: Any, path: Path) -> None:
    ours, of_optimizer = dsd.get_state_dict(model, optimizer)
    states = {"model": ours, "optim": of_optimizer}
    dcp.load(states, checkpoint_id=path)
    dsd.set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"]
    )


def assert_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Asserts that two models and their optimizers have the same values, settings and state."""
    found, expected = (dsd.get_state_dict(*pair, options=WHOLE) for pair in (one, other))
    assert_same(found[0], expected[0])
    assert_same_states(found[1]["state"], expected[1]["state"])
    assert found[1]["param_groups"] == expected[1]["param_groups"]


ONE, TWO = Facts(1), Facts(2)


def both(function: Any) -> Any:
    return ONE(TWO(function))


@both
def what_fsdp2_has_saved_is_loaded(rank: int) -> None:
    theirs = fsdp2(0, steps=3)
    save(*theirs, path := folder())
    for number, (way, stage) in enumerate(WAYS):
        ours = trained(way, stage, seed=5, steps=number % 2)
        load(*ours, path)
        assert_equal(ours, theirs)
    # Not FSDP2: with gloo on the CPU, that of torch 2.7 adds the gradients of the ranks.
    plain = plain_like(*theirs)
    losses = [step(*ours, 3), step(*ours, 4)], [step(*plain, 3), step(*plain, 4)]
    assert worst(*losses) <= TOLERANCE, losses


@both
def fsdp2_loads_what_was_saved(rank: int) -> None:
    for way, stage in WAYS:
        ours = trained(way, stage, steps=3)
        save(*ours, path := folder())
        theirs = fsdp2(5, steps=0)
        load(*theirs, path)
        assert_equal(theirs, ours)


@both
def a_training_continues_from_its_checkpoint(rank: int) -> None:
    for way, stage in WAYS:
        source = trained(way, stage, steps=3)
        save(*source, path := folder())
        again = trained(way, stage, seed=5, steps=0)
        load(*again, path)
        assert_equal(again, source)
        assert [step(*again, 3), step(*again, 4)] == [step(*source, 3), step(*source, 4)]
        assert_equal(again, source)


@TWO
def async_save_writes_the_version_at_which_it_was_called(rank: int) -> None:
    source = trained(in_place, 3, steps=2)
    expected = copy.deepcopy(dsd.get_state_dict(*source, options=WHOLE))
    ours, of_optimizer = dsd.get_state_dict(*source)
    saving: Any = dcp.async_save(
        {"model": ours, "optim": of_optimizer}, checkpoint_id=(path := folder())
    )
    step(*source, 2)
    saving.result()
    again = trained(in_place, 3, seed=5, steps=0)
    load(*again, path)
    assert_same(again[0].state_dict(), expected[0])
    assert_same_states(named_states(*again), expected[1]["state"])


def tensor_parallel(seed: int, steps: int) -> tuple[Any, Any]:
    """A model whose matrices are distributed over both ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    in_place(model, optimizer, 3)
    for index in range(steps):
        step(model, optimizer, index)
    return model, optimizer


@TWO
def a_tensor_parallel_model_keeps_its_own_mesh(rank: int) -> None:
    source = tensor_parallel(0, steps=2)
    ours, of_optimizer = dsd.get_state_dict(*source)
    for name in ("0.weight", "2.weight"):
        parameter: Any = source[0].get_parameter(name)
        for value in (ours[name], of_optimizer["state"][name]["exp_avg"]):
            assert value.placements == parameter.placements
            assert value.device_mesh == parameter.device_mesh
    save(*source, path := folder())
    again = tensor_parallel(5, steps=0)
    load(*again, path)
    assert_equal(again, source)
    assert step(*again, 2) == step(*source, 2)


@TWO
def a_checkpoint_is_loaded_into_a_plain_model(rank: int) -> None:
    source = trained(in_place, 3)
    save(*source, path := folder())
    plain = net(5)
    states = {"model": plain.state_dict()}
    dcp.load(states, checkpoint_id=path)
    assert_same(states["model"], source[0].state_dict())


test_on_one_rank = ONE.test(__name__)
test_on_two_ranks = TWO.test(__name__)


def save_with_two(rank: int, path: str) -> tuple[Any, Any]:
    source = trained(in_place, 3, steps=3)
    ours = dsd.get_model_state_dict(source[0])
    assert isinstance(ours["0.weight"], DTensor)
    save(*source, Path(path))
    return source[0].state_dict(), named_states(*source)


def load_with_one(rank: int, path: str) -> tuple[Any, Any]:
    again = trained(in_place, 3, seed=5, steps=0)
    load(*again, Path(path))
    return again[0].state_dict(), named_states(*again)


def test_a_checkpoint_of_two_ranks_is_loaded_with_one(
    pair: ranks.Team, tmp_path: Path, processes: dict[str, str]
) -> None:
    path = str(tmp_path / "checkpoint")
    saved, _ = pair.run(save_with_two, path, env=processes)
    [loaded] = ranks.run(1, load_with_one, path, env=processes)
    assert_same(loaded[0], saved[0])
    assert_same_states(loaded[1], saved[1])
