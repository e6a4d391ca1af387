# promise: no-silent-difference
"""Every optimizer: the same steps as torch's, and state in torch's format in both directions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import (
    LEVELS,
    SEGMENT,
    Training,
    assert_close,
    assert_same,
    optimizer_of,
    train,
    train_all,
    worst,
)
from zeroshard.torch import (
    LAMB,
    ClipGradByGlobalNorm,
    Lion,
    clip_grad_norm_,
    group_sharded_parallel,
    optim,
)

#: Every optimizer, and settings that select other formulas.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind.__name__: (kind.__name__, {}) for kind in optim.NAMES},
    "SGD": ("SGD", {"lr": 0.05}),
    "SGD, decay": ("SGD", {"lr": 0.05, "weight_decay": 0.01}),
    "SGD, momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "SGD, dampening": (
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    "SGD, Nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "ASGD": ("ASGD", {"lr": 0.05}),
    "ASGD, average": ("ASGD", {"lr": 0.05, "lambd": 0.01, "t0": 3, "weight_decay": 0.01}),
    "Adam": ("Adam", {"lr": 2e-3}),
    "Adam, decay": ("Adam", {"lr": 2e-3, "weight_decay": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}),
    "Adam, amsgrad": ("Adam", {"lr": 2e-3, "amsgrad": True}),
    "Adam, maximize": ("Adam", {"lr": 1e-4, "maximize": True}),
    "AdamW": ("AdamW", {"lr": 2e-3}),
    "AdamW, amsgrad": ("AdamW", {"lr": 2e-3, "amsgrad": True, "weight_decay": 0.1}),
    "Adamax": ("Adamax", {"lr": 2e-3, "weight_decay": 0.01}),
    "NAdam": ("NAdam", {"lr": 2e-3, "momentum_decay": 0.1, "weight_decay": 0.01}),
    "NAdam, decoupled": (
        "NAdam",
        {"lr": 2e-3, "betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RAdam": ("RAdam", {"lr": 2e-3, "weight_decay": 0.01}),
    "RAdam, decoupled": (
        "RAdam",
        {"lr": 2e-3, "betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "Adagrad": ("Adagrad", {"lr": 0.02, "lr_decay": 0.01, "weight_decay": 0.01}),
    "Adagrad, initial": ("Adagrad", {"lr": 0.02, "initial_accumulator_value": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 1.0, "rho": 0.8, "weight_decay": 0.01}),
    "Adafactor": ("Adafactor", {"lr": 1e-2}),
    "Adafactor, decay": (
        "Adafactor",
        {"lr": 5e-2, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 2.0, "weight_decay": 0.01},
    ),
    "RMSprop": ("RMSprop", {"lr": 1e-3}),
    "RMSprop, centered": ("RMSprop", {"lr": 1e-3, "centered": True, "weight_decay": 0.01}),
    "RMSprop, momentum": ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Lion": ("Lion", {"lr": 5e-4, "weight_decay": 0.1}),
    "LAMB": ("LAMB", {"lr": 5e-3, "weight_decay": 0.01}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, pair: ranks.Team, processes: dict[str, str]) -> None:
    optimizer, settings = OPTIMIZERS[name]
    training = Training(optimizer=optimizer, settings=settings, steps=20)
    outcomes = pair.run(train_all, 2, training, LEVELS, env=processes)
    first = outcomes[0]["os"]
    for outcome in outcomes:
        for level in LEVELS:
            assert outcome[level].losses == first.losses
            assert outcome[level].hash == first.hash
            assert_same(outcome[level].state, first.state)
    plain = train(training, "plain")
    assert worst(first.losses, plain.losses) <= 1e-4
    # Lion steps by a sign: where two sums round to different sides of zero, by 2 lr.
    assert_close(first.state, plain.state, atol=2e-3 if name == "Lion" else 2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_interchangeable_with_torch(name: str, cluster: zs.Session) -> None:
    kind, settings = OPTIMIZERS[name]
    training = Training(optimizer=kind, settings=settings, groups="weight_decay" in settings)
    plain = models.build("mlp")
    plain_optimizer = optimizer_of(training, plain)
    model, optimizer = sharded(training, "p_g_os")
    advance(model, optimizer, range(5)), advance(plain, plain_optimizer, range(5))
    assert_state_close(optimizer.state_dict(), plain_optimizer.state_dict())

    # Ours goes on in torch.
    other = models.build("mlp")
    other_optimizer = optimizer_of(training, other)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    ours, theirs = (
        advance(model, optimizer, range(5, 10)),
        advance(other, other_optimizer, range(5, 10)),
    )
    assert worst(ours, theirs) <= 1e-5

    # And torch's in ours.
    for level in LEVELS:
        again, again_optimizer = sharded(training, level)
        again.load_state_dict(other.state_dict())
        again_optimizer.load_state_dict(other_optimizer.state_dict())
        assert_state_close(again_optimizer.state_dict(), other_optimizer.state_dict())
        ours = advance(again, again_optimizer, range(10, 15))
        copy = models.build("mlp")
        copy_optimizer = optimizer_of(training, copy)
        copy.load_state_dict(other.state_dict())
        copy_optimizer.load_state_dict(other_optimizer.state_dict())
        assert worst(ours, advance(copy, copy_optimizer, range(10, 15))) <= 1e-5


def sharded(training: Training, level: str, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer at a level."""
    model = models.build(training.model)
    optimizer = optimizer_of(training, model)
    options = {"segment_size": SEGMENT, **options}
    return group_sharded_parallel(model, optimizer, level, **options)[:2]


