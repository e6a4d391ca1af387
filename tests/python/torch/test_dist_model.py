"""``to_static`` and ``DistModel``: modes, programs, states; on one rank and on several, plain and on meshes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from facts import Facts, Outcomes
from zeroshard.torch import (
    DistModel,
    ProcessMesh,
    Replicate,
    Shard,
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    Strategy,
    shard_dataloader,
    shard_layer,
    shard_optimizer,
    shard_tensor,
    to_static,
)
from zeroshard.torch.parallel import PairwiseParallel, SequenceParallel, parallelize_module

TWO, FOUR = Facts(2), Facts(4)

#: By the stage of sharding.
LEVELS = {1: "os", 2: "os_g", 3: "p_g_os"}


class DemoNet(nn.Module):
    """The page's: two Linears, of which the weights are sharded, and nothing else, where there is a mesh."""

    def __init__(self, mesh: ProcessMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear_0, self.linear_1, self.relu = nn.Linear(16, 16), nn.Linear(16, 8), nn.ReLU()
        if mesh is not None:
            # torch's weights are outputs by inputs, the page's are inputs by outputs.
            self.linear_0.weight = shard_tensor(self.linear_0.weight, mesh, [Shard(0)], stop_gradient=False)
            self.linear_1.weight = shard_tensor(self.linear_1.weight, mesh, [Shard(1)], stop_gradient=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(self.relu(self.linear_0(x)))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, 16, generator=generator), torch.rand(4, 8, generator=generator)


def strategy(stage: int) -> Strategy:
    """With sharding of a stage."""
    return Strategy({"sharding": {"enable": True, "stage": stage}})


def dense_losses(steps: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> list[float]:
    """Of plain torch."""
    model, losses = DemoNet(), []
    stepper = optimizer(model.parameters(), lr=0.1)
    for step in range(steps):
        images, labels = batch(step)
        loss = nn.functional.mse_loss(model(images), labels)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def made(mesh: ProcessMesh | None = None, stage: int = 1, **other: Any) -> DistModel:
    """A model that can do everything."""
    layer = DemoNet(mesh)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    return to_static(layer, None, nn.MSELoss(), optimizer, strategy(stage), **other)


def snapshot(model: DistModel) -> tuple[dict[str, Tensor], int]:
    """Parameters, and the servers' version."""
    assert model.optimizer is not None
    state = {name: value.clone() for name, value in model.state_dict("param").items()}
    return state, model.optimizer.sharding.job.version


# ---- modes


def test_the_first_mode_is_by_what_there_is(cluster: zs.Session) -> None:
    assert made().mode == "train"
    assert to_static(DemoNet(), None, nn.MSELoss()).mode == "eval"
    assert to_static(DemoNet()).mode == "predict"


def test_a_mode_whose_parts_are_missing_is_refused() -> None:
    alone, with_loss = to_static(DemoNet()), to_static(DemoNet(), None, nn.MSELoss())
    with pytest.raises(zs.InvalidArgument, match="'train' needs a loss and an optimizer"):
        alone.train()
    with pytest.raises(zs.InvalidArgument, match="'eval' needs a loss"):
        alone.eval()
    with pytest.raises(zs.InvalidArgument, match="'train' needs an optimizer"):
        with_loss.train()
    for program in ("dist_main_program", "dist_startup_program", "serial_main_program", "serial_startup_program"):
        with pytest.raises(zs.InvalidArgument, match="'train' needs a loss"):
            getattr(alone, program)("train")
        with pytest.raises(zs.InvalidArgument, match="mode is 'test'"):
            getattr(alone, program)("test")
    assert alone.mode == "predict" and with_loss.mode == "eval"


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


def plain(state: dict[str, Tensor]) -> nn.Module:
    """A model of torch alone with this state."""
    model = DemoNet()
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("norm")})
    return model


def test_modes_are_those_of_the_module_too() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))
    model = to_static(layer, None, nn.MSELoss())
    statistics = layer[0].running_mean.clone()
    value = batch()[0]
    assert torch.equal(model(value, value), model(value, value))
    model.predict()
    torch.testing.assert_close(model(value)["out0"], value / (1 + 1e-5) ** 0.5)
    assert torch.equal(layer[0].running_mean, statistics)


def test_several_outputs_and_inputs_have_their_places() -> None:
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


