# promise: same-bits
"""Ranks that add their gradients before they push them (``group_size``)."""

from __future__ import annotations

import dataclasses
import os

import paddle
import pytest
import zeroshard as zs

import models
import ranks
from test_dist_model import batch, optimizer_of, sharded
from training import LEVELS, SEGMENT, Outcome, Training, assert_same, train, worst
from zeroshard.paddle import group_sharded_parallel

#: Buckets of several parameters, one bucket for all, and one for each parameter.
TRAININGS = {
    "mlp": Training(steps=6, max_norm=0.5, options={"buffer_max_size": 700}),
    "gpt": Training("gpt", steps=4),
    "accumulated, scaled": Training(
        micro=2, scaled=True, steps=6, max_norm=0.05, options={"buffer_max_size": 0}
    ),
}


@ranks.at_once
def train_in_groups(
    rank: int, world: int, shards: int, sizes: list[int], names: list[str]
) -> dict[tuple[str, int], list[Outcome]]:
    """The outcomes at all levels, for each training and group size."""
    found = {}
    with zs.init(shards=shards):
        for name in names:
            for size in sizes:
                training = TRAININGS[name]
                training = dataclasses.replace(
                    training, options={**training.options, "group_size": size}
                )
                found[name, size] = [train(training, level, rank, world) for level in LEVELS]
    return found


def the_same(outcomes: list[Outcome]) -> Outcome:
    """The outcomes, which are the same."""
    first = outcomes[0]
    for outcome in outcomes:
        assert (outcome.losses, outcome.hash) == (first.losses, first.hash)
        assert_same(outcome.state, first.state)
    return first


@pytest.mark.parametrize("shards", [1, 3])
def test_one_group_has_the_bits_of_ranks_that_push_alone(shards: int, pair: ranks.Team) -> None:
    names = list(TRAININGS) if shards == 3 else ["mlp"]
    results = pair.run(train_in_groups, 2, shards, [1, 2], names)
    for name in names:
        alone, grouped = (
            the_same([one for result in results for one in result[name, size]]) for size in (1, 2)
        )
        the_same([alone, grouped])


def test_groups_of_four_ranks_have_the_same_bits_at_all_levels() -> None:
    results = ranks.run(4, train_in_groups, 4, 3, [1, 2, 4], ["mlp"])
    alone, pairs, whole = (
        the_same([one for result in results for one in result["mlp", size]]) for size in (1, 2, 4)
    )
    the_same([alone, whole])
    # Two groups add in another order than four ranks.
    assert worst(pairs.losses, alone.losses) <= 1e-6 and pairs.hash != alone.hash


def train_on_a_mesh(rank: int, world: int, sizes: list[int]) -> dict[int, list[str]]:
    """The hashes at all levels, by group size, of replicas that are sharded over two ranks."""
    found: dict[int, list[str]] = {}
    for size in sizes:
        for level in LEVELS:
            _, layer = sharded([rank // 2 * 2, rank // 2 * 2 + 1])
            model, optimizer, _ = group_sharded_parallel(
                layer,
                optimizer_of(layer),
                level,
                group_size=size,
                segment_size=16,
                buffer_max_size=60,
            )
            for step in range(3):
                inputs, labels = batch(2 * step + rank // 2)
                paddle.nn.MSELoss()(model(inputs), labels).backward()
                optimizer.step()
                optimizer.clear_grad()
            found.setdefault(size, []).append(optimizer.state_hash())
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_of_a_mesh_in_one_group_have_the_bits_of_ranks_that_push_alone(
    world: int, processes: dict[str, str]
) -> None:
    results = ranks.run(world, train_on_a_mesh, world, sorted({1, 2, world}), env=processes)
    for found in results:
        assert found == results[0]
        assert found[world] == found[1]
        assert all(len(set(hashes)) == 1 for hashes in found.values()), found


def refuse(rank: int) -> None:
    model = models.build("mlp")
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    for size, message in (
        (0, "1 or more"),
        ("node", "'host'"),
        (3, "does not divide the number of ranks, 2"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=message):
            group_sharded_parallel(model, optimizer, "os", group_size=size)  # type: ignore[arg-type]
    os.environ["PADDLE_LOCAL_SIZE"] = "2"
    group_sharded_parallel(model, optimizer, "os", group_size="host", segment_size=SEGMENT)


def test_sizes_that_do_not_fit_are_refused(processes: dict[str, str]) -> None:
    ranks.run(2, refuse, env=processes)


def train_without_process_group(rank: int, size: int) -> str:
    model = models.build("mlp")
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    model, optimizer, _ = group_sharded_parallel(
        model, optimizer, "p_g_os", group_size=size, segment_size=SEGMENT
    )
    for step in range(3):
        model(*models.broadcast(models.batch("mlp", step, 8), rank, 2)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return optimizer.state_hash()


def test_groups_need_no_process_group_of_the_program(processes: dict[str, str]) -> None:
    alone = ranks.run(2, train_without_process_group, 1, env=processes, init=False)
    assert ranks.run(2, train_without_process_group, 2, env=processes, init=False) == alone
