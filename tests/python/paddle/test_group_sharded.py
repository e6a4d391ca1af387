"""Sharded training gives the results of a single process, and the same bits at every level."""

from __future__ import annotations

from typing import Any

import pytest
import zeroshard as zs
from paddle import nn

import models
import ranks
from training import LEVELS, Training, assert_close, assert_same, train, train_all, worst

TRAININGS = {
    **{name: Training(model=name) for name in models.MODELS},
    "clipped": Training(max_norm=0.5, lr=1e-2),
    "clipped in part": Training(max_norm=0.3, unclipped="bias", lr=1e-2),
    "each clipped": Training(max_norm=0.1, clip=nn.ClipGradByNorm, lr=1e-2),
    "each clipped, scaled": Training(
        max_norm=0.1, clip=nn.ClipGradByNorm, unclipped="bias", scaled=True, lr=1e-2
    ),
    "groups": Training(groups=True, settings={"weight_decay": 0.1}),
    "groups clipped": Training(groups=True, max_norm=0.1, lr=1e-2),
    "accumulated, learned": Training(micro=3),
    "accumulated under no_sync": Training(micro=3, announced="no_sync"),
    "accumulated, announced": Training(micro=3, announced="accumulation_steps"),
    "scaled": Training(scaled=True),
    "step": Training(schedule="step"),
    "cosine": Training(schedule="cosine"),
    "warmup": Training(schedule="warmup"),
    "small buckets": Training(options={"buffer_max_size": 100}),
    "no buckets": Training(options={"buffer_max_size": 0}),
    "synchronous": Training(model="gpt", options={"sync_comm": True}),
    # Batch norm's running statistics are larger than a segment.
    "small segments": Training(model="cnn", options={"segment_size": 4}),
    "layers excluded": Training(options={"exclude_layer": ["Linear"]}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_every_level_matches_plain_paddle_and_the_other_levels_bit_for_bit(
    cluster: zs.Session, name: str
) -> None:
    training = TRAININGS[name]
    plain = train(training, "plain")
    outcomes = {level: train(training, level) for level in LEVELS}
    for level, outcome in outcomes.items():
        assert worst(outcome.losses, plain.losses) < 1e-4, level
        assert_close(outcome.state, plain.state)
        assert_same(outcome.state, outcomes["os"].state)
        assert outcome.losses == outcomes["os"].losses, level
        assert outcome.hash == outcomes["os"].hash, level
    assert sum(plain.losses[-5:]) < sum(plain.losses[:5])


LONG = {
    "mlp": Training(steps=60, max_norm=1.0),
    "cnn": Training(model="cnn", steps=50, options={"sync_buffers": True, "segment_size": 4}),
    "each clipped": Training(steps=20, max_norm=0.1, clip=nn.ClipGradByNorm),
    "gpt": Training(model="gpt", steps=60, max_norm=1.0, schedule="cosine"),
}


@pytest.mark.parametrize("name", LONG)
def test_two_ranks_train_as_one_process_does_at_every_level(
    pair: ranks.Team, processes: dict[str, str], name: str
) -> None:
    training = LONG[name]
    plain = train(training, "plain")
    found = pair.run(train_all, 2, training, LEVELS, env=processes)
    for rank in found:
        for level, outcome in rank.items():
            # Batch norm sees half of the batch on each rank.
            if name != "cnn":
                assert worst(outcome.losses, plain.losses) < 1e-4, level
            assert_same(outcome.state, found[0]["os"].state)
            assert outcome.hash == found[0]["os"].hash, level


def test_names_are_found_under_the_paths_that_they_have_in_paddle() -> None:
    import paddle.distributed
    import zeroshard.paddle as dist
    import zeroshard.paddle.distributed
    import zeroshard.paddle.fleet
    from zeroshard.paddle.distributed.sharding import group_sharded_parallel
    from zeroshard.paddle.sharding import save_group_sharded_model

    assert dist.sharding.group_sharded_parallel is group_sharded_parallel
    assert dist.group_sharded_parallel is group_sharded_parallel
    assert dist.distributed.sharding.save_group_sharded_model is save_group_sharded_model
    assert dist.distributed.DataParallel is dist.DataParallel
    for fleet in (dist.fleet, dist.distributed.fleet, zeroshard.paddle.fleet):
        assert fleet.init is paddle.distributed.fleet.init
        assert fleet.utils.recompute is paddle.distributed.fleet.utils.recompute
    for module in (dist, dist.fleet, dist.distributed):
        assert not hasattr(module, "no_such_name")


def _embedded(rank: int, before: bool) -> Any:
    import paddle.distributed as dist

    if not before:
        dist.init_parallel_env()
    zs.init()
    if before:
        dist.init_parallel_env()
    outcome = train(Training(steps=3), "p_g_os", rank, 2)
    zs.shutdown()
    return outcome.hash


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_ranks_find_the_embedded_cluster_before_and_after_the_parallel_environment(
    before: bool,
) -> None:
    first, second = ranks.run(2, _embedded, before, init=False)
    assert first == second