def test_another_number_of_tensors_is_refused(cluster: zs.Session) -> None:
    model = made()
    images, labels = batch()
    for mode, arguments in (
        ("train", ()), ("train", (images,)), ("eval", (images,)), ("predict", ()), ("predict", (images, labels)),
    ):  # fmt: skip
        getattr(model, mode)()
        with pytest.raises(ValueError, match=rf"{len(arguments)} tensors are given in mode '{mode}'.*forward\(x"):
            model(*arguments)
    assert snapshot(model)[1] == 0


@pytest.mark.parametrize("wrong", [3, "x", None, [1.0], {"x": torch.ones(1)}])
def test_what_is_no_tensor_is_refused(wrong: Any) -> None:
    model = to_static(DemoNet(), None, nn.MSELoss())
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        model(wrong, batch()[1])


def test_what_a_model_is_made_of_is_checked(cluster: zs.Session) -> None:
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
        with pytest.raises(zs.InvalidArgument, match=match):
            to_static(*arguments)
    with pytest.raises(zs.InvalidArgument, match="'sharding'"):
        Strategy({"pipeline": {}})
    with pytest.raises(zs.InvalidArgument, match="it can have enable, stage"):
        Strategy({"sharding": {"degree": 2}})
    with pytest.raises(zs.InvalidArgument, match="stage is 4"):
        made(stage=4)
    with pytest.raises(zs.InvalidArgument, match="loss is of shape"):
        to_static(layer, None, lambda output, label: output - label)(*batch())


# ---- programs


def test_programs_differ_by_mode_and_are_asked_for_by_mode(cluster: zs.Session) -> None:
    model = made(stage=3)
    for made_program in (model.dist_main_program, model.serial_main_program):
        programs = {mode: made_program(mode) for mode in ("train", "eval", "predict")}
        assert len({str(program) for program in programs.values()}) == 3
        assert made_program() == programs["train"] and programs["train"].find("commit")
        model.predict()
        assert made_program() == programs["predict"] and not programs["predict"].find("loss")
        model.train()
    assert model.dist_startup_program().find("join") and not model.dist_startup_program("eval").operations


def test_a_program_moves_what_the_level_says(cluster: zs.Session) -> None:
    numel = sum(parameter.numel() for parameter in DemoNet().parameters())
    for stage, level in LEVELS.items():
        program = made(stage=stage).dist_main_program()
        assert program.level == level and program.bytes("push") == 4 * numel and program.bytes("pull") == 4 * numel
        pushes = [number for number, operation in enumerate(program) if operation.verb == "push"]
        last = max(number for number, operation in enumerate(program) if operation.verb == "backward")
        assert (pushes[0] > last) is (level == "os")


# ---- states


@pytest.mark.parametrize("stage", LEVELS)
def test_a_state_goes_on_where_it_was(stage: int, cluster: zs.Session) -> None:
    first = made(stage=stage)
    for step in range(3):
        first(*batch(step))
    state = copy.deepcopy(first.state_dict())
    assert state.keys() == first.state_dict("param").keys() | first.state_dict("opt").keys()
    assert set(first.state_dict("param")) == set(DemoNet().state_dict())
    assert {"optimizer.linear_0.weight.exp_avg", "optimizer.linear_1.bias.step"} <= set(first.state_dict("opt"))
    losses = [first(*batch(step)).item() for step in range(3, 6)]
    second = made(stage=stage % 3 + 1)
    second.set_state_dict(state)
    assert [second(*batch(step)).item() for step in range(3, 6)] == losses


def test_a_state_that_does_not_fit_is_refused(cluster: zs.Session) -> None:
    model = made()
    model(*batch())
    state = copy.deepcopy(model.state_dict())
    without = {name: value for name, value in state.items() if name != "linear_0.bias"}
    with pytest.raises(zs.InvalidArgument, match="lacks .*'linear_0.bias'"):
        model.set_state_dict(without)
    with pytest.raises(zs.InvalidArgument, match=r"'linear_9.bias'"):
        model.set_state_dict({**state, "linear_9.bias": torch.ones(1)})
    with pytest.raises(zs.InvalidArgument, match=r"shape \[3\].*\[16\]"):
        model.set_state_dict({**state, "linear_0.bias": torch.ones(3)})
    with pytest.raises(zs.InvalidArgument, match="'linear_9.bias' is no parameter"):
        model.set_state_dict({"optimizer.linear_9.bias.exp_avg": torch.ones(1)})
    with pytest.raises(zs.InvalidArgument, match="has no optimizer"):
        to_static(DemoNet()).set_state_dict(state)
    with pytest.raises(zs.InvalidArgument, match="'all', 'param', 'opt'"):
        model.state_dict("params")


