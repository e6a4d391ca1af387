"""The behaviour that Paddle's users rely on in shard_layer, shard_optimizer and distributed models,
compared with Paddle where it runs on a CPU. docs/how-to/paddle-behaviour.md lists the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn

from comparison import Raised, assert_close, local_values, raised, run

WIDTH, ROWS, STEPS = 8, 4, 3


class Own(nn.Layer):
    """A layer with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH, WIDTH])
        self.bias = self.create_parameter([WIDTH], is_bias=True)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight, self.bias)


class Sum(nn.Layer):
    """A layer whose input is a list."""

    def forward(self, inputs: Any) -> Any:
        return sum(inputs[1:], inputs[0])


def mesh_of_all(dist: Any) -> Any:
    return dist.ProcessMesh(list(range(paddle.distributed.get_world_size())), dim_names=["x"])


def cut(dist: Any) -> Any:
    """A shard_fn that shards the weights of some layers by rows."""

    def shard_fn(name: str, layer: Any, mesh: Any) -> None:
        if isinstance(layer, Own):
            layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])

    return shard_fn


def placed(layer: Any) -> dict[str, Any]:
    """The kinds of the placements of parameters and buffers, and their local shapes."""
    return {
        name: [sorted({str(p) for p in tensor.placements}), tensor._local_shape]
        if tensor.is_dist()
        else "plain"
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    }


def batch(dist: Any, step: int) -> Any:
    """A batch that is sharded over the mesh."""
    values = np.random.RandomState(step).randn(ROWS, WIDTH).astype(np.float32)
    return dist.shard_tensor(paddle.to_tensor(values), mesh_of_all(dist), [dist.Shard(0)])


# shard_layer. Each function runs on Paddle alone and on ZeroShard.


def ten_nested_layers(dist: Any) -> Any:
    layer = nn.Sequential(*[nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH)) for _ in range(10)])
    dist.shard_layer(layer, mesh_of_all(dist), cut(dist))
    replicated = dist.shard_tensor(
        paddle.ones([ROWS, WIDTH]), mesh_of_all(dist), [dist.Replicate()]
    )
    loss = layer(replicated).square().mean()
    loss.backward()
    found = [str(parameter.grad.placements) for parameter in layer[0][0].parameters()]
    return [placed(layer), found, float(loss)]


def buffers_that_are_registered_later_or_are_distributed(dist: Any) -> Any:
    layer, mesh = nn.Sequential(Own()), mesh_of_all(dist)
    given = dist.shard_tensor(paddle.ones([WIDTH]), mesh, [dist.Shard(0)])
    layer[0].register_buffer("given", given)
    dist.shard_layer(layer, mesh, cut(dist))
    layer[0].register_buffer("late", paddle.ones([WIDTH]))
    before = placed(layer)
    dist.shard_layer(layer, mesh)
    return [before, placed(layer)]


def functions_around_a_forward(dist: Any) -> Any:
    def input_fn(inputs: Any, mesh: Any) -> Any:
        return dist.shard_tensor(inputs[0], mesh, [dist.Shard(0)])

    def output_fn(output: Any, mesh: Any) -> Any:
        assert output.is_dist()
        return paddle.to_tensor(output.numpy())

    layer = dist.shard_layer(Own(), mesh_of_all(dist), None, input_fn, output_fn)
    output = layer(paddle.ones([ROWS, WIDTH]))
    return [output.is_dist(), output.numpy()]


def input_that_is_a_list(dist: Any) -> Any:
    def input_fn(inputs: Any, mesh: Any) -> Any:
        return [value * 2 for value in inputs[0]]

    layer = dist.shard_layer(Sum(), mesh_of_all(dist), None, input_fn)
    return layer([paddle.ones([2]), paddle.ones([2])]).numpy()


def mesh_that_is_missing(dist: Any) -> Any:
    dist.shard_layer(Own(), None)


