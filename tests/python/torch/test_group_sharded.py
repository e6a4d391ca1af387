# promise: same-bits
"""Sharded training compared with torch: the same seeds give the same losses and parameters, and all
levels the same bits.

Two ranks, each with half of each batch, are compared with one process that has the whole batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import ranks
import zeroshard as zs
from environment import IS_LONG, LONG
from training import LEVELS, Outcome, Training, assert_close, assert_same, train, train_all, worst
from zeroshard._connection import Connection

#: The largest relative difference of a loss from torch's.
TOLERANCE = 1e-4

#: Enough for the rounding errors of a level to show, and in long tests for them to add up.
STEPS = 200 if IS_LONG else 40

TRAININGS = {
    "mlp": Training("mlp", steps=STEPS),
    "cnn": Training("cnn", steps=STEPS, options={"sync_buffers": True}),
    "gpt": Training("gpt", steps=STEPS),
    "lstm": Training("lstm", steps=STEPS),
}

SHORT = {
    # What a model may do.
    "called twice": Training("called twice"),
    "several forwards": Training("several forwards"),
    "weights used without their layer": Training("borrowed"),
    "another order of layers every step": Training("branches"),
    "unused parameters": Training("unused"),
    "frozen": Training("frozen"),
    "unfrozen later": Training("unfrozen"),
    "checkpoint": Training("checkpoint", steps=10),
    "reentrant checkpoint": Training("reentrant checkpoint", steps=10),
    # What a training loop may do.
    "clipped": Training(max_norm=0.05),
    "clipped, frozen": Training("unfrozen", max_norm=0.05),
    "scaled": Training(scaled=True),
    "scaled and clipped": Training(scaled=True, max_norm=0.05),
    "autocast": Training("gpt", autocast=True, steps=10),
    "accumulated": Training(micro=2),
    "accumulated, no_sync": Training(micro=2, announced="no_sync"),
    "accumulated, announced": Training(micro=3, batch=4, announced="accumulation_steps"),
    "accumulated, clipped, scaled": Training(micro=2, max_norm=0.05, scaled=True),
    "two groups": Training(groups=True),
    "step schedule": Training(schedule="step", groups=True),
    "cosine schedule": Training(schedule="cosine"),
    "lambda schedule": Training(schedule="lambda"),
    "one cycle schedule": Training(schedule="one cycle"),
    # What group_sharded_parallel may be told.
    "without buckets": Training(options={"buffer_max_size": 0}),
    "small buckets": Training(options={"buffer_max_size": 700}),
    "sync_comm": Training("gpt", steps=10, options={"sync_comm": True}),
    "offload": Training(options={"offload": True}),
    "everything is small": Training(options={"segment_size": 2**20}),
    "everything is cut": Training("gpt", steps=10, options={"segment_size": 0}),
    "excluded layers": Training("gpt", steps=10, options={"exclude_layer": ["Linear"]}),
}


def check(
    training: Training, pair: ranks.Team, env: dict[str, str], systems: tuple[str, ...]
) -> list[dict[str, Outcome]]:
    """Trains on two ranks, and compares the levels with each other and with torch."""
    outcomes = pair.run(train_all, 2, training, systems, env=env, timeout=LONG)
    first = outcomes[0]["os"]
    for outcome in outcomes:
        for level in LEVELS:
            ours = outcome[level]
            assert ours.losses == first.losses, level
            assert ours.norms == first.norms, level
            assert ours.hash == first.hash, level
            if training.model != "cnn" or "sync_buffers" in training.options:
                assert_same(ours.state, first.state)
    references = [outcomes[0]["ddp"]] if "ddp" in systems else []
    if training.model != "cnn" and not training.autocast:
        references.append(train(training, "plain"))
    for reference in references:
        assert worst(first.losses, reference.losses) <= TOLERANCE
        assert_close(first.state, reference.state)
        if reference.norms:
            assert worst(first.norms, reference.norms) <= TOLERANCE
    assert references
    return outcomes


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_are_those_of_torch(name: str, pair: ranks.Team, processes: dict[str, str]) -> None:
    outcomes = check(TRAININGS[name], pair, processes, ("ddp", *LEVELS))
    assert outcomes[0]["os"].losses[-1] < outcomes[0]["os"].losses[0]


@pytest.mark.parametrize("name", SHORT)
def test_scenario_agrees_with_torch(name: str, pair: ranks.Team, processes: dict[str, str]) -> None:
    training = SHORT[name]
    check(training, pair, processes, ("ddp", *LEVELS) if training.autocast else LEVELS)


def test_options_change_no_bits(pair: ranks.Team, processes: dict[str, str]) -> None:
    plain = Training(steps=10)
    variants = [
        dataclasses.replace(plain, options=options)
        for options in (
            {},
            {"offload": True},
            {"buffer_max_size": 0},
            {"segment_size": 0},
            {"sync_comm": True},
        )
    ]
    hashes = pair.run(hashes_of, variants, env=processes)
    assert len({*hashes[0], *hashes[1]}) == 1


@pytest.mark.parametrize("offload", [False, True])
def test_offload_is_part_of_the_job(
    offload: bool, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, bool]] = []
    original = Connection.open

    def recorded(connection: Connection, *arguments: Any, **options: Any) -> Any:
        opened.append((connection.cluster, options["offload"]))
        return original(connection, *arguments, **options)

    monkeypatch.setattr(Connection, "open", recorded)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    zs.torch.group_sharded_parallel(model, optimizer, "os", offload=offload)
    [(native, requested)] = opened
    assert requested == offload
    # A job of the same name with another value is another job.
    tensors = [zs._native.TensorSpec("w", [4])]
    job = (f"offload {offload}", tensors, [("sgd", {})], 1)
    native.create_job(*job, offload=offload)
    native.create_job(*job, offload=offload)
    with pytest.raises(zs.Error, match="offload"):
        native.create_job(*job, offload=not offload)


def hashes_of(rank: int, variants: list[Training]) -> list[str]:
    """The hashes of the final states of several trainings."""
    return [train(variant, "p_g_os", rank, 2).hash for variant in variants]


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_process_matches_torch(level: str, cluster: object) -> None:
    """Includes batch norm, because the rank has the whole batch."""
    training = Training("cnn", steps=20, max_norm=0.5)
    ours, plain = train(training, level), train(training, "plain")
    assert worst(ours.losses, plain.losses) <= TOLERANCE
    assert worst(ours.norms, plain.norms) <= TOLERANCE
    assert_close(ours.state, plain.state)


@pytest.mark.parametrize("init", ["gloo", "env"])
def test_ranks_need_no_running_server(init: str) -> None:
    training = Training(steps=5)
    outcomes = ranks.run(2, trained_embedded, training, init=init)
    assert outcomes[0] == outcomes[1]


def trained_embedded(rank: int, training: Training) -> str:
    """Trains on the cluster that rank 0 hosts. Returns the hash of the final state."""
    import torch.distributed as dist
    import zeroshard as zs

    zs.init(shards=2)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    hash = train(training, "p_g_os", rank, 2).hash
    dist.barrier()
    zs.shutdown()
    return hash