# ---- the optimizer alone


@pytest.mark.parametrize("stage", [None, ShardingStage1(), ShardingStage2(), ShardingStage2, ShardingStage3()])
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


def test_a_model_takes_a_sharded_optimizer(cluster: zs.Session) -> None:
    layer = DemoNet()
    optimizer = shard_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1), ShardingStage2())
    model = to_static(layer, None, nn.MSELoss(), optimizer)
    assert [model(*batch(step)).item() for step in range(5)] == pytest.approx(dense_losses(5), rel=1e-4)
    assert "optimizer.linear_0.weight.exp_avg" in model.state_dict()
    with pytest.raises(zs.InvalidArgument, match="level is 'p_g_os' and the sharded optimizer's 'os_g'"):
        to_static(layer, None, nn.MSELoss(), optimizer, strategy(3))


def test_an_optimizer_that_cannot_be_sharded_is_refused(cluster: zs.Session) -> None:
    optimizer = torch.optim.SGD(DemoNet().parameters(), lr=0.1)
    for arguments, match in (
        ((optimizer, "os"), "must be ShardingStage1"),
        ((optimizer, ShardingStage3()), "no model is given"),
        ((optimizer, None, 0), "gradient_accumulation_steps is 0"),
        (("sgd",), "optimizer is a str"),
        ((optimizer, ShardingStage1("dp", [0])), "mesh is a list"),
    ):
        with pytest.raises(zs.InvalidArgument, match=match):
            shard_optimizer(*arguments)
    sharded = shard_optimizer(optimizer)
    with pytest.raises(zs.InvalidArgument, match="already"):
        shard_optimizer(sharded)


# ---- several ranks