def mesh_that_is_a_list(dist: Any) -> Any:
    dist.shard_layer(Own(), [dist.Shard(0)])


def static_graph_mode(dist: Any) -> Any:
    mesh = mesh_of_all(dist)
    paddle.enable_static()
    try:
        dist.shard_layer(nn.Linear(2, 2), mesh)
    finally:
        paddle.disable_static()


# shard_optimizer


def trained(dist: Any, stage: Any = None, parts: int = 1, **options: Any) -> Any:
    """The losses of a Linear, its parameters, and the layer and optimizer."""
    paddle.seed(7)
    layer = nn.Linear(WIDTH, WIDTH)
    dist.shard_layer(layer, mesh_of_all(dist))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    if dist is not paddle.distributed and isinstance(stage, dist.ShardingStage3):
        options["model"] = layer
    optimizer = dist.shard_optimizer(optimizer, stage, **options)
    return [steps(dist, layer, optimizer, parts), local_values(layer), layer, optimizer]


def steps(dist: Any, layer: Any, optimizer: Any, parts: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        for part in range(parts):
            loss = layer(batch(dist, parts * step + part)).square().mean() / parts
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
    return losses


def optimizer_without_a_stage(dist: Any) -> Any:
    return trained(dist)[:2]


def accumulation_without_a_stage(dist: Any) -> Any:
    return trained(dist, parts=2, gradient_accumulation_steps=2)[:2]


def optimizer_of_each_stage(dist: Any) -> Any:
    stages = (dist.ShardingStage1, dist.ShardingStage2, dist.ShardingStage3)
    return [trained(dist, stage("x", mesh_of_all(dist)))[:2] for stage in stages]


def accumulation_at_stages_1_and_2(dist: Any) -> Any:
    return [
        trained(dist, stage("x", mesh_of_all(dist)), 2, gradient_accumulation_steps=2)[:2]
        for stage in (dist.ShardingStage1, dist.ShardingStage2)
    ]


def optimizer_state_that_is_loaded_again(dist: Any) -> Any:
    _, _, layer, optimizer = trained(dist, dist.ShardingStage1("x", mesh_of_all(dist)))
    model = {name: value.clone() for name, value in layer.state_dict().items()}
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    expected = steps(dist, layer, optimizer)
    layer.set_state_dict(model)
    optimizer.set_state_dict(state)
    assert_close(steps(dist, layer, optimizer), expected, rtol=0, atol=0)
    return expected


# Distributed models


class Samples(paddle.io.Dataset):
    """Inputs and labels."""

    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, number: int) -> Any:
        values = np.random.RandomState(number).randn(2, WIDTH).astype(np.float32)
        return values[0], values[1]


def dist_model(dist: Any, loss: bool = True, optimizer: bool = True) -> Any:
    """A distributed model and its batches."""
    paddle.seed(5)
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    dist.shard_layer(layer, mesh_of_all(dist))
    made = paddle.optimizer.AdamW(0.01, parameters=layer.parameters()) if optimizer else None
    batches = paddle.io.DataLoader(Samples(), batch_size=ROWS)
    loader = dist.shard_dataloader(batches, meshes=[mesh_of_all(dist)])
    given = None if made is None else dist.shard_optimizer(made)
    return dist.to_static(layer, loader, nn.MSELoss() if loss else None, given), list(loader)


def training_evaluation_and_state(dist: Any) -> Any:
    model, batches = dist_model(dist)
    model.train()
    losses = [float(np.asarray(model(*data))) for data in batches]
    state = {name: value.clone() for name, value in model.state_dict("all").items()}
    parameters = {name: value.numpy() for name, value in model.state_dict("param").items()}
    assert set(parameters) | set(model.state_dict("opt")) == set(state)
    after = [float(np.asarray(model(*data))) for data in batches]
    model.set_state_dict(state)
    assert_close([float(np.asarray(model(*data))) for data in batches], after, rtol=1e-6)
    model.eval()
    evaluated = [float(np.asarray(model(*data))) for data in batches]
    names = ("dist_main", "dist_startup", "serial_main", "serial_startup")
    assert all(str(getattr(model, f"{name}_program")("train")) for name in names)
    return [losses, parameters, after, evaluated]


