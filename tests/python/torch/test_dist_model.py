"""``to_static`` and ``DistModel`` on one rank: modes, programs, state, and ``shard_optimizer``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from demo import LEVELS, DemoNet, batch, dense_losses, made, plain, snapshot, strategy
from zeroshard.torch import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    Strategy,
    shard_optimizer,
    to_static,
)


# ---- modes


def test_the_initial_mode_follows_from_loss_and_optimizer(cluster: zs.Session) -> None:
    assert made().mode == "train"
    assert to_static(DemoNet(), None, nn.MSELoss()).mode == "eval"
    assert to_static(DemoNet()).mode == "predict"


def test_a_mode_without_its_loss_or_optimizer_is_refused() -> None:
    alone, with_loss = to_static(DemoNet()), to_static(DemoNet(), None, nn.MSELoss())
    with pytest.raises(zs.InvalidArgumentError, match="'train' needs a loss and an optimizer"):
        alone.train()
    with pytest.raises(zs.InvalidArgumentError, match="'eval' needs a loss"):
        alone.eval()
    with pytest.raises(zs.InvalidArgumentError, match="'train' needs an optimizer"):
        with_loss.train()
    for program in (
        "dist_main_program",
        "dist_startup_program",
        "serial_main_program",
        "serial_startup_program",
    ):
        with pytest.raises(zs.InvalidArgumentError, match="'train' needs a loss"):
            getattr(alone, program)("train")
        with pytest.raises(zs.InvalidArgumentError, match="mode is 'test'"):
            getattr(alone, program)("test")
    assert alone.mode == "predict" and with_loss.mode == "eval"


def test_attributes_are_those_of_the_layer() -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    layer = Scaled(4, 2)
    model: Any = to_static(layer)
    before = layer(torch.ones(1, 4))
    model.factor *= 0.5
    model.bias = nn.Parameter(layer.bias.detach() + 1)
    torch.testing.assert_close(model(torch.ones(1, 4))["out0"], (before + 1) * 0.5)
    assert layer.factor == 0.5 and model.weight is layer.weight and not hasattr(model, "missing")
    del model.factor
    assert model.factor == 1.0 and copy.deepcopy(model).factor == 1.0


@pytest.mark.parametrize("stage", LEVELS)
def test_training_updates_and_returns_the_loss(stage: int, cluster: zs.Session) -> None:
    model = made(stage=stage)
    assert model.optimizer is not None and model.optimizer.sharding.level == LEVELS[stage]
    losses = [model(*batch(step)).item() for step in range(10)]
    assert losses == pytest.approx(dense_losses(10), rel=1e-4)


@pytest.mark.parametrize("stage", LEVELS)
def test_evaluation_and_prediction_change_nothing(stage: int, cluster: zs.Session) -> None:
    model = made(stage=stage)
    model.layer.add_module("norm", nn.BatchNorm1d(16))
    model(*batch())
    before, version = snapshot(model)
    assert version == 1
    model.eval()
    expected = nn.functional.mse_loss(plain(before)(batch()[0]), batch()[1])
    torch.testing.assert_close(model(*batch()), expected)
    model.predict()
    outputs = model(batch()[0])
    assert list(outputs) == ["out0"]
    torch.testing.assert_close(outputs["out0"], plain(before)(batch()[0]))
    after, version = snapshot(model)
    assert version == 1 and all(torch.equal(after[name], before[name]) for name in before)
    model.train()
    model(*batch(1))
    assert snapshot(model)[1] == 2


def test_modes_switch_the_module_too() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))
    model = to_static(layer, None, nn.MSELoss())
    statistics = layer[0].running_mean.clone()
    value = batch()[0]
    assert torch.equal(model(value, value), model(value, value))
    model.predict()
    torch.testing.assert_close(model(value)["out0"], value / (1 + 1e-5) ** 0.5)
    assert torch.equal(layer[0].running_mean, statistics)


def test_several_outputs_and_inputs_keep_their_order() -> None:
    class Several(nn.Module):
        def forward(self, a: Tensor, b: Tensor, scale: Tensor | None = None) -> Any:
            return a + b, [a * b if scale is None else a * b * scale]

    def loss(first: Tensor, second: Tensor, label: Tensor) -> Tensor:
        return (first + second - label).abs().mean()

    model = to_static(Several(), None, loss)
    one = torch.ones(2)
    assert model([one, one], one).item() == 2.0
    assert model(one, one, 2 * one, 4 * one).item() == 0.0
    model.predict()
    outputs = model(one, [one])
    assert list(outputs) == ["out0", "out1"] and torch.equal(outputs["out0"], 2 * one)


def test_a_wrong_number_of_tensors_is_refused(cluster: zs.Session) -> None:
    model = made()
    images, labels = batch()
    for mode, arguments in (
        ("train", ()), ("train", (images,)), ("eval", (images,)), ("predict", ()),
        ("predict", (images, labels)),
    ):  # fmt: skip
        getattr(model, mode)()
        with pytest.raises(
            ValueError, match=rf"mode '{mode}'.*forward\(x.*got {len(arguments)} tensors"
        ):
            model(*arguments)
    assert snapshot(model)[1] == 0


@pytest.mark.parametrize("wrong", [3, "x", None, [1.0], {"x": torch.ones(1)}])
def test_another_type_than_a_tensor_is_refused(wrong: Any) -> None:
    model = to_static(DemoNet(), None, nn.MSELoss())
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        model(wrong, batch()[1])


def test_constructor_arguments_are_validated(cluster: zs.Session) -> None:
    layer = DemoNet()
    for arguments, match in (
        (("layer",), "layer is a str"),
        ((layer, None, 3), "loss is 3"),
        ((layer, None, nn.MSELoss(), "adam"), "optimizer is a str"),
        ((layer, None, nn.MSELoss(), None, "os"), "strategy is a str"),
        ((layer, None, nn.MSELoss(), None, None), None),
    ):
        if match is None:
            to_static(*arguments)
            continue
        with pytest.raises(zs.InvalidArgumentError, match=match):
            to_static(*arguments)
    with pytest.raises(zs.InvalidArgumentError, match="'sharding'"):
        Strategy({"pipeline": {}})
    with pytest.raises(zs.InvalidArgumentError, match="use enable, stage"):
        Strategy({"sharding": {"degree": 2}})
    with pytest.raises(zs.InvalidArgumentError, match="stage is 4"):
        made(stage=4)
    with pytest.raises(zs.InvalidArgumentError, match="loss has shape"):
        to_static(layer, None, lambda output, label: output - label)(*batch())


# ---- programs


def test_each_mode_has_its_program(cluster: zs.Session) -> None:
    model = made(stage=3)
    for made_program in (model.dist_main_program, model.serial_main_program):
        programs = {mode: made_program(mode) for mode in ("train", "eval", "predict")}
        assert len({str(program) for program in programs.values()}) == 3
        assert made_program() == programs["train"] and programs["train"].find("commit")
        model.predict()
        assert made_program() == programs["predict"] and not programs["predict"].find("loss")
        model.train()
    assert (
        model.dist_startup_program().find("join")
        and not model.dist_startup_program("eval").operations
    )


def test_a_program_follows_the_level(cluster: zs.Session) -> None:
    numel = sum(parameter.numel() for parameter in DemoNet().parameters())
    for stage, level in LEVELS.items():
        program = made(stage=stage).dist_main_program()
        assert (
            program.level == level
            and program.bytes("push") == 4 * numel
            and program.bytes("pull") == 4 * numel
        )
        pushes = [number for number, operation in enumerate(program) if operation.verb == "push"]
        last = max(
            number for number, operation in enumerate(program) if operation.verb == "backward"
        )
        assert (pushes[0] > last) is (level == "os")


# ---- states


@pytest.mark.parametrize("stage", LEVELS)
def test_training_continues_from_a_loaded_state(stage: int, cluster: zs.Session) -> None:
    first = made(stage=stage)
    for step in range(3):
        first(*batch(step))
    state = copy.deepcopy(first.state_dict())
    assert state.keys() == first.state_dict("param").keys() | first.state_dict("opt").keys()
    assert set(first.state_dict("param")) == set(DemoNet().state_dict())
    assert {"optimizer.linear_0.weight.exp_avg", "optimizer.linear_1.bias.step"} <= set(
        first.state_dict("opt")
    )
    losses = [first(*batch(step)).item() for step in range(3, 6)]
    second = made(stage=stage % 3 + 1)
    second.set_state_dict(state)
    assert [second(*batch(step)).item() for step in range(3, 6)] == losses


def test_a_state_with_wrong_names_or_shapes_is_refused(cluster: zs.Session) -> None:
    model = made()
    model(*batch())
    state = copy.deepcopy(model.state_dict())
    without = {name: value for name, value in state.items() if name != "linear_0.bias"}
    with pytest.raises(zs.InvalidArgumentError, match="missing .*'linear_0.bias'"):
        model.set_state_dict(without)
    with pytest.raises(zs.InvalidArgumentError, match=r"'linear_9.bias'"):
        model.set_state_dict({**state, "linear_9.bias": torch.ones(1)})
    with pytest.raises(zs.InvalidArgumentError, match=r"shape \[3\].*\[16\]"):
        model.set_state_dict({**state, "linear_0.bias": torch.ones(3)})
    with pytest.raises(zs.InvalidArgumentError, match="no parameter 'linear_9.bias'"):
        model.set_state_dict({"optimizer.linear_9.bias.exp_avg": torch.ones(1)})
    with pytest.raises(zs.InvalidArgumentError, match="has no optimizer"):
        to_static(DemoNet()).set_state_dict(state)
    with pytest.raises(zs.InvalidArgumentError, match="'all', 'param', 'opt'"):
        model.state_dict("params")


# ---- the optimizer alone


@pytest.mark.parametrize(
    "stage", [None, ShardingStage1(), ShardingStage2(), ShardingStage2, ShardingStage3()]
)
def test_a_sharded_optimizer_steps_on_the_servers(stage: Any, cluster: zs.Session) -> None:
    model = DemoNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    third = isinstance(stage, ShardingStage3)
    optimizer = shard_optimizer(optimizer, stage, model=model if third else None)
    losses = []
    for step in range(10):
        images, labels = batch(step)
        loss = nn.functional.mse_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(dense_losses(10), rel=1e-4)
    assert optimizer.sharding.level == ("os" if stage is None else LEVELS[stage.stage])


def test_a_model_accepts_a_sharded_optimizer(cluster: zs.Session) -> None:
    layer = DemoNet()
    optimizer = shard_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1), ShardingStage2())
    model = to_static(layer, None, nn.MSELoss(), optimizer)
    assert [model(*batch(step)).item() for step in range(5)] == pytest.approx(
        dense_losses(5), rel=1e-4
    )
    assert "optimizer.linear_0.weight.exp_avg" in model.state_dict()
    with pytest.raises(
        zs.InvalidArgumentError, match="level 'p_g_os' and the sharded optimizer 'os_g'"
    ):
        to_static(layer, None, nn.MSELoss(), optimizer, strategy(3))


def test_an_optimizer_that_cannot_be_sharded_is_refused(cluster: zs.Session) -> None:
    optimizer = torch.optim.SGD(DemoNet().parameters(), lr=0.1)
    for arguments, match in (
        ((optimizer, "os"), "must be ShardingStage1"),
        ((optimizer, ShardingStage3()), "needs the model"),
        ((optimizer, None, 0), "gradient_accumulation_steps is 0"),
        (("sgd",), "optimizer is a str"),
        ((optimizer, ShardingStage1("dp", [0])), "mesh is a list"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=match):
            shard_optimizer(*arguments)
    sharded = shard_optimizer(optimizer)
    with pytest.raises(zs.InvalidArgumentError, match="not sharded yet"):
        shard_optimizer(sharded)