def share(tensors: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    """A rank's half of a batch."""
    return tuple(tensor.chunk(2)[rank] for tensor in tensors)


@TWO
def plain_models_train_on_the_ranks_own_batches(rank: int) -> None:
    for stage in LEVELS:
        model = made(stage=stage)
        losses = [model(*share(batch(step), rank)).item() for step in range(5)]
        assert losses == pytest.approx(dense_losses(5), rel=1e-4)
        program = model.dist_main_program()
        assert (program.rank, program.world) == (rank, 2) and program.find("collective")[0].group == (0, 1)
        assert model.serial_main_program().world == 1
        assert len(model.dist_startup_program().find("push")) == (4 if rank == 0 else 0)


@TWO
def plain_models_take_batches_from_a_mesh(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["dp"])
    loader = shard_dataloader([batch(step) for step in range(5)], [mesh], shard_dims="dp")
    model = made(stage=2)
    assert [model(*data).item() for data in loader()] == pytest.approx(dense_losses(5), rel=1e-4)
    model.predict()
    images = batch()[0]
    expected = plain(model.state_dict("param"))(images)
    torch.testing.assert_close(model(shard_tensor(images, mesh, [Shard(0)]))["out0"], expected)
    torch.testing.assert_close(model(shard_tensor(images, mesh, [Replicate()]))["out0"], expected)
    model.train()
    with pytest.raises(zs.InvalidArgument, match="divide by the 2 ranks"):
        model(shard_tensor(images[:3], mesh, [Shard(0)]), shard_tensor(images[:3, :8], mesh, [Shard(0)]))


@TWO
def a_sharded_model_is_evaluated_and_predicts_as_the_dense_one(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    dense, (images, labels) = DemoNet(), batch()
    for data in (batch(), next(shard_dataloader([batch()], mesh)()), next(shard_dataloader([batch()], mesh, "x")())):
        model = to_static(DemoNet(mesh), None, nn.MSELoss())
        torch.testing.assert_close(model(*data), nn.functional.mse_loss(dense(images), labels))
        model.predict()
        torch.testing.assert_close(model(data[0])["out0"], dense(images))
        assert all(torch.equal(value, dense.state_dict()[name]) for name, value in model.state_dict().items())
    program = model.dist_main_program()
    boxes = {variable.name: str(variable.box) for variable in program.variables}
    assert boxes["linear_0.weight"] == f"[{8 * rank}:{8 * rank + 8}, 0:16]" and boxes["linear_1.bias"] == "[0:8]"
    state = {name: value + 1 for name, value in dense.state_dict().items()}
    model.set_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@TWO
def a_model_of_styles_is_evaluated_as_the_dense_one(rank: int) -> None:
    mesh, dense, (images, labels) = ProcessMesh([0, 1], ["x"]), DemoNet(), batch()
    model = to_static(parallelize_module(DemoNet(), mesh, PairwiseParallel()), None, nn.MSELoss())
    torch.testing.assert_close(model(images, labels), nn.functional.mse_loss(dense(images), labels))
    assert model.dist_main_program().find("collective")[0].subject == "all_reduce"


@TWO
def a_layer_with_functions_of_its_own_gets_its_inputs_as_they_are(rank: int) -> None:
    mesh, dense, (images, labels) = ProcessMesh([0, 1], ["x"]), DemoNet(), batch()
    layer = shard_layer(
        DemoNet(),
        mesh,
        None,
        lambda inputs, given: [shard_tensor(inputs[0], given, [Shard(0)])],
        lambda outputs, given: outputs.full_tensor(),
    )
    model = to_static(layer, None, nn.MSELoss())
    torch.testing.assert_close(model(images, labels), nn.functional.mse_loss(dense(images), labels))


@TWO
def a_model_on_two_meshes_is_refused(rank: int) -> None:
    layer = DemoNet(ProcessMesh([0, 1]))
    layer.linear_0.bias = shard_tensor(layer.linear_0.bias, ProcessMesh([1, 0]), [Replicate()])
    with pytest.raises(zs.InvalidArgument, match="all must be on one"):
        to_static(layer)


# ---- several ranks, trained on a mesh


@TWO
def a_sharded_model_trains_as_the_dense_one(rank: int) -> None:
    """The page's program, at every stage."""
    mesh, reference = ProcessMesh([0, 1], ["x"]), dense_losses(5)
    loader = shard_dataloader([batch(step) for step in range(5)], meshes=[mesh])
    for stage in LEVELS:
        layer = DemoNet(mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        model = to_static(layer, loader, nn.MSELoss(), optimizer, strategy(stage))
        model.train()
        assert [model(*data).item() for data in loader()] == pytest.approx(reference, rel=1e-4)
        before, version = snapshot(model)
        dense = plain(before)
        model.eval()
        losses = [model(*data).item() for data in loader()]
        assert losses == pytest.approx([nn.functional.mse_loss(dense(x), y).item() for x, y in map(batch, range(5))])
        model.predict()
        torch.testing.assert_close(model(batch()[0])["out0"], dense(batch()[0]))
        after, version_after = snapshot(model)
        assert version == version_after == 5 and all(torch.equal(after[name], before[name]) for name in before)


@TWO
def a_program_on_a_mesh_moves_this_ranks_boxes(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    for stage in LEVELS:
        program = made(mesh, stage).dist_main_program()
        # Half of both matrices and, since biases are replicated, the first rank's biases.
        half, biases = 4 * (16 * 16 + 16 * 8) // 2, 4 * (16 + 8)
        assert program.bytes("push") == half + (biases if rank == 0 else 0)
        assert program.bytes("pull") == half + biases
        serial = made(mesh, stage).serial_main_program()
        assert serial.bytes("push") == 2 * half + biases and not serial.find("collective")


@TWO
def programs_tell_what_ranks_do_together(rank: int) -> None:
    """What a style announces is in them at once; what a call has shown, with its bytes, from then on."""
    mesh = ProcessMesh([0, 1], ["x"])

    def together(program: Any) -> list[tuple[str, int | None]]:
        assert all(operation.group == (0, 1) for operation in program.find("collective"))
        return [(operation.subject, operation.nbytes) for operation in program.find("collective")]

    for style in (PairwiseParallel(), SequenceParallel()):
        layer = parallelize_module(DemoNet(), mesh, style)
        model = to_static(layer, None, nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1), strategy(2))
        pair = isinstance(style, PairwiseParallel) and not isinstance(style, SequenceParallel)
        announced, mean = together(model.dist_main_program("predict")), ("all_reduce", 4)
        assert announced == ([("all_reduce", None)] if pair else [("all_gather", None), ("reduce_scatter", None)])
        data = batch() if pair else share(batch(), rank)
        model(*data)
        # What goes into the first module needs no gradient: there is less to do than the style announced.
        images, outputs = 4 * 16 * 4, 4 * 8 * 4
        assert together(model.dist_main_program()) == (
            [("all_reduce", outputs), mean]
            if pair
            else [("all_gather", images // 2), ("reduce_scatter", outputs), mean, ("all_gather", outputs // 2)]
        )
        assert together(model.dist_main_program("predict")) == announced

    from torch.distributed.tensor.debug import CommDebugMode

    for stage in LEVELS:
        model = made(mesh, stage)
        assert not together(model.dist_main_program())
        with CommDebugMode() as counted:
            model(*batch())
        told = together(model.dist_main_program())
        assert len(told) == counted.get_total_counts() >= 2 and all(nbytes for _, nbytes in told)


@TWO
def a_state_on_a_mesh_goes_on_without_one_and_back(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    first = made(mesh, 2)
    for step in range(3):
        first(*batch(step))
    state = copy.deepcopy(first.state_dict())
    assert not any(type(value) is not Tensor for value in state.values() if isinstance(value, Tensor))
    losses = [first(*batch(step)).item() for step in range(3, 6)]
    second = made(None, 1)
    second.set_state_dict(state)
    # Every rank has the whole batch: the mean of the ranks' gradients is that of one.
    assert [second(*batch(step)).item() for step in range(3, 6)] == pytest.approx(losses, rel=1e-5)
    third = made(mesh, 3)
    third.set_state_dict(state)
    assert [third(*batch(step)).item() for step in range(3, 6)] == losses


@TWO
def a_model_of_styles_trains_as_the_dense_one(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    for stage in LEVELS:
        layer = parallelize_module(DemoNet(), mesh, PairwiseParallel())
        model = to_static(layer, None, nn.MSELoss(), torch.optim.AdamW(layer.parameters(), lr=0.1), strategy(stage))
        assert [model(*batch(step)).item() for step in range(5)] == pytest.approx(dense_losses(5), rel=1e-4)


@FOUR
def batches_and_matrices_are_cut_on_one_mesh(rank: int) -> None:
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    loader = shard_dataloader([batch(step) for step in range(5)], [mesh], shard_dims="dp")
    for stage in LEVELS:
        layer = DemoNet()

        def shard_fn(name: str, inner: Any, given: Any) -> None:
            cut = {"linear_0": Shard(0), "linear_1": Shard(1)}.get(name)
            if cut is not None:
                inner.weight = shard_tensor(inner.weight, given, [Replicate(), cut])

        shard_layer(layer, mesh, shard_fn)
        model = to_static(layer, loader, nn.MSELoss(), torch.optim.AdamW(layer.parameters(), lr=0.1), strategy(stage))
        assert [model(*data).item() for data in loader()] == pytest.approx(dense_losses(5), rel=1e-4)
        model.predict()
        torch.testing.assert_close(model(next(loader())[0])["out0"], plain(model.state_dict("param"))(batch()[0]))


@FOUR
def replicas_on_slices_of_a_mesh_train_together(rank: int) -> None:
    """Each has its own part of the batch: by styles, whose tensors are plain between modules, and by DTensors."""
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    for stage in LEVELS:
        for layer in (parallelize_module(DemoNet(), mesh["tp"], PairwiseParallel()), DemoNet(mesh["tp"])):
            model = to_static(layer, None, nn.MSELoss(), torch.optim.AdamW(layer.parameters(), lr=0.1), strategy(stage))
            losses = [model(*share(batch(step), rank // 2)).item() for step in range(5)]
            assert losses == pytest.approx(dense_losses(5), rel=1e-4)
            startup = model.dist_startup_program()
            assert len(startup.find("push")) == {0: 4, 1: 2 + model._by_styles, 2: 0, 3: 0}[rank]


two, four = TWO.fixture(__name__, servers=True), FOUR.fixture(__name__, servers=True)


@pytest.mark.parametrize("fact", TWO.names)
def test_on_two_ranks(fact: str, two: Outcomes) -> None:
    two.check(fact)


@pytest.mark.parametrize("fact", FOUR.names)
def test_on_four_ranks(fact: str, four: Outcomes) -> None:
    four.check(fact)