def dygraph_training(dist: Any) -> Any:
    """The first losses of :func:`training_evaluation_and_state` without a distributed model."""
    paddle.seed(5)
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer, losses = paddle.optimizer.AdamW(0.01, parameters=layer.parameters()), []
    for inputs, labels in paddle.io.DataLoader(Samples(), batch_size=ROWS):
        loss = nn.MSELoss()(layer(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def call_in_train_mode_without_an_optimizer(dist: Any) -> Any:
    model, batches = dist_model(dist, optimizer=False)
    model.train()
    model(*batches[0])


def call_with_numbers(dist: Any) -> Any:
    model, _ = dist_model(dist)
    model.train()
    model(1, 2)


def program_of_an_unknown_mode(dist: Any) -> Any:
    dist_model(dist)[0].dist_main_program("tune")


def state_of_an_unknown_mode(dist: Any) -> Any:
    model, _ = dist_model(dist)
    model.train()
    model.state_dict("x")


LAYERS = (
    ten_nested_layers,
    buffers_that_are_registered_later_or_are_distributed,
    functions_around_a_forward,
    input_that_is_a_list,
    optimizer_without_a_stage,
    accumulation_without_a_stage,
)
#: Paddle needs a reduce-scatter for these on several ranks, which it does not have on a CPU.
ON_ONE_RANK = (
    optimizer_of_each_stage,
    accumulation_at_stages_1_and_2,
    optimizer_state_that_is_loaded_again,
    training_evaluation_and_state,
    dygraph_training,
)
#: The types that errors have on both systems.
REFUSED = {
    mesh_that_is_missing: "ValueError",
    mesh_that_is_a_list: "ValueError",
    static_graph_mode: "NotImplementedError",
    call_in_train_mode_without_an_optimizer: "ValueError",
    call_with_numbers: "TypeError",
    program_of_an_unknown_mode: "ValueError",
    state_of_an_unknown_mode: "ValueError",
}


@pytest.fixture(scope="module")
def on_two_ranks() -> Iterator[Any]:
    yield run(2, LAYERS)


@pytest.fixture(scope="module")
def on_one_rank() -> Iterator[Any]:
    yield run(1, [*ON_ONE_RANK, *REFUSED])


@pytest.mark.parametrize("name", [program.__name__ for program in LAYERS])
def test_two_ranks_of_a_mesh_get_the_results_of_paddle(on_two_ranks: Any, name: str) -> None:
    for ours, theirs in zip(on_two_ranks["zeroshard"], on_two_ranks["paddle"], strict=True):
        assert not isinstance(theirs[name], Raised), theirs[name]
        assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("name", [program.__name__ for program in ON_ONE_RANK])
def test_a_mesh_of_one_rank_gets_the_results_of_paddle(on_one_rank: Any, name: str) -> None:
    (ours,), (theirs,) = on_one_rank["zeroshard"], on_one_rank["paddle"]
    assert not isinstance(theirs[name], Raised), theirs[name]
    assert_close(ours[name], theirs[name])
    if name == dygraph_training.__name__:
        assert_close(ours[training_evaluation_and_state.__name__][0], theirs[name])


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_errors_have_the_types_that_they_have_in_paddle(on_one_rank: Any, program: Any) -> None:
    for system in on_one_rank.values():
        raised(system[0][program.__name__], REFUSED[program])


def test_errors_of_zeroshard_are_its_own(on_one_rank: Any) -> None:
    for program in REFUSED:
        raised(on_one_rank["zeroshard"][0][program.__name__], zs.Error.__name__)
