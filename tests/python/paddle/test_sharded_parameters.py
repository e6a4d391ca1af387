"""Parameters that live on the servers, overflow, and changes by the program to a sharded model."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard.paddle import GradScaler, clip_grad_norm_, group_sharded_parallel

import models
import ranks
from training import LEVELS, SEGMENT, assert_close, assert_same


def wrapped(level: str = "p_g_os", model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """The original layer, its wrapper and the optimizer."""
    layer = models.build("mlp") if model is None else model
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    made, sharded, _ = group_sharded_parallel(
        layer, optimizer, level, **{"segment_size": SEGMENT, **options}
    )
    return layer, made, sharded


def here(parameter: Any) -> bool:
    return bool(parameter._is_initialized())


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    model(*models.batch("mlp", number, 8)).backward()
    optimizer.step()
    optimizer.clear_grad()


@pytest.mark.parametrize("numel", [63, 64, 65])
def test_only_parameters_larger_than_a_segment_live_on_the_servers(
    cluster: zs.Session, numel: int
) -> None:
    layer, _, _ = wrapped(model=nn.Linear(numel, 1, bias_attr=False), segment_size=64)
    assert here(layer.parameters()[0]) == (numel <= 64)


def test_batch_norm_keeps_its_statistics_on_the_worker_and_frozen_weights_move(
    cluster: zs.Session,
) -> None:
    def run(level: str | None) -> tuple[Any, Any]:
        layer = models.build("cnn")
        for parameter in layer.layers[4].parameters():
            parameter.stop_gradient = True
        model: Any = layer
        optimizer: Any = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        if level is not None:
            _, model, optimizer = wrapped(level, layer, segment_size=4)
        for number in range(3):
            model(*models.batch("cnn", number, 8)).backward()
            optimizer.step()
            optimizer.clear_grad()
        if level == "p_g_os":
            on_worker = {name for name, parameter in layer.named_parameters() if here(parameter)}
            assert on_worker == {f"layers.{n}.{s}" for n in (1, 5) for s in ("_mean", "_variance")}
        model.eval()
        loss = float(model(*models.batch("cnn", 5, 8)))
        return loss, {name: value.numpy() for name, value in model.state_dict().items()}

    loss, state = run(None)
    for level in LEVELS:
        ours, found = run(level)
        assert ours == pytest.approx(loss, rel=1e-4), level
        assert_close(found, state)


def test_parameters_are_gathered_only_while_they_are_used(cluster: zs.Session) -> None:
    layer, model, optimizer = wrapped(sync_comm=True)
    weights = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
    assert not any(map(here, weights))
    seen: list[list[bool]] = []
    layer.layers[2].register_forward_pre_hook(
        lambda *_: seen.append([here(weight) for weight in weights])
    )
    loss = model(*models.batch("mlp", 0, 8))
    assert not any(map(here, weights))
    loss.backward()
    assert not any(map(here, weights))
    optimizer.step()
    assert seen == [[False, False, False]]
    assert not any(map(here, weights))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.layers[0].weight.sum(),
        lambda layer: (layer.parameters()[0] ** 2).sum(),
        lambda layer: (2.0 * layer.parameters()[0]).numpy(),
        lambda layer: paddle.matmul(paddle.ones([1, models.FEATURES]), layer.layers[0].weight),
        lambda layer: copy.deepcopy(layer.parameters()[0]).numpy(),
        lambda layer: layer.state_dict()["layers.0.weight"].numpy(),
        lambda layer: repr(layer.parameters()[0]),
    ],
    ids=[
        "attribute",
        "operator",
        "reflected operator",
        "function",
        "deepcopy",
        "state_dict",
        "repr",
    ],
)
def test_a_parameter_that_is_used_outside_its_layer_is_fetched(
    cluster: zs.Session, use: Any
) -> None:
    whole = models.build("mlp")
    layer, _, _ = wrapped()
    expected, found = use(whole), use(layer)
    if isinstance(found, str):
        assert "Not initialized" not in found
    else:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_outlive_their_model_if_all_were_fetched(
    cluster: zs.Session, level: str
) -> None:
    def trained(level: str | None, fetch: bool) -> Any:
        layer: Any = models.build("mlp")
        model, optimizer = layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        if level is not None:
            _, model, optimizer = wrapped(level, layer)
        step(model, optimizer)
        if fetch and level is not None:
            model.get_all_parameters()
        return model.parameters()

    expected, kept, lost = trained(None, True), trained(level, True), trained(level, False)
    gc.collect()
    for parameter, plain in zip(kept, expected, strict=True):
        np.testing.assert_allclose(parameter.numpy(), plain.numpy(), rtol=1e-6, atol=1e-7)
        assert np.isfinite(float(paddle.sum(parameter)))
    assert [p.shape for p in lost] == [p.shape for p in expected]
    if level == "p_g_os":
        with pytest.raises(zs.InvalidArgumentError, match="get_all_parameters"):
            lost[0].numpy()
    else:
        np.testing.assert_array_equal(lost[0].numpy(), kept[0].numpy())


def test_fetched_parameters_are_trained_on(cluster: zs.Session) -> None:
    layer, model, optimizer = wrapped()
    model.get_all_parameters()
    assert all(map(here, layer.parameters()))
    step(model, optimizer)
    other, again, second = wrapped("os", models.build("mlp"))
    step(again, second)
    assert optimizer.state_hash() == second.state_hash()
    assert not here(layer.layers[0].parameters()[0])


def test_a_copy_of_a_sharded_layer_is_a_plain_layer(cluster: zs.Session) -> None:
    layer, model, optimizer = wrapped()
    copied = copy.deepcopy(layer)
    step(model, optimizer)
    data = models.batch("mlp", 0, 8)
    assert float(copied(*data)) == float(models.build("mlp")(*data))
    assert float(copied(*data)) != float(model(*data))


def test_views_that_the_program_holds_keep_their_values(cluster: zs.Session) -> None:
    layer, model, optimizer = wrapped()
    kept = layer.layers[0].weight.detach()
    before = kept.numpy().copy()
    step(model, optimizer)
    np.testing.assert_array_equal(kept.numpy(), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("summoned", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        "set_value",
        "set_state_dict",
        "in place",
        "copy_",
        "data",
        "in place of data",
        "initializer",
        "get_tensor",
    ],
)
def test_training_continues_from_values_that_the_program_writes(
    cluster: zs.Session, level: str, how: str, summoned: bool
) -> None:
    layer, model, optimizer = wrapped(level)
    step(model, optimizer)
    job = model.sharding.job.job.name
    whole = model.summon_full_params() if summoned else contextlib.nullcontext()
    with whole, paddle.no_grad():
        weight = next(iter(layer.parameters()))  # does not read it, as layer.weight does
        new = paddle.full(weight.shape, 0.01)
        if how == "set_value":
            weight.set_value(new)
        elif how == "copy_":
            weight.copy_(new, True)
        elif how == "data":
            weight.data = new
        elif how == "in place of data":
            weight.data.scale_(0.0)
            weight.data.add_(new)
        elif how == "initializer":
            paddle.nn.initializer.Constant(0.01)(weight)
        elif how == "get_tensor":
            weight.get_tensor().set(new.numpy(), paddle.CPUPlace())
        elif how == "in place":
            weight.scale_(0.0)
            weight.add_(new)
        else:
            layer.layers[0].set_state_dict({"weight": new, "bias": layer.layers[0].bias.clone()})
    with paddle.no_grad():
        model(*models.batch("mlp", 1, 8))  # a forward does not lose them
    optimizer.step()  # of nothing
    with model.summon_full_params():
        np.testing.assert_array_equal(layer.layers[0].weight.numpy(), new.numpy())
    assert model.sharding.job.job.name == job, "a write does not create a job"


def test_values_that_the_program_writes_to_frozen_parameters_are_kept(cluster: zs.Session) -> None:
    def run(level: str | None) -> Any:
        layer: Any = models.build("frozen")
        model, optimizer = layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        if level is not None:
            _, model, optimizer = wrapped(level, layer)
        for number in range(5):
            model(*models.batch("mlp", number, 8)).backward()
            # Also between backward and the step.
            for after in (False, True):
                if after:
                    optimizer.step()
                with paddle.no_grad():
                    layer.layers[2].weight.scale_(0.9)
            optimizer.clear_grad()
        return {name: value.numpy() for name, value in model.state_dict().items()}

    found = {level: run(level) for level in (None, *LEVELS)}
    for level in LEVELS:
        assert (found[level]["layers.2.weight"] == found[None]["layers.2.weight"]).all(), level
        assert_close(found[level], found[None])


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_was_sent_is_used_or_an_error(cluster: zs.Session, level: str) -> None:
    layer, model, optimizer = wrapped(level, accumulation_steps=1)
    weight, bias = layer.layers[0].parameters()

    def backward() -> None:
        optimizer.clear_grad()
        model(*models.batch("mlp", 0, 8)).backward()

    def set_gradient() -> None:
        bias.grad = paddle.ones([32])
        optimizer.step()

    def step_again() -> None:
        optimizer.step()
        model(*models.batch("mlp", 0, 8)).backward()
        optimizer.step()

    for use in (
        lambda: weight.grad,
        lambda: weight.gradient(),
        lambda: paddle.nn.utils.clip_grad_norm_(layer.parameters(), 0.1),
        set_gradient,
        step_again,
    ):
        backward()
        if level == "os" or use is not step_again:
            use()
            assert optimizer.last_report is None or optimizer.last_report.gradient_norm > 0
        else:
            with pytest.raises(zs.InvalidArgumentError, match="gradient of"):
                use()
    backward()
    bias.set_value(paddle.full([32], 100.0))
    optimizer.step()
    assert float(bias.min()) > 90.0
    for clear in (optimizer.clear_grad, layer.clear_gradients):
        backward()
        clear()
        assert weight.grad is None or (level == "os" and not weight.grad.numpy().any())
        step(model, optimizer)


def test_a_sparse_gradient_becomes_dense(cluster: zs.Session) -> None:
    def run(level: str | None) -> Any:
        paddle.seed(3)
        model: Any = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
        optimizer: Any = paddle.optimizer.SGD(0.5, parameters=model.parameters())
        if level is not None:
            model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=16)
        for _ in range(3):
            model(paddle.to_tensor([1, 2, 1, 19])).square().sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return model.state_dict()["0.weight"].numpy()

    for level in LEVELS:
        np.testing.assert_allclose(run(level), run(None), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_a_deleted_model_leaves_its_job(cluster: zs.Session, level: str) -> None:
    layer, model, optimizer = wrapped(level)
    step(model, optimizer)
    sharding = model.sharding
    name = sharding.job.job.name
    assert any(job.name == name for job in zs.status().jobs)
    del layer, model, optimizer, sharding
    gc.collect()
    for _ in range(1000):  # it leaves in the background
        if not any(job.name == name and job.joined for job in zs.status().jobs):
            return
    raise AssertionError(f"{name} is still there")


def test_an_additional_backward_pass_is_an_error_that_names_the_parameter(
    cluster: zs.Session,
) -> None:
    _, model, optimizer = wrapped("os_g", accumulation_steps=1)
    model(*models.batch("mlp", 0, 8)).backward()
    with pytest.raises(zs.InvalidArgumentError, match="already sent to the servers"):
        model(*models.batch("mlp", 1, 8)).backward()
    optimizer.clear_grad()
    step(model, optimizer)


def test_an_error_in_a_forward_frees_gathered_parameters(cluster: zs.Session) -> None:
    layer, model, optimizer = wrapped()
    with pytest.raises(ValueError):
        model(paddle.ones([2, 3]), paddle.to_tensor([1, 1]))
    assert not any(here(parameter) for parameter in layer.parameters() if parameter.ndim == 2)
    step(model, optimizer)


def test_clipping_returns_the_norm_of_the_gradient(cluster: zs.Session) -> None:
    plain = models.build("mlp")
    plain(*models.batch("mlp", 0, 8)).backward()
    norm = float(sum((p.grad**2).sum() for p in plain.parameters()) ** 0.5)
    for level in LEVELS:
        _, model, optimizer = wrapped(level)
        model(*models.batch("mlp", 0, 8)).backward()
        assert float(clip_grad_norm_(model, 0.1)) == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        assert optimizer.last_report.clip_coefficient == pytest.approx(0.1 / norm, rel=1e-4)


def _overflow(rank: int, level: str) -> Any:
    layer = models.build("mlp")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    scaler: Any = GradScaler(init_loss_scaling=1024.0)
    model, sharded, scaler = group_sharded_parallel(
        layer, optimizer, level, scaler=scaler, segment_size=SEGMENT
    )
    hashes, scales = [sharded.state_hash()], []
    for number in range(3):
        loss = model(*models.batch("mlp", number, 8))
        if number == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.minimize(sharded, loss)
        sharded.clear_grad()
        hashes.append({name: value.numpy() for name, value in model.state_dict().items()})
        scales.append(float(scaler.state_dict()["scale"][0]))
    same = all(np.array_equal(hashes[1][name], hashes[2][name]) for name in hashes[1])
    moved = any(not np.array_equal(hashes[2][name], hashes[3][name]) for name in hashes[1])
    return same, moved, scales, sharded.last_report.applied


@pytest.mark.parametrize("level", LEVELS)
def test_inf_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    pair: ranks.Team, processes: dict[str, str], level: str
) -> None:
    for found in pair.run(_overflow, level, env=processes):
        assert found == (True, True, [1024.0, 512.0, 512.0], True)


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_scaler_inf_and_nan_are_errors_and_change_nothing(
    cluster: zs.Session, level: str
) -> None:
    layer, model, optimizer = wrapped(level)

    def values() -> Any:
        return {name: value.numpy() for name, value in model.state_dict().items()}

    step(model, optimizer)
    before = values()
    for factor in (float("inf"), float("nan")):
        (model(*models.batch("mlp", 0, 8)) * factor).backward()
        with pytest.raises(zs.InvalidArgumentError, match="inf or NaN"):
            optimizer.step()
        optimizer.clear_grad()
        assert_same(values(), before)
    step(model, optimizer)
    assert any((value != before[name]).any() for name, value in values().items())


def test_clipping_twice_clips_to_the_smaller_norm(cluster: zs.Session) -> None:
    for own, once in ((0.1, 0.2), (0.2, 0.1)):
        layer = models.build("mlp")
        clip = nn.ClipGradByGlobalNorm(own)
        given = paddle.optimizer.SGD(0.1, parameters=layer.parameters(), grad_clip=clip)
        model, optimizer, _ = group_sharded_parallel(layer, given, "os")
        model(*models.batch("mlp", 0, 8)).backward()
        norm = float(clip_grad_norm_(model, once))
        optimizer.step()
        assert optimizer.last_report.clip_coefficient == pytest.approx(0.1 / norm, rel=1e-4)


@pytest.mark.parametrize("level", ["p_g", "", "os_g_p", None])
def test_an_unknown_level_is_refused(cluster: zs.Session, level: Any) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="'os', 'os_g', 'p_g_os'"):
        wrapped(level)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (lambda m: object(), lambda m: paddle.optimizer.SGD(parameters=m.parameters())),
        (lambda m: m, lambda m: object()),
        (lambda m: m, lambda m: paddle.optimizer.SGD(parameters=nn.Linear(2, 2).parameters())),
    ],
    ids=["no layer", "no optimizer", "another model's optimizer"],
)
def test_another_type_than_a_model_or_its_optimizer_is_refused(
    cluster: zs.Session, model: Any, optimizer: Any
) -> None:
    layer = models.mlp()
    with pytest.raises(zs.InvalidArgumentError, match="must be|model.parameters"):
        group_sharded_parallel(model(layer), optimizer(layer), "os")


def test_without_paddle_the_import_error_names_the_package() -> None:
    code = (
        "import sys; sys.modules['paddle'] = None\n"
        "try:\n import zeroshard.paddle\nexcept ImportError as e: print(e)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "pip install paddlepaddle" in said
