"""Optimizers that the servers do not have run on the ranks, and the servers keep their state."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from optimizers_on_ranks import (
    OPTIMIZERS,
    STAGES,
    Bytes,
    Noisy,
    Paced,
    Preconditioned,
    Rotated,
    assert_equal_state,
    distance,
    final,
    gradients_of_all,
    make_step,
    matrices,
    muon_and_adamw,
    others,
    raising,
    sharded,
    train_plain,
    train_sharded,
)
from training import SEGMENT, assert_same
from zeroshard.torch import group_sharded_parallel, shard

#: The optimizers whose every parameter runs on a rank. Their results have torch's bits: the rank
#: computes with the same f32 numbers. (AdamW on the servers is within rounding of torch's.)
EXACT = [name for name in OPTIMIZERS if name != "muon and adamw"]


@functools.cache
def expected(name: str, steps: int, world: int, ulps: int = 0) -> Any:
    return train_plain(name, steps, world, ulps)


def assert_as_torch(name: str, steps: int, world: int, found: Any) -> None:
    """One step gives torch's values to 1e-6. Longer runs end no farther from torch than torch does
    from itself, when its weights are changed by one unit in the last place."""
    state, of_optimizers = found
    reference, of_reference = expected(name, steps, world)
    if name in EXACT:
        assert_same(state, reference)
        assert_equal_state(of_optimizers, of_reference)
        return
    if steps == 1:
        assert distance(state, reference) <= 1e-6
    else:
        itself = max(distance(expected(name, steps, world, ulps)[0], reference) for ulps in (-1, 1))
        assert distance(state, reference) <= itself
    assert_equal_state(of_optimizers, of_reference, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_trains_as_torch(name: str, cluster: zs.Session) -> None:
    for stage in STAGES:
        for steps, found in train_sharded(name, stage, (1, 30)).items():
            assert_as_torch(name, steps, 1, found)


def train_all(rank: int) -> Any:
    torch.manual_seed(rank)  # what differs between the ranks
    with zs.init():
        return {
            (name, stage): train_sharded(name, stage, (1, 6), rank, 2)
            for name in OPTIMIZERS
            for stage in STAGES
        }


def test_two_ranks_train_as_torch(pair: ranks.Team, processes: dict[str, str]) -> None:
    for outcomes in pair.run(train_all, env=processes):
        for (name, _), outcome in outcomes.items():
            for steps, found in outcome.items():
                assert_as_torch(name, steps, 2, found)


def step_together(rank: int) -> Any:
    shapes: list[tuple[int, ...]] = []

    class Observed(Bytes):
        def step(self, closure: Any = None) -> None:
            shapes.extend(tuple(p.shape) for group in self.param_groups for p in group["params"])
            super().step()

    with zs.init():
        found = {}
        for separable in (True, False):
            model = models.build("mlp")
            optimizer = Observed(model.parameters())
            shard(model, optimizer, segment_size=SEGMENT, separable=separable)
            shapes.clear()
            make_step(model, [optimizer], models.share(models.batch("mlp", 0, 8), rank, 2))
            found[separable] = list(shapes)
        return found


def test_ranks_divide_the_parameters_of_a_separable_optimizer(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    outcomes = pair.run(step_together, env=processes)
    every = sorted(tuple(each.shape) for each in models.build("mlp").parameters())
    first, second = (outcome[True] for outcome in outcomes)
    assert sorted(first + second) == every
    numels = [sum(map(math.prod, shapes)) for shapes in (first, second)]
    largest = max(map(math.prod, every))
    assert max(numels) <= max(largest, sum(numels) * 2 / 3)
    # Any other optimizer has one owner.
    assert sorted(sorted(outcome[False]) for outcome in outcomes) == [[], every]


def test_parameters_of_muon_have_no_state_of_adamw(cluster: zs.Session) -> None:
    def state_bytes() -> int:
        return sum(server.state_bytes for server in zs.status().servers)

    before = state_bytes()
    model, optimizers = sharded("muon and adamw", 3)
    make_step(model, optimizers, models.batch("mlp", 0, 8))
    numel = sum(parameter.numel() for parameter in others(model))
    # The jobs of other tests may end meanwhile.
    assert state_bytes() - before <= 2 * 4 * numel


# ---- steps


@pytest.mark.parametrize("stage", STAGES)
def test_scale_clipping_factors_and_accumulation_are_those_of_torch(
    stage: int, cluster: zs.Session
) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model = models.build("mlp")
        optimizers = muon_and_adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        if is_sharded:
            shard(model, optimizers, stage, scaler=scaler, segment_size=SEGMENT)
        for step in range(4):
            for part in range(2):
                data = models.share(models.batch("mlp", step, 16), part, 2)
                scaler.scale(model(*data) / 2).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for parameter in others(model):
                parameter.grad.mul_(0.5)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        outcomes.append(model.state_dict())
    assert distance(*outcomes) <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_does_not_call_the_optimizer(stage: int, cluster: zs.Session) -> None:
    calls = []

    class Counting(Bytes):
        def step(self, closure: Any = None) -> None:
            calls.append(self)
            super().step()

    model = models.build("mlp")
    optimizer = Counting(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    shard(model, optimizer, stage, scaler=scaler, segment_size=SEGMENT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for factor, skipped in ((torch.inf, True), (1.0, False)):
        calls.clear()
        loss = model(*models.batch("mlp", 0, 8)) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert optimizer.last_report.applied is not skipped
        assert (not calls, distance(model.state_dict(), before) == 0) == (skipped, skipped)
        assert (len(optimizer.state) == 0) is skipped


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_fails_leaves_nothing_behind(stage: int, cluster: zs.Session) -> None:
    model = models.build("mlp")
    optimizer = Paced(model.parameters())
    shard(model, optimizer, stage, segment_size=SEGMENT)
    make_step(model, [optimizer], models.batch("mlp", 0, 8))
    before, group = optimizer.state_hash(), dict(optimizer.param_groups[0])
    with raising(Paced, 1), pytest.raises(RuntimeError, match="in the optimizer"):
        make_step(model, [optimizer], models.batch("mlp", 1, 8))
    assert optimizer.state_hash() == before
    assert optimizer.param_groups[0] == group
    make_step(model, [optimizer], models.batch("mlp", 1, 8))
    assert_same(model.state_dict(), expected("state of a group", 2, 1)[0])


def test_a_separable_optimizer_that_fails_at_its_last_parameter_leaves_nothing_behind(
    cluster: zs.Session,
) -> None:
    model = models.build("mlp")
    optimizer = Bytes(model.parameters())
    shard(model, optimizer, separable=True, segment_size=SEGMENT)
    with raising(Bytes, len(list(model.parameters()))), pytest.raises(RuntimeError):
        make_step(model, [optimizer], models.batch("mlp", 0, 8))
    make_step(model, [optimizer], models.batch("mlp", 0, 8))
    state, of_optimizers = expected("bytes", 1, 1)
    assert_same(model.state_dict(), state)
    assert_equal_state([optimizer.state_dict()], of_optimizers)


@pytest.mark.parametrize("separable", [True, False])
def test_separable_optimizers_step_their_parameters_one_by_one(
    separable: bool, cluster: zs.Session
) -> None:
    sizes = []

    class Observed(Bytes):
        def step(self, closure: Any = None) -> None:
            sizes.append(sum(len(group["params"]) for group in self.param_groups))
            super().step()

    model = models.build("mlp")
    optimizer = Observed(model.parameters())
    shard(model, optimizer, segment_size=SEGMENT, separable=separable)
    sizes.clear()
    make_step(model, [optimizer], models.batch("mlp", 0, 8))
    assert sizes == ([1] * 6 if separable else [6])
    assert_same(model.state_dict(), expected("bytes", 1, 1)[0])


def test_a_parameter_without_gradient_is_not_stepped(cluster: zs.Session) -> None:
    model = models.build("unused")
    optimizer = Bytes(model.parameters())
    shard(model, optimizer, segment_size=SEGMENT)
    before = model.unused.weight.detach().clone()
    make_step(model, [optimizer], models.batch("unused", 0, 8))
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight not in optimizer.state
    assert model.layers[0].weight in optimizer.state


class Halving(torch.optim.Optimizer):
    """Halves each parameter that has a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.5)


