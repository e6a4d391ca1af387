"""Int8 on the wire trains as well as f32, with the same results in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import ranks
import zeroshard as zs
from environment import IS_LONG
from training import LEVELS, Outcome, Training, train
from zeroshard.torch import group_sharded_parallel

#: The steps of a training, and those at the end whose mean loss is compared.
STEPS, LAST = (500, 100) if IS_LONG else (60, 20)
#: The largest relative difference of the loss.
TOLERANCE = 0.005 if IS_LONG else 0.02


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A new batch of a text with noise, so that a loss remains that cannot be learned."""
    generator = torch.Generator().manual_seed(step)
    shape = (16, models.CONTEXT + 1)
    start = torch.randint(models.VOCABULARY, (16, 1), generator=generator)
    stride = torch.randint(1, 4, (16, 1), generator=generator)
    text = (start + stride * torch.arange(shape[1])) % models.VOCABULARY
    noise = torch.randint(models.VOCABULARY, shape, generator=generator)
    text = torch.where(torch.rand(shape, generator=generator) < 0.1, noise, text)
    return text[:, :-1], text[:, 1:]


def trained(
    address: str, level: str = "os", steps: int = STEPS, **options: Any
) -> tuple[list[float], str, int]:
    """The losses, the hash of the state, and the bytes pushed."""
    # An earlier test may have left a session open.
    zs.shutdown()
    with zs.init(address, **options) as session:
        model = models.build("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=64)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(*batch(step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        pushed = session._connection.cluster.traffic()[1]
        return losses, optimizer.state_hash(), pushed


def test_the_loss_is_that_of_f32_in_both_directions_and_in_one(processes: dict[str, str]) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    mean = {}
    for name, options in {
        "f32": {},
        "gradients": {"wire": "int8"},
        "both": {"wire": "int8", "parameter_wire": "int8"},
    }.items():
        losses, *_ = trained(address, **options)
        mean[name] = sum(losses[-LAST:]) / LAST
    print(f"mean loss of the last {LAST} of {STEPS} steps: {mean}")
    for name in ("gradients", "both"):
        assert mean[name] == pytest.approx(mean["f32"], rel=TOLERANCE), mean


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_levels_transports_and_chunks_have_the_same_results(
    level: str, processes: dict[str, str]
) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    options = {"wire": "int8", "parameter_wire": "int8"}
    losses, expected, _ = trained(address, "os", 5, transport="grpc", **options)
    for transport, chunk_bytes in [("grpc", 5000), ("auto", 1 << 20)]:
        again, found, _ = trained(
            address, level, 5, transport=transport, chunk_bytes=chunk_bytes, **options
        )
        assert (again, found) == (losses, expected)


def trained_by_ranks(rank: int, world: int, shards: int, group_size: int) -> list[Outcome]:
    """The outcomes at all levels."""
    training = Training("gpt", steps=4, max_norm=0.5, options={"group_size": group_size})
    with zs.init(shards=shards, wire="int8", parameter_wire="int8"):
        return [train(training, level, rank, world) for level in LEVELS]


@pytest.mark.parametrize("group_size", [1, 2])
def test_ranks_and_groups_have_the_same_results_at_all_levels_on_any_number_of_servers(
    group_size: int, pair: ranks.Team
) -> None:
    found = [
        (outcome.losses, outcome.norms, outcome.hash)
        for shards in (1, 3)
        for outcomes in pair.run(trained_by_ranks, 2, shards, group_size)
        for outcome in outcomes
    ]
    assert all(one == found[0] for one in found)


def with_other_wires(rank: int) -> list[str]:
    """The errors of a job whose ranks have different encodings."""
    found = []
    for argument in ("wire", "parameter_wire"):
        options: Any = {argument: "int8"} if rank else {}
        with zs.init(shards=1, **options):
            model = models.build("mlp")
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(zs.DisagreementError) as raised:
                group_sharded_parallel(model, optimizer, "os")
            found.append(str(raised.value))
    return found


def test_ranks_with_different_encodings_learn_of_the_difference(pair: ranks.Team) -> None:
    for texts in pair.run(with_other_wires):
        for name, text in zip(("wire", "parameter_wire"), texts, strict=True):
            assert f"disagree about {name}:" in text and "int8" in text


def test_the_seed_of_the_rounding_decides_on_the_results(processes: dict[str, str]) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    hashes = [trained(address, "os", 3, wire="int8", rounding_seed=seed)[1] for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_push_has_about_a_quarter_of_the_bytes_of_f32(processes: dict[str, str]) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    few, many = (
        [trained(address, "os", steps, wire=wire)[2] for wire in ("f32", "int8")]
        for steps in (1, 3)
    )
    f32, int8 = (many[of] - few[of] for of in (0, 1))
    assert 0.25 < int8 / f32 < 0.28  # small tensors end with a part of a tile


def test_an_unknown_encoding_is_an_error_that_lists_the_others(processes: dict[str, str]) -> None:
    zs.shutdown()
    address = processes["ZEROSHARD_ADDRESS"]
    for options in ({"wire": "int4"}, {"parameter_wire": "float32"}):
        with pytest.raises(zs.InvalidArgumentError, match="f32, bf16, f16 or int8"):
            zs.init(address, **options)
