"""DistModel and its programs, and ZeRO with distributed parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from paddle.distributed.fleet.utils import recompute

import ranks

FEATURES, HIDDEN, CLASSES, BATCH, STEPS = 8, 12, 4, 6, 60
LEVELS = ("os", "os_g", "p_g_os")


def network() -> Any:
    paddle.seed(11)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batch(step: int) -> tuple[Any, Any]:
    generator = np.random.RandomState(step % 8)
    inputs = generator.randn(BATCH, FEATURES).astype(np.float32)
    return paddle.to_tensor(inputs), paddle.to_tensor(inputs[:, :CLASSES] * 2)


def optimizer_of(layer: Any) -> Any:
    return paddle.optimizer.AdamW(
        0.01, parameters=layer.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.5)
    )


@functools.cache
def dense(steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses in a single process with plain Paddle."""
    layer = network()
    optimizer, losses = optimizer_of(layer), []
    for step in range(steps):
        inputs, labels = batch(step)
        loss = nn.MSELoss()(layer(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def sharded(shape: Any) -> Any:
    """The network on a mesh: the first matrix is sharded by outputs, the second by inputs."""
    from zeroshard.paddle import ProcessMesh, Replicate, Shard, shard_layer, shard_tensor

    names = ["dp", "tp"][-np.ndim(shape) :]
    mesh = ProcessMesh(shape, dim_names=names)

    def shard_fn(name: str, layer: Any, mesh: Any) -> None:
        if isinstance(layer, nn.Linear):
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(1 if name == "0" else 0)]
            layer.weight = shard_tensor(layer.weight, mesh, placements)

    return mesh, shard_layer(network(), mesh, shard_fn)


def trained_at_every_level(rank: int, shape: Any) -> list[Any]:
    return [trained(rank, shape, level) for level in LEVELS]


def trained(rank: int, shape: Any, level: str) -> Any:
    from zeroshard.paddle import Strategy, shard_dataloader, to_static

    mesh, layer = sharded(shape)
    # Of a mesh with data parallelism each row of ranks has its part of the batch.
    loader = shard_dataloader(
        [batch(step) for step in range(STEPS)], mesh, shard_dims="dp" if mesh.ndim > 1 else None
    )
    stage = LEVELS.index(level) + 1
    strategy = Strategy({"sharding": {"enable": True, "stage": stage}})
    model = to_static(layer, None, nn.MSELoss(), optimizer_of(layer), strategy)
    assert model.mode == "train"
    losses = [float(model(*data)) for data in loader()]
    before = model.optimizer.state_hash()
    inputs, labels = batch(0)
    model.eval()
    evaluated = float(model(inputs, labels))
    model.predict()
    outputs = model(inputs)
    assert list(outputs) == ["out0"]
    assert model.optimizer.state_hash() == before
    state = {name: value.numpy() for name, value in model.state_dict("param").items()}
    return losses, state, before, evaluated, outputs["out0"].numpy()


@pytest.mark.parametrize("shape", [[0, 1], [[0, 1], [2, 3]]], ids=["tp 2", "dp 2, tp 2"])
def test_zero_and_tensor_parallelism_train_as_one_dense_process(
    processes: dict[str, str], shape: Any
) -> None:
    by_rank = ranks.run(int(np.size(shape)), trained_at_every_level, shape, env=processes)
    for found in zip(*by_rank, strict=True):
        _assert_trained_as_dense(found)


def _assert_trained_as_dense(found: Sequence[Any]) -> None:
    """Compares the ranks' results at one level with the dense ones."""
    losses, state = dense()
    plain = network()
    plain.set_state_dict({name: paddle.to_tensor(value) for name, value in found[0][1].items()})
    inputs, labels = batch(0)
    for ours, whole, hashed, evaluated, outputs in found:
        assert max(abs(a - b) / abs(b) for a, b in zip(ours, losses)) < 1e-4
        for name, values in whole.items():
            np.testing.assert_allclose(values, state[name], rtol=1e-3, atol=1e-5)
        assert hashed == found[0][2]
        assert evaluated == pytest.approx(float(nn.MSELoss()(plain(inputs), labels)), rel=1e-5)
        np.testing.assert_allclose(outputs, plain(inputs).numpy(), rtol=1e-5, atol=1e-6)


def on_one_rank(loss: Any = None, optimizer: bool = False) -> Any:
    from zeroshard.paddle import to_static

    layer = network()
    return to_static(layer, None, loss, optimizer_of(layer) if optimizer else None)


def test_the_initial_mode_follows_from_loss_and_optimizer(cluster: zs.Session) -> None:
    assert on_one_rank(nn.MSELoss(), True).mode == "train"
    assert on_one_rank(nn.MSELoss()).mode == "eval"
    assert on_one_rank().mode == "predict"


def test_a_mode_without_its_loss_or_optimizer_is_refused(cluster: zs.Session) -> None:
    model = on_one_rank()
    with pytest.raises(zs.InvalidArgumentError, match="a loss and an optimizer"):
        model.train()
    with pytest.raises(zs.InvalidArgumentError, match="a loss"):
        model.eval()
    with pytest.raises(zs.InvalidArgumentError, match="an optimizer"):
        on_one_rank(nn.MSELoss()).train()


def test_eval_and_predict_change_nothing_and_train_does(cluster: zs.Session) -> None:
    model = on_one_rank(nn.MSELoss(), True)
    data = batch(0)
    before, version = model.optimizer.state_hash(), model.optimizer.sharding.job.version
    model.eval()
    loss = float(model(*data))
    model.predict()
    model(data[0])
    assert (model.optimizer.state_hash(), model.optimizer.sharding.job.version) == (before, version)
    model.train()
    assert float(model(*data)) == loss
    assert (
        model.optimizer.state_hash() != before
        and model.optimizer.sharding.job.version == version + 1
    )


def test_other_types_and_wrong_numbers_of_tensors_are_refused(cluster: zs.Session) -> None:
    model = on_one_rank(nn.MSELoss(), True)
    inputs, labels = batch(0)
    with pytest.raises(TypeError, match=r"paddle\.Tensor"):
        model(inputs, 3)
    with pytest.raises(ValueError, match="got 1 tensors"):
        model(inputs)
    model.predict()
    with pytest.raises(ValueError, match="got 2 tensors"):
        model(inputs, labels)


def test_programs_list_the_operations_of_each_mode(cluster: zs.Session) -> None:
    model = on_one_rank(nn.MSELoss(), True)
    programs = {mode: model.dist_main_program(mode) for mode in ("train", "eval", "predict")}
    assert len({str(program) for program in programs.values()}) == 3
    assert [operation.verb for operation in programs["predict"]] == ["forward", "forward"]
    assert [operation.verb for operation in programs["eval"]] == ["forward", "forward", "loss"]
    train = programs["train"]
    assert [operation.subject for operation in train.find("backward")] == ["2", "0"]
    assert len(train.find("push")) == 4 and len(train.find("commit")) == 1
    assert model.dist_startup_program().find("join") and not list(
        model.dist_startup_program("eval")
    )
    model.eval()
    assert model.dist_main_program() == programs["eval"]


def programs(rank: int) -> Any:
    from zeroshard.paddle import Strategy, to_static

    _, layer = sharded([0, 1])
    strategy = Strategy({"sharding": {"enable": True, "stage": 2}})
    model = to_static(layer, None, nn.MSELoss(), optimizer_of(layer), strategy)
    sent = zs._session.connection().cluster.traffic()[1]
    inputs, labels = batch(0)
    model(inputs, labels)
    sent = zs._session.connection().cluster.traffic()[1] - sent
    return model.dist_main_program(), model.serial_main_program(), sent


def test_a_worker_pushes_the_bytes_in_its_program(pair: ranks.Team) -> None:
    for rank, (dist, serial, sent) in enumerate(pair.run(programs)):
        pushed = {operation.subject: operation for operation in dist.find("push")}
        assert str(pushed["0.weight"].box) == f"[0:8, {6 * rank}:{6 * rank + 6}]"
        assert str(pushed["2.weight"].box) == f"[{6 * rank}:{6 * rank + 6}, 0:4]"
        # What is replicated comes from the first.
        assert ("0.bias" in pushed) == (rank == 0)
        assert dist.bytes("push") == sent
        assert serial.bytes("push") == 4 * (FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)


def saved(rank: int, folder: str) -> Any:
    from zeroshard.paddle import (
        group_sharded_parallel,
        load_group_sharded_model,
        save_group_sharded_model,
    )

    _, layer = sharded([0, 1])
    model, optimizer, _ = group_sharded_parallel(
        layer, optimizer_of(layer), "p_g_os", segment_size=16
    )

    def steps(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs, labels = batch(step)
            loss = nn.MSELoss()(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        return losses

    before = steps(0, 2)
    save_group_sharded_model(model, folder, optimizer)
    after = steps(2, 4)
    paddle.distributed.barrier()
    load_group_sharded_model(model, folder, optimizer)
    return before + after, after, steps(2, 4)


def test_the_state_of_a_model_on_a_mesh_is_whole_and_can_be_loaded(
    pair: ranks.Team, processes: dict[str, str], tmp_path: Path
) -> None:
    losses, _ = dense(4)
    for ours, went_on, again in pair.run(saved, str(tmp_path), env=processes):
        np.testing.assert_allclose(ours, losses, rtol=1e-4)
        assert again == went_on
    plain = network()
    plain.set_state_dict(paddle.load(str(tmp_path / "model.pdmodel")))
    np.testing.assert_allclose(
        plain[0].weight.numpy(), dense(2)[1]["0.weight"], rtol=1e-4, atol=1e-6
    )


def staged(rank: int, stage: int) -> Any:
    import zeroshard.paddle as dist

    layer = network()
    make = [dist.ShardingStage1, dist.ShardingStage2, dist.ShardingStage3][stage - 1]
    optimizer = dist.shard_optimizer(optimizer_of(layer), make(), model=layer)
    losses = []
    for step in range(10):
        inputs, labels = (each.chunk(2)[rank] for each in batch(step))
        loss = nn.MSELoss()(layer(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, optimizer.sharding.level, optimizer.state_hash()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_of_shard_optimizer_are_levels(
    pair: ranks.Team, processes: dict[str, str], stage: int
) -> None:
    first, second = pair.run(staged, stage, env=processes)
    assert first[1:] == second[1:] and first[1] == LEVELS[stage - 1]
    mean = [(a + b) / 2 for a, b in zip(first[0], second[0])]
    np.testing.assert_allclose(mean, dense(10)[0], rtol=1e-4)


def test_stage_3_needs_the_model(cluster: zs.Session) -> None:
    import zeroshard.paddle as dist

    with pytest.raises(zs.InvalidArgumentError, match="model"):
        dist.shard_optimizer(optimizer_of(network()), dist.ShardingStage3())


def test_state_can_be_loaded_into_another_model(cluster: zs.Session) -> None:
    first = on_one_rank(nn.MSELoss(), True)
    for step in range(3):
        first(*batch(step))
    second = on_one_rank(nn.MSELoss())
    second.set_state_dict(first.state_dict("param"))
    data = batch(0)
    first.eval()
    assert float(second(*data)) == float(first(*data))
    with pytest.raises(zs.InvalidArgumentError, match="no optimizer"):
        second.set_state_dict(first.state_dict())


class Recomputed(nn.Sequential):
    """Recomputes its layers during backward."""

    def forward(self, x: Any) -> Any:
        return recompute(super().forward, x) if paddle.is_grad_enabled() else super().forward(x)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_may_recompute_activations(cluster: zs.Session, level: str) -> None:
    from zeroshard.paddle import group_sharded_parallel, to_static

    layer = Recomputed(*network())
    _, optimizer, _ = group_sharded_parallel(layer, optimizer_of(layer), level, segment_size=16)
    model = to_static(layer, None, nn.MSELoss(), optimizer)
    ours = []
    for number in range(6):
        inputs, labels = batch(number)
        inputs.stop_gradient = False
        ours.append(float(model(inputs, labels)))
    losses, state = dense(6)
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    for value, plain in zip(model.state_dict("param").values(), state.values(), strict=True):
        np.testing.assert_allclose(value.numpy(), plain, rtol=1e-3, atol=1e-5)
    model.eval()
    assert float(model(*batch(0))) > 0


def test_a_strategy_has_the_fields_of_paddle_and_says_which_have_no_effect(
    cluster: zs.Session,
) -> None:
    import zeroshard.paddle as dist
    from paddle.distributed.auto_parallel import strategy as original

    def made(strategy: Any) -> Any:
        layer = network()
        return dist.to_static(layer, None, nn.MSELoss(), optimizer_of(layer), strategy, [[], []])

    def fields(strategy: Any) -> dict[str, Any]:
        found = {name: value for name, value in vars(strategy).items() if name[0] != "_"}
        return {
            name: fields(value) if hasattr(value, "__dict__") else value
            for name, value in found.items()
        }

    assert fields(dist.Strategy()) == fields(original.Strategy())
    strategy = dist.Strategy(
        {"sharding": {"enable": True, "stage": 2}, "amp": {"dtype": "bfloat16"}}
    )
    assert made(strategy).optimizer.sharding.level == "os_g"
    strategy = dist.Strategy({"seed": 3})
    strategy.recompute.enable = True
    strategy.sharding.degree = 2
    with pytest.warns(UserWarning, match="without an effect: seed, recompute.enable$"):
        assert made(strategy).state_dict("param", split_fusion=False)
    for section in ("amp", "gradient_merge", "pipeline", "qat"):
        with pytest.raises(zs.InvalidArgumentError, match=f"{section}.enable of the strategy"):
            made(dist.Strategy({section: {"enable": True}}))
    for config in ({"shrading": {}}, {"sharding": {"stgae": 2}}, {"amp": True}):
        with pytest.raises(zs.InvalidArgumentError, match="the strategy's config"):
            dist.Strategy(config)


def loaded_in_part(rank: int) -> Any:
    import zeroshard.paddle as dist

    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    samples = paddle.arange(4, dtype="float32") + 10 * rank
    parts = {"a": [samples, samples], "b": samples, "c": samples}
    found = []
    for data in (parts, list(parts.values())):
        loader = dist.shard_dataloader(
            [data], mesh, ["a", "b", "c"], "x", dense_tensor_idx=[[1], [], [0]]
        )
        (placed,) = loader
        (first, second), third, fourth = placed.values() if isinstance(placed, dict) else placed
        found.append([(t.is_dist(), t.shape) for t in (first, second, third, fourth)])
        found.append([second.numpy().tolist(), fourth.numpy().tolist()])
    return found


def test_elements_of_a_batch_may_stay_plain_tensors(pair: ranks.Team) -> None:
    kinds = [(True, [4]), (False, [2]), (True, [4]), (False, [2])]
    for rank, found in enumerate(pair.run(loaded_in_part)):
        own = [[2.0 * rank, 2.0 * rank + 1]] * 2
        assert found == [kinds, own] * 2


def loaded(rank: int, dims: Any) -> Any:
    import zeroshard.paddle as dist

    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    data = [
        (paddle.full([4, 2], float(10 * rank + number)), paddle.to_tensor([number] * 4))
        for number in range(2)
    ]
    loader = dist.shard_dataloader(data, mesh, shard_dims=dims)
    assert len(loader) == 2
    return [
        [(str(part.placements), part._local_value().numpy()) for part in parts]
        for parts in loader()
    ]


@pytest.mark.parametrize("dims", [None, "x", 0])
def test_a_sharded_loader_distributes_the_batches_of_the_first_rank(
    dims: Any, pair: ranks.Team
) -> None:
    for found in pair.run(loaded, dims):
        for number, parts in enumerate(found):
            for placed, values in parts:
                assert placed == ("[Replicate()]" if dims is None else "[Shard(dim=0)]")
                assert (values == number).all() and len(values) == (4 if dims is None else 2)