def step_with_zeros(rank: int) -> dict[str, Tensor]:
    """Each rank has a gradient of a parameter of its own, which contains only zeros."""
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.ones(4)) for name in ("of_0", "of_1", "of_none")}
    )
    with zs.init():
        optimizer = Halving(model.parameters())
        shard(model, optimizer, segment_size=SEGMENT)
        (model[f"of_{rank}"] * 0).sum().backward()
        optimizer.step()
        return {name: value.detach().clone() for name, value in model.items()}


def test_a_gradient_of_one_rank_that_is_zero_is_a_gradient_for_every_owner(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    half, one = torch.full((4,), 0.5), torch.ones(4)
    for found in pair.run(step_with_zeros, env=processes):
        assert_same(found, {"of_0": half, "of_1": half, "of_none": one})


def test_values_that_the_script_writes_are_those_that_the_step_begins_with(
    cluster: zs.Session,
) -> None:
    outcomes = []
    for stage in (None, *STAGES):
        model = models.build("mlp")
        optimizer = Bytes(model.parameters())
        if stage is not None:
            shard(model, optimizer, stage, segment_size=SEGMENT)
        for step in range(3):
            make_step(model, [optimizer], models.batch("mlp", step, 8))
            with torch.no_grad():
                model.layers[2].weight.mul_(0.5)
                model.layers[2].bias.add_(0.25)
        make_step(model, [optimizer], models.batch("mlp", 3, 8))
        outcomes.append(model.state_dict())
    plain, *others = outcomes
    for other in others:
        assert_same(other, plain)


def test_parameters_in_bf16_are_stepped_in_f32(cluster: zs.Session) -> None:
    outcomes = []
    for stage in STAGES:
        model = models.build("mlp").bfloat16()
        optimizer = Rotated(model.parameters())
        shard(model, optimizer, stage, segment_size=SEGMENT)
        for step in range(4):
            inputs, targets = models.batch("mlp", step, 8)
            make_step(model, [optimizer], (inputs.bfloat16(), targets))
        state = optimizer.state[model.layers[0].weight]
        assert state["exp_avg"].dtype == torch.float32
        outcomes.append(model.state_dict())
    master = {
        name: value.float() for name, value in models.build("mlp").bfloat16().state_dict().items()
    }
    plain, mirror = models.build("mlp"), models.build("mlp").bfloat16()
    plain.load_state_dict(master)
    optimizer = Rotated(plain.parameters())
    for step in range(4):
        mirror.load_state_dict(plain.state_dict())
        inputs, targets = models.batch("mlp", step, 8)
        gradients_of_all(mirror, (inputs.bfloat16(), targets), 1)
        for own, other in zip(plain.parameters(), mirror.parameters(), strict=True):
            own.grad = other.grad.float()
        optimizer.step()
    mirror.load_state_dict(plain.state_dict())
    for outcome in outcomes:
        assert_same(outcome, mirror.state_dict())


def test_random_numbers_are_those_of_the_job_and_the_step(cluster: zs.Session) -> None:
    model = models.build("mlp")
    optimizer = Noisy(model.parameters(), lr=1.0)
    shard(model, optimizer, segment_size=SEGMENT)
    torch.manual_seed(5)
    expected_next = torch.rand(3)
    torch.manual_seed(5)
    moved = []
    for _ in range(2):
        before = model.layers[0].bias.detach().clone()
        optimizer.zero_grad()
        (model(*models.batch("mlp", 0, 8)) * 0).backward()
        optimizer.step()
        moved.append(model.layers[0].bias.detach() - before)
    assert torch.equal(torch.rand(3), expected_next)
    assert moved[0].abs().max() > 0 and not torch.equal(*moved)


# ---- state and parameter groups


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_loaded_by_plain_torch_and_back(stage: int, cluster: zs.Session) -> None:
    for name in OPTIMIZERS:
        model, optimizers = sharded(name, stage)
        for step in range(3):
            make_step(model, optimizers, models.batch("mlp", step, 8))
        saved = [optimizer.state_dict() for optimizer in optimizers]
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        plain = models.build("mlp")
        plain.load_state_dict(weights)
        its = OPTIMIZERS[name](plain)
        for optimizer, state in zip(its, saved, strict=True):
            optimizer.load_state_dict(state)
        again, loaded = sharded(name, stage)
        again.load_state_dict(weights)
        for optimizer, state in zip(loaded, saved, strict=True):
            optimizer.load_state_dict(state)
        for step in range(3, 5):
            data = models.batch("mlp", step, 8)
            make_step(plain, its, data)
            make_step(model, optimizers, data)
            make_step(again, loaded, data)
        assert_same(again.state_dict(), model.state_dict())
        assert distance(model.state_dict(), plain.state_dict()) <= (0 if name in EXACT else 1e-6)


def test_state_that_an_optimizer_has_before_it_is_sharded_is_continued(
    cluster: zs.Session,
) -> None:
    for name in OPTIMIZERS:
        model = models.build("mlp")
        optimizers = OPTIMIZERS[name](model)
        for step in range(3):
            make_step(model, optimizers, models.batch("mlp", step, 8))
        shard(model, optimizers, segment_size=SEGMENT)
        for step in range(3, 6):
            make_step(model, optimizers, models.batch("mlp", step, 8))
        state = model.state_dict()
        assert distance(state, expected(name, 6, 1)[0]) <= (0 if name in EXACT else 1e-6)


def test_what_the_script_writes_to_state_is_what_happens(cluster: zs.Session) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model = models.build("mlp")
        optimizers = muon_and_adamw(model)
        if is_sharded:
            shard(model, optimizers, segment_size=SEGMENT)
        muon, adamw = optimizers
        first, second = matrices(model)[:2]
        for step in range(5):
            make_step(model, optimizers, models.batch("mlp", step, 8))
            if step == 1:
                muon.state[first]["momentum_buffer"].mul_(0.5)
                adamw.state[others(model)[0]]["exp_avg"].zero_()
            if step == 2:
                del muon.state[second]
            if step == 3:
                muon.state.clear()
        assert set(muon.state) == set(matrices(model))
        assert set(adamw.state) == set(others(model))
        outcomes.append(model.state_dict())
    assert distance(*outcomes) <= 1e-6


def test_parameters_may_be_added_frozen_and_unfrozen(cluster: zs.Session) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model = models.build("mlp")
        layers = [model.layers[number] for number in (0, 2, 4)]
        optimizer = Rotated(layers[0].parameters())
        if is_sharded:
            shard(model, optimizer, segment_size=SEGMENT)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(layers[2].parameters()), "lr": 1e-3})
            layers[0].requires_grad_(step != 4)
            make_step(model, [optimizer], models.batch("mlp", step, 8))
        outcomes.append((model.state_dict(), optimizer.state_dict()["state"]))
    assert_same(outcomes[0][0], outcomes[1][0])
    assert_equal_state(outcomes[0][1], outcomes[1][1])