def advance(model: Any, optimizer: Any, steps: range, name: str = "mlp") -> list[float]:
    """Trains for these steps. Returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*models.batch(name, step, 8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_state_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Asserts that two optimizers' states have the same structure and nearly equal values."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, state in theirs["state"].items():
        assert set(ours["state"][index]) == set(state), index
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert type(mine) is type(value), key
            if isinstance(value, Tensor):
                assert mine.shape == value.shape and mine.dtype == value.dtype, key
                # A small element may be the sum of large ones: the momentum of RMSprop adds
                # gradients divided by their size.
                atol = 1e-6 * max([1.0, *value.abs().flatten().tolist()])
                torch.testing.assert_close(
                    mine, value, rtol=1e-3, atol=atol, msg=lambda text: f"{index} {key}: {text}"
                )
            else:
                assert mine == value, key


class Shapes(nn.Module):
    """Parameters with 0 to 4 dimensions, each of which multiplies the input's norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        shapes = [(), (1,), (40,), (1, 1), (3, 50), (50, 3), (2, 5, 33), (6, 4, 3, 3), (5, 7, 1, 1)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, scale: Tensor) -> Tensor:
        terms = (((scale * (i + 1) + p.sin() * p) ** 2).mean() for i, p in enumerate(self.all))
        return torch.stack(list(terms)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_steps_parameters_of_every_number_of_dimensions(
    dtype: torch.dtype, cluster: zs.Session
) -> None:
    """bf16 parameters have f32 master weights, and the machine epsilon of bf16."""
    plain, model = Shapes(), Shapes().to(dtype)
    plain.load_state_dict(model.state_dict())
    eps = (torch.finfo(dtype).eps, 1e-3)
    expected = torch.optim.Adafactor(plain.parameters(), lr=0.05, eps=eps, foreach=True)
    found: Any = torch.optim.Adafactor(model.parameters(), lr=0.05)
    schedules: list[Any] = [torch.optim.lr_scheduler.StepLR(expected, 2, 0.5)]
    model, found, _ = group_sharded_parallel(model, found, "os_g", segment_size=SEGMENT)
    schedules.append(torch.optim.lr_scheduler.StepLR(found, 2, 0.5))
    for step in range(8):
        for each, optimizer, schedule in zip((plain, model), (expected, found), schedules):
            optimizer.zero_grad()
            each(torch.tensor(0.1 * step, dtype=next(each.parameters()).dtype)).backward()
            optimizer.step()
            schedule.step()
    tolerance = {"atol": 2e-5} if dtype == torch.float32 else {"atol": 0.05}
    assert_close(
        {k: v.float() for k, v in model.state_dict().items()}, plain.state_dict(), **tolerance
    )
    ours, theirs = found.state_dict()["state"], expected.state_dict()["state"]
    for index, state in theirs.items():
        assert {k: v.shape for k, v in ours[index].items()} == {
            k: v.shape for k, v in state.items()
        }


def test_adafactor_keeps_one_value_for_each_row_and_column(cluster: zs.Session) -> None:
    model: Any = nn.Linear(512, 256, bias=False)
    optimizer: Any = torch.optim.Adafactor(model.parameters())

    def state_bytes() -> int:
        return sum(server.state_bytes for server in zs.status().servers)

    before = state_bytes()
    group_sharded_parallel(model, optimizer, "os")
    # The jobs of other tests may end meanwhile.
    assert state_bytes() - before <= 4 * (512 + 256)


def test_adafactor_refuses_what_it_cannot_do_as_torch(cluster: zs.Session) -> None:
    model: Any = nn.Linear(4, 4)
    model.bias.data = model.bias.data.bfloat16()
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(zs.InvalidArgumentError, match="float32.*give eps a number"):
        group_sharded_parallel(model, optimizer, "os")
    empty: Any = nn.Linear(4, 0)
    optimizer = torch.optim.Adafactor(empty.parameters())
    with pytest.raises(zs.InvalidArgumentError, match="adafactor"):
        group_sharded_parallel(empty, optimizer, "os")


@pytest.mark.parametrize("level", LEVELS)
def test_inf_on_one_rank_changes_nothing_and_halves_the_scale(
    level: str, pair: ranks.Team, processes: dict[str, str]
) -> None:
    for states, scales, applied in pair.run(overflow, level, env=processes):
        assert_same(states[1], states[0])
        assert scales == [1024.0, 512.0, 512.0] and applied == [True, False, True]
        assert any(not torch.equal(states[2][name], tensor) for name, tensor in states[1].items())


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_scaler_inf_and_nan_are_errors_and_change_nothing(
    level: str, cluster: zs.Session
) -> None:
    plain = models.build("mlp")
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer, _ = group_sharded_parallel(plain, adam, level, segment_size=SEGMENT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for factor in (float("inf"), float("nan")):
        (model(*models.batch("mlp", 0, 8)) * factor).backward()
        with pytest.raises(zs.InvalidArgumentError, match="inf or NaN on rank 0, and step"):
            optimizer.step()
        optimizer.zero_grad()
        assert_same(model.state_dict(), before)
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()


def overflow(rank: int, level: str) -> tuple[list[dict[str, Tensor]], list[float], list[bool]]:
    """Makes three steps, with an inf on rank 1 in the second one. Returns parameters and optimizer
    state, the scale, and whether each step was applied."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, sharded_optimizer, scaler = group_sharded_parallel(
        model, optimizer, level, scaler=scaler, segment_size=SEGMENT
    )
    states, scales, applied = [], [], []
    for step in range(3):
        sharded_optimizer.zero_grad()
        loss = model(*models.share(models.batch("mlp", step, 8), rank, 2))
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(sharded_optimizer)
        scaler.update()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for index, tensors in sharded_optimizer.state_dict()["state"].items():
            state |= {f"{index} {key}": value.clone() for key, value in tensors.items()}
        states.append(state)
        scales.append(scaler.get_scale())
        applied.append(sharded_optimizer.last_report.applied)
    return states, scales, applied


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "way", ["function of parameters", "function of model", "torch's object", "at construction"]
)
def test_clipping_is_torchs(level: str, way: str, cluster: zs.Session) -> None:
    """Excluding parameters with need_clip = False."""
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = models.build("mlp")
    for each in (plain, model):
        each.layers[2].bias.need_clip = each.layers[2].weight.need_clip = False
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "at construction":
        optimizer.grad_clip = ClipGradByGlobalNorm(0.05)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT)
    for step in range(5):
        data = models.batch("mlp", step, 8)
        plain_optimizer.zero_grad(), optimizer.zero_grad()
        plain(*data).backward(), model(*data).backward()
        expected = nn.utils.clip_grad_norm_(
            [p for p in plain.parameters() if getattr(p, "need_clip", True)], 0.05
        )
        if way == "function of parameters":
            norm = clip_grad_norm_(model.parameters(), 0.05)
        elif way == "function of model":
            norm = clip_grad_norm_(model, 0.05)
        elif way == "torch's object":
            norm = optimizer.clip_grad_norm_(0.05)
        plain_optimizer.step(), optimizer.step()
        if way != "at construction":
            assert isinstance(norm, Tensor)
            assert math.isclose(float(norm), float(expected), rel_tol=1e-5)
        assert math.isclose(optimizer.last_report.gradient_norm, float(expected), rel_tol=1e-5)
    assert_close(model.state_dict(), plain.state_dict())


def test_closure_is_called_and_its_loss_returned(cluster: zs.Session) -> None:
    training = Training()
    model, optimizer = sharded(training, "os_g")
    other, other_optimizer = sharded(training, "os_g")
    losses = []
    for step in range(5):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(*models.batch("mlp", step, 8))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses == advance(other, other_optimizer, range(5))
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
@pytest.mark.parametrize("level", LEVELS)
def test_parameter_group_can_be_added(level: str, kind: str, cluster: zs.Session) -> None:
    plain, model = models.build("mlp"), models.build("mlp")
    results = []
    for each, wrap in ((plain, False), (model, True)):
        head = list(each.layers[4].parameters())
        rest = [p for p in each.parameters() if all(p is not q for q in head)]
        optimizer: Any = getattr(torch.optim, kind)(rest, lr=1e-3)
        trained: Any = each
        if wrap:
            trained, optimizer, _ = group_sharded_parallel(
                each, optimizer, level, segment_size=SEGMENT
            )
        losses = advance(trained, optimizer, range(3))
        each.zero_grad()
        optimizer.add_param_group({"params": head, "lr": 1e-2, "weight_decay": 0.1})
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]
        losses += advance(trained, optimizer, range(3, 10))
        results.append((losses, {k: v.clone() for k, v in trained.state_dict().items()}))
    assert worst(results[1][0], results[0][0]) <= 1e-4
    assert_close(results[1][1], results[0][1])


def test_learning_rate_of_zero_changes_nothing(cluster: zs.Session) -> None:
    model, optimizer = sharded(Training(), "p_g_os")
    advance(model, optimizer, range(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    advance(model, optimizer, range(2))
    assert_same(model.state_dict(), before)


def test_lion_and_lamb_are_as_published() -> None:
    """Chen et al. 2023, algorithm 2; You et al. 2020, algorithm 2, with bias correction as in
    Adam."""
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 5), [torch.randn(6, 5) for _ in range(4)]
    lion, m = start.clone(), torch.zeros_like(start)
    for g in gradients:
        update = (0.9 * m + 0.1 * g).sign()
        lion = lion - 0.01 * (update + 0.1 * lion)
        m = 0.99 * m + 0.01 * g
    lamb, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * lamb
        lamb = lamb - 0.01 * lamb.norm() / update.norm() * update
    for kind, expected in ((Lion, lion), (LAMB, lamb)):
        parameter = nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.01, weight_decay=0.1)
        for g in gradients:
            parameter.grad = g.clone()
            optimizer.step()
        torch.testing.assert_close(parameter.detach(), expected)
