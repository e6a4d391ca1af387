# promise: no-silent-difference
"""``zeroshard.shard``: the objects that the script has are sharded, with the results of
``group_sharded_parallel``."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
from training import IN_PLACE, LEVELS, SEGMENT, Outcome, Training, assert_same, train, train_all
from zeroshard.torch import (
    GradScaler,
    join,
    load_group_sharded_model,
    save_group_sharded_model,
    shard,
)
from zeroshard.torch._unshard import unshard

STAGES = (1, 2, 3)

TRAININGS = {
    "mlp": Training("mlp", steps=6),
    "buffers that ranks share": Training("cnn", steps=4, options={"sync_buffers": True}),
    "tied parameters": Training("gpt", steps=4),
    "a native call": Training("lstm", steps=4),
    "scaled, clipped, accumulated": Training(
        steps=4, micro=2, announced="no_sync", max_norm=0.05, scaled=True, schedule="one cycle"
    ),
}


def made(numel: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that can be sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numel, 30), nn.ReLU(), nn.Linear(30, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Makes a step. Returns the loss."""
    optimizer.zero_grad()
    loss = model(torch.ones(3, 40)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- results


def assert_equal_bits(outcome: dict[str, Outcome]) -> None:
    for level, stage in IN_PLACE.items():
        assert outcome[stage].losses == outcome[level].losses, stage
        assert outcome[stage].norms == outcome[level].norms, stage
        assert outcome[stage].hash == outcome[level].hash, stage
        assert_same(outcome[stage].state, outcome[level].state)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_have_the_bits_of_group_sharded_parallel(
    name: str, pair: ranks.Team, processes: dict[str, str]
) -> None:
    systems = (*LEVELS, *IN_PLACE.values())
    for outcome in pair.run(train_all, 2, TRAININGS[name], systems, env=processes):
        assert_equal_bits(outcome)


@pytest.mark.parametrize("name", TRAININGS)
def test_one_rank_has_the_bits_of_group_sharded_parallel(name: str, cluster: zs.Session) -> None:
    systems = (*LEVELS, *IN_PLACE.values())
    assert_equal_bits({system: train(TRAININGS[name], system) for system in systems})


# ---- the objects


@pytest.mark.parametrize("stage", STAGES)
def test_the_objects_that_were_passed_are_returned_and_sharded(
    stage: int, cluster: zs.Session
) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    names, before = list(model.state_dict()), list(model.parameters())
    result = shard(model, optimizer, stage, scaler=scaler, segment_size=SEGMENT)
    assert [a is b for a, b in zip(result, (model, optimizer, scaler), strict=True)] == [True] * 3
    assert isinstance(model, nn.Sequential) and type(model).__name__ == "Sequential"
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(scaler, GradScaler)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["params"][0] is before[0]
    assert zs.report(model).level == zs.report(optimizer).level == LEVELS[stage - 1]
    assert not model.eval().training and model.train().training
    first = step(model, optimizer)
    assert step(model, optimizer) < first
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_result_without_a_scaler_has_two_parts(cluster: zs.Session) -> None:
    model, optimizer = made()
    assert len(zs.shard(model, optimizer)) == 2


def test_stage_3_is_the_default(cluster: zs.Session) -> None:
    model, optimizer = made()
    shard(model, optimizer)
    assert zs.report(model).level == "p_g_os"


@pytest.mark.parametrize("container", [list, tuple])
def test_several_models_are_sharded_with_their_optimizers_in_any_order(
    container: Any, cluster: zs.Session
) -> None:
    (one, its), (other, others) = made(), made()
    given = container([one, other]), container([others, its])
    assert shard(*given, stage=2) == given
    for model, optimizer in ((one, its), (other, others)):
        first = step(model, optimizer)
        assert step(model, optimizer) < first
        assert zs.report(model).job == zs.report(optimizer).job
    assert zs.report(one).job != zs.report(other).job


def test_two_models_that_train_each_other_do_so_as_in_torch(cluster: zs.Session) -> None:
    outcomes = []
    for stage in (None, *STAGES):
        (generator, its), (critic, others) = made(), made(2)
        if stage is not None:
            shard([generator, critic], [its, others], stage, segment_size=SEGMENT)
        losses = []
        for _ in range(4):
            for optimizer, sign in ((others, -1.0), (its, 1.0)):
                its.zero_grad()
                others.zero_grad()
                loss = sign * critic(generator(torch.ones(3, 40))).sigmoid().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        outcomes.append(losses)
    plain, *sharded = outcomes
    assert sharded[0] == sharded[1] == sharded[2] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_sets_the_learning_rate_of_the_next_step(
    when: str, cluster: zs.Session
) -> None:
    model, optimizer = made()
    plain, its = copy.deepcopy(model), torch.optim.AdamW
    reference = its(plain.parameters(), lr=1e-3)

    def scheduled(of: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(of, 1, gamma=0.1)

    schedules = [scheduled(reference)]
    if when == "before":
        schedules.append(scheduled(optimizer))
    shard(model, optimizer, segment_size=SEGMENT)
    if when == "after":
        schedules.append(scheduled(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert step(model, optimizer) == pytest.approx(step(plain, reference), rel=1e-5)
            for schedule in schedules:
                schedule.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_scheduler_warns_if_it_steps_before_the_optimizer(cluster: zs.Session) -> None:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shard(model, optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_attributes_and_hooks_of_the_optimizer_stay(cluster: zs.Session) -> None:
    model, optimizer = made()
    calls: list[Any] = []
    optimizer.name = "mine"
    optimizer.register_step_post_hook(lambda of, *_: calls.append(of))
    shard(model, optimizer)
    step(model, optimizer)
    assert optimizer.name == "mine" and calls == [optimizer]


class Recursive(nn.Module):
    """A model that calls itself, has hooks, and parts that refer to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40)
        self.layer.owner = [self]
        # Names that the wrapper of group_sharded_parallel has, too.
        self.level, self.sharding, self.module = "mine", "mine", nn.Linear(40, 2)

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        return self(self.layer(x), again=False) if again else self.module(x)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_keeps_its_own_attributes_and_may_call_itself(
    stage: int, cluster: zs.Session
) -> None:
    torch.manual_seed(0)
    model = Recursive()
    signature = inspect.signature(model.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard(model, optimizer, stage, segment_size=SEGMENT)
    first = step(model, optimizer)
    assert step(model, optimizer) < first
    assert (model.level, model.sharding) == ("mine", "mine")
    assert inspect.signature(model.forward) == signature
    inputs = torch.ones(3, 40)
    assert torch.equal(model.forward(inputs), model(inputs))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_plain_and_whole(how: Any, stage: int, cluster: zs.Session) -> None:
    model = Recursive()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage, segment_size=SEGMENT)
    step(model, optimizer)
    copied = how(model)
    assert type(copied) is Recursive and copied.layer.owner[0] is copied
    assert copied.__dict__.keys() == Recursive().__dict__.keys()
    assert_same(copied.state_dict(), model.state_dict())
    step(model, optimizer)
    assert not torch.equal(copied.layer.weight, model.layer.weight)
    step(copied, torch.optim.AdamW(copied.parameters()))


def test_an_optimizer_is_not_copied_or_pickled(cluster: zs.Session) -> None:
    model, optimizer = made()
    shard(model, optimizer)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(zs.InvalidArgumentError, match="optimizer.state_dict"):
            copied(optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_state_is_that_of_plain_torch(
    stage: int, cluster: zs.Session, tmp_path: Path
) -> None:
    model, optimizer = made()
    shard(model, optimizer, stage, segment_size=SEGMENT)
    step(model, optimizer)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    save_group_sharded_model(model, tmp_path, optimizer)
    plain, its = made()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    plain.load_state_dict(state[0])
    its.load_state_dict(state[1])
    step(model, optimizer)
    step(plain, its)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    load_group_sharded_model(model, tmp_path, optimizer)
    assert_same(model.state_dict(), state[0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_that_has_raised_an_error_may_be_repeated(
    stage: int, cluster: zs.Session
) -> None:
    model, optimizer = made()
    shard(model, optimizer, stage, segment_size=SEGMENT)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 41))
    first = step(model, optimizer)
    assert step(model, optimizer) < first


# ---- several ranks


def in_a_mesh(rank: int) -> None:
    with zs.init():
        model, optimizer = made()
        shard(model, optimizer, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        with pytest.raises(zs.InvalidArgumentError, match="remove DistributedDataParallel"):
            DistributedDataParallel(model)
        with join(model):
            for _ in range(1 + rank):
                step(model, optimizer)
        assert int(optimizer.state_dict()["state"][0]["step"]) == 2
        plane = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(zs.InvalidArgumentError, match=r"2 dimensions \(dp, tp\).*mesh\['dp'\]"):
            shard(*made(), mesh=plane)
        with pytest.raises(zs.InvalidArgumentError, match="mesh and group are both given"):
            shard(*made(), mesh=plane["tp"], group=plane["tp"].get_group())
        with pytest.raises(zs.InvalidArgumentError, match="mesh is a str; it must be"):
            shard(*made(), mesh="dp")
        model, optimizer = made()
        parallelize_module(model, plane["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(zs.InvalidArgumentError) as incomplete:
            shard(model, optimizer, mesh=plane["dp"])
        assert "pass the group of all their ranks" in incomplete.value.remedy
        shard(model, optimizer)
        step(model, optimizer)
        model, optimizer = made(40 + rank)
        with pytest.raises(zs.DisagreementError) as raised:
            shard(model, optimizer)
        assert raised.value.remedy == "it must be the same on every rank"
        # Nothing has changed.
        assert type(model) is nn.Sequential and type(optimizer) is torch.optim.AdamW
        model(torch.ones(3, 40 + rank)).sum().backward()
        optimizer.step()


def test_a_mesh_has_the_ranks_that_train(pair: ranks.Team, processes: dict[str, str]) -> None:
    pair.run(in_a_mesh, env=processes)


@pytest.mark.parametrize("stage", STAGES)
def test_an_unsharded_model_is_the_plain_object(stage: int, cluster: zs.Session) -> None:
    model = models.build("mlp")
    parts, kind = list(model.modules()), type(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, optimizer, stage, segment_size=SEGMENT)
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    assert unshard(model) is model
    assert type(model) is kind and list(model.modules()) == parts
    assert_same(model.state_dict(), trained)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


T = TypeVar("T")


class Typed(Generic[T], nn.Sequential):
    """Its first base class has no attributes."""


class Abstract(abc.ABC, torch.optim.Adam):
    """Its first base class has none either."""


@pytest.mark.parametrize("stage", [1, 3])
def test_classes_whose_first_base_is_not_of_torch_are_sharded(
    stage: int, cluster: zs.Session
) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model: nn.Module = Typed(*models.build("mlp").children())
        optimizer = Abstract(model.parameters(), lr=0.01)
        if is_sharded:
            shard(model, optimizer, stage, segment_size=SEGMENT)
            assert isinstance(model, Typed) and isinstance(optimizer, Abstract)
        for step in range(3):
            optimizer.zero_grad()
            model(models.batch("mlp", step, 8)[0]).square().mean().backward()
            optimizer.step()
        outcomes.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], value, rtol=1e-5, atol=1e-6)
