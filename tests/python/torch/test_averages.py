# promise: no-silent-difference
"""Running averages of the parameters."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import servers
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import LEVELS, SEGMENT, assert_same
from zeroshard.torch import averaged, group_sharded_parallel, pin, save_group_sharded_model

import models
import ranks
import zeroshard as zs

EMA = {
    "slow": 0.99,
    "warm": zs.Average(0.99, warmup="tenth"),
    "equal": zs.Average(start=2, every=2),
}


def network() -> Any:
    """A model with a frozen parameter and buffers."""
    torch.manual_seed(3)
    model: Any = models.cnn()
    model.layers[1].bias.requires_grad_(False)
    return model


def sharded(model: Any, level: str, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, of_servers, _ = group_sharded_parallel(
        model, optimizer, level, segment_size=SEGMENT, **options
    )
    return wrapped, of_servers


def step(model: Any, optimizer: Any, number: int, part: tuple[int, int] = (0, 1)) -> None:
    model(*models.share(models.batch("cnn", number, 8), *part)).backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def updated(average: Any, model: Any) -> None:
    """Updates an average in float64 by the values of a sharded model."""
    plain = network()
    plain.load_state_dict(values(model))
    average.update_parameters(plain.double())


def trained(model: Any) -> set[str]:
    return {name for name, parameter in network().named_parameters() if parameter.requires_grad}


def assert_is(found: dict[str, Tensor], expected: Any) -> None:
    """Compares values with a model in float64: one unit in the last place of float32."""
    reference = expected.state_dict()
    for name in trained(expected):
        assert torch.allclose(found[name].double(), reference[name], rtol=1.2e-7, atol=0), name


def average_at(rank: int, address: str, level: str, world: int, group_size: int) -> None:
    with zs.init(address, name=f"averages-{level}-{group_size}"):
        model, optimizer = sharded(network(), level, ema=EMA, group_size=group_size)
        slow = AveragedModel(network().double(), multi_avg_fn=get_ema_multi_avg_fn(0.99))
        equal = AveragedModel(network().double())
        for number in range(5):
            step(model, optimizer, number, (rank, world))
            updated(slow, model)
            if number in (1, 3):
                updated(equal, model)
        before = values(model)
        with averaged(model, "slow"):
            found = values(model)
            model.eval()
            with torch.no_grad():
                logits = model.logits(models.batch("cnn", 9, 4)[0])
            model.train()
        assert_is(found, slow.module)
        with averaged(model, "equal"):
            assert_is(values(model), equal.module)
        # What does not train stays, and the parameters return with the same bits.
        others = before.keys() - trained(model)
        assert_same({name: found[name] for name in others}, {name: before[name] for name in others})
        assert_same(values(model), before)
        plain = network()
        plain.load_state_dict(found)
        plain.eval()
        with torch.no_grad():
            assert torch.equal(logits, plain.logits(models.batch("cnn", 9, 4)[0]))
        step(model, optimizer, 5, (rank, world))
        updated(slow, model)
        with averaged(model, "slow"):
            assert_is(values(model), slow.module)


@pytest.mark.parametrize("level", LEVELS)
def test_averages_are_those_of_torch_in_float64(level: str) -> None:
    with servers(2) as address:
        ranks.run(1, average_at, address, level, 1, 1, init=None)
        for group_size in (1, 2):
            ranks.run(2, average_at, address, level, 2, group_size)


def test_a_reader_gets_an_average(cluster: zs.Session) -> None:
    model, optimizer = sharded(network(), "p_g_os", ema=EMA)
    for number in range(3):
        step(model, optimizer, number)
    job = zs.status().jobs[-1].name
    with averaged(model, "warm"):
        expected = values(model)
    with pin(job, average="warm") as pinned:
        step(model, optimizer, 3)
        fresh = network()
        pinned.load(fresh)
        parameters = dict(fresh.named_parameters())
        assert_same(parameters, {name: expected[name] for name in parameters})
        assert torch.equal(pinned["layers.0.weight"], expected["layers.0.weight"])
    with pytest.raises(zs.InvalidArgumentError, match="'fast'|\"fast\""):
        pin(job, average="fast")


def test_averages_of_half_precision_are_those_of_the_master_weights(cluster: zs.Session) -> None:
    bare: Any = models.mlp().bfloat16()
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-4)
    model, of_servers, _ = group_sharded_parallel(bare, optimizer, "os", ema={"slow": 0.9})
    for number in range(4):
        inputs, targets = models.batch("mlp", number, 8)
        model(inputs.bfloat16(), targets).backward()
        of_servers.step()
        of_servers.zero_grad()
    job = zs.status().jobs[-1].name
    with pin(job, average="slow") as exact, averaged(model, "slow"):
        for name, found in values(model).items():
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, exact[name].bfloat16()), name
            assert not torch.equal(exact[name], exact[name].bfloat16().float()), name


@pytest.mark.parametrize("on_skip", ["update", "keep"])
def test_a_skipped_step_counts_unless_the_program_says_otherwise(
    cluster: zs.Session, on_skip: str
) -> None:
    bare: Any = models.mlp()
    before = values(bare)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    ema = {"equal": zs.Average(on_skip=on_skip)}
    model, of_servers, scaled = group_sharded_parallel(bare, optimizer, "os", scaler, ema=ema)
    assert scaled is not None
    history = []
    for number in range(3):
        loss = model(*models.batch("mlp", number, 8))
        scaled.scale(loss * (torch.inf if number == 1 else 1.0)).backward()
        scaled.step(of_servers)
        scaled.update()
        of_servers.zero_grad()
        history.append(values(model))
    assert_same(history[1], history[0])
    counted = history if on_skip == "update" else [history[0], history[2]]
    with averaged(model, "equal"):
        for name, found in values(model).items():
            mean = sum(of[name].double() for of in counted) / len(counted)
            assert torch.allclose(found.double(), mean, rtol=1.2e-7, atol=1e-12), name
            assert not torch.equal(found, before[name])


def resumed(rank: int, address: str, folder: str, steps: range) -> dict[str, Tensor]:
    with zs.init(address, name="resumed"):
        checkpoints = zs.Checkpoints(folder, every=2)
        model, optimizer = sharded(network(), "os_g", ema=EMA, checkpoints=checkpoints)
        for number in steps:
            step(model, optimizer, number, (rank, 2))
        with averaged(model, "warm"):
            return values(model)


def test_a_checkpoint_restored_on_another_number_of_servers_continues_the_averages() -> None:
    with tempfile.TemporaryDirectory() as folder, servers(1) as one, servers(3) as three:
        whole = ranks.run(2, resumed, one, (Path(folder) / "whole").as_uri(), range(4))[0]
        half = (Path(folder) / "half").as_uri()
        ranks.run(2, resumed, one, half, range(2))
        found = ranks.run(2, resumed, three, half, range(2, 4))[0]
    assert_same(
        {name: found[name] for name in trained(found)}, {n: whole[n] for n in trained(whole)}
    )


def test_a_job_that_continues_from_another_one_continues_its_averages(cluster: zs.Session) -> None:
    found = []
    for unfreezes in (False, True):
        bare = network()
        model, optimizer = sharded(bare, "os_g", ema=EMA)
        for number in range(4):
            if unfreezes and number == 2:
                bare.layers[1].bias.requires_grad_(True)
            step(model, optimizer, number)
        with averaged(model, "slow"):
            found.append(values(model))
    # The first two steps are in both averages; a bias that trains changes the last ones a little.
    name = "layers.8.bias"
    assert torch.allclose(found[0][name], found[1][name], atol=1e-3)
    assert not torch.equal(found[0]["layers.1.bias"], found[1]["layers.1.bias"])


def test_averages_are_saved_and_what_would_train_on_them_is_refused(
    cluster: zs.Session, tmp_path: Path
) -> None:
    for level in LEVELS:
        model, optimizer = sharded(network(), level, ema=EMA)
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        pending = model(*models.batch("cnn", 2, 8))
        with averaged(model, "slow"):
            expected = values(model)
            save_group_sharded_model(model, tmp_path / level)
            for action in (
                lambda: model(*models.batch("cnn", 2, 8)),
                optimizer.step,
                pending.backward,
                lambda: model.load_state_dict(copy.copy(expected)),
            ):
                with pytest.raises(zs.InvalidArgumentError, match="average 'slow'"):
                    action()
            with pytest.raises(zs.InvalidArgumentError, match="average 'slow'"):
                with averaged(model, "warm"):
                    pass
        saved = torch.load(tmp_path / level / "model.pt")
        assert_same(saved, expected)
        optimizer.zero_grad()
        step(model, optimizer, 2)


def test_averages_that_do_not_exist_or_mean_nothing_are_refused(cluster: zs.Session) -> None:
    model, _ = sharded(network(), "os", ema={"slow": 0.9})
    with pytest.raises(zs.InvalidArgumentError, match="'fast'.*'slow'"):
        with averaged(model, "fast"):
            pass
    with pytest.raises(zs.InvalidArgumentError, match="not sharded"):
        averaged(network(), "slow")
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    with pytest.raises(zs.InvalidArgumentError, match="modified"):
        with averaged(model, "slow"):
            pass
    for ema, text in (
        (0.9, "ema is 0.9"),
        ({"slow": "0.9"}, "ema\\['slow'\\]"),
        ({"slow": 1.5}, "1.5"),
        ({"a.b": 0.9}, "a.b"),
        ({str(number): 0.9 for number in range(5)}, "at most 4"),
        ({"a": zs.Average(0.9, on_skip="keep"), "b": 0.9}, "on_skip"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=text):
            sharded(network(), "os", ema=ema)
    for arguments in ({"decay": "0.9"}, {"warmup": "tenth"}, {"every": 0}, {"on_skip": "never"}):
        with pytest.raises(zs.InvalidArgumentError, match=next(iter(arguments))):
            zs.Average(**arguments)  # type: ignore[arg-type]