def test_schedulers_and_hooks_work(cluster: zs.Session) -> None:
    outcomes, calls = [], []
    for is_sharded in (False, True):
        model = models.build("mlp")
        optimizer = Preconditioned(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        if is_sharded:
            shard(model, optimizer, segment_size=SEGMENT)
        for step in range(3):
            make_step(model, [optimizer], models.batch("mlp", step, 8))
            schedule.step()
        outcomes.append(model.state_dict())
    assert_same(*outcomes)
    assert len(calls) == 6


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_group_sharded_parallel_has_the_same_results(level: str, cluster: zs.Session) -> None:
    bare = models.build("mlp")
    model, optimizer, _ = group_sharded_parallel(
        bare, Rotated(bare.parameters()), level, segment_size=SEGMENT
    )
    for step in range(6):
        make_step(model, [optimizer], models.batch("mlp", step, 8))
    assert_same(bare.state_dict(), expected("soap-like", 6, 1)[0])


# ---- several optimizers of one model


def test_two_optimizers_of_one_model_make_one_step(cluster: zs.Session) -> None:
    model, (muon, adamw) = sharded("muon and adamw", 3)
    model(*models.batch("mlp", 0, 8)).backward()
    before = muon.state_hash()
    muon.step()
    muon.zero_grad()
    assert muon.state_hash() == before
    with pytest.raises(zs.InvalidArgumentError, match="Muon steps again.*call step.. of each"):
        muon.step()
    adamw.step()
    assert muon.state_hash() != before
    assert distance(model.state_dict(), expected("muon and adamw", 1, 1)[0]) <= 1e-6
    assert all(parameter.grad is None for parameter in matrices(model))


def test_optimizers_of_different_kinds_of_the_servers_run_together(cluster: zs.Session) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model = models.build("mlp")
        optimizers: list[Any] = [
            torch.optim.SGD(matrices(model), lr=0.1, momentum=0.9),
            torch.optim.AdamW(others(model), lr=1e-2),
        ]
        if is_sharded:
            shard(model, optimizers, segment_size=SEGMENT)
        for step in range(4):
            make_step(model, optimizers, models.batch("mlp", step, 8))
        outcomes.append(model.state_dict())
    assert distance(*outcomes) <= 1e-6


# ---- several ranks


def train_in_a_group(rank: int) -> Any:
    with zs.init():
        found = {}
        for stage in STAGES:
            model, optimizers = sharded("soap-like", stage, group_size=2)
            for step in range(4):
                data = models.share(models.batch("mlp", step, 8), rank, 2)
                make_step(model, optimizers, data)
            found[stage] = final(model, optimizers)
        return found


def test_ranks_that_add_their_gradients_train_as_torch(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    for found in pair.run(train_in_a_group, env=processes):
        for outcome in found.values():
            assert_as_torch("soap-like", 4, 2, outcome)


def disagree(rank: int) -> None:
    with zs.init():
        model, optimizers = sharded("muon and adamw", 3)
        make_step(model, optimizers, models.batch("mlp", 0, 8))
        optimizers[0].param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(zs.DisagreementError, match="layers.0.weight"):
            make_step(model, optimizers, models.batch("mlp", 1, 8))
        optimizers[0].param_groups[0]["lr"] = 0.1
        make_step(model, optimizers, models.batch("mlp", 1, 8))
        with pytest.raises(zs.InvalidArgumentError, match="without zeroshard.torch.join"):
            with zs.torch.join(model):
                pass


def test_ranks_must_have_the_same_hyperparameters(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    pair.run(disagree, env=processes)


# ---- refusals


def refused(error: type[zs.Error], message: str, optimizer: Any, model: nn.Module) -> None:
    kind = type(optimizer)
    with pytest.raises(error, match=message) as raised:
        shard(model, optimizer, segment_size=SEGMENT)
    assert str(raised.value).endswith(f"; {raised.value.remedy}")
    assert type(optimizer) is kind


class Averaged(Bytes):
    """Has modes, as optimizers without a schedule have."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class Stateful(Bytes):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class Wrapping(Bytes):
    """Has another optimizer inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params))
        self.inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


class Global(Bytes):
    """Has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"] = {"step": 1}


class Callables(Bytes):
    """Has a function in its state."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["call"] = print


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (torch.optim.LBFGS, zs.UnsupportedOptimizerError, "LBFGS evaluates the loss several"),
        (
            torch.optim.SparseAdam,
            zs.UnsupportedOptimizerError,
            "SparseAdam.*does not support dense",
        ),
        (Averaged, zs.UnsupportedOptimizerError, r"in train\(\) and eval\(\)"),
        (Stateful, zs.UnsupportedOptimizerError, "in its attribute 'count'"),
        (Wrapping, zs.UnsupportedOptimizerError, "another optimizer in its attribute 'inner'"),
        (Global, zs.UnsupportedOptimizerError, "state that belongs to no parameter"),
        (Callables, zs.InvalidArgumentError, "builtin_function_or_method at 'call'"),
    ],
)
def test_what_the_servers_cannot_keep_is_refused(
    cls: Any, error: type[zs.Error], message: str, cluster: zs.Session
) -> None:
    model = models.build("mlp")
    refused(error, message, cls(model.parameters()), model)


def test_an_optimizer_with_state_in_its_groups_is_not_separable(cluster: zs.Session) -> None:
    model = models.build("mlp")
    with pytest.raises(zs.InvalidArgumentError, match="pass separable=False"):
        shard(model, Paced(model.parameters()), separable=True)
    with pytest.raises(zs.InvalidArgumentError, match="separable is 1; it must be"):
        shard(model, Paced(model.parameters()), separable=1)


class Late(Bytes):
    """Begins to keep another tensor in its third step."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state: dict[str, Tensor] = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0)) + 1
            if state["step"] == 3:
                state["late"] = torch.zeros(2)


def test_state_that_appears_late_is_refused(cluster: zs.Session) -> None:
    model = models.build("mlp")
    optimizer = Late(model.parameters())
    shard(model, optimizer, segment_size=SEGMENT)
    for step in range(2):
        make_step(model, [optimizer], models.batch("mlp", step, 8))
    with pytest.raises(zs.InvalidArgumentError, match="at 'late', and had nothing when"):
        make_step(model, [optimizer], models.batch("mlp", 2, 8))
