"""Optimizers that run on the ranks, through killed servers, killed ranks and checkpoints.

Every rank computes on the whole batch, so that the mean gradient is that of one rank: the results
do not depend on the number of ranks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import models
import ranks
import zeroshard as zs
from optimizers_on_ranks import (
    STAGES,
    Paced,
    Rotated,
    assert_equal_state,
    distance,
    final,
    make_step,
    sharded,
    train_plain,
)
from servers import killable, servers
from test_checkpoints import in_memory
from training import SEGMENT, assert_same
from zeroshard.torch import shard

STEPS = 8
EVERY = 2


def through_lost_servers(rank: int, victims: list[int]) -> dict[str, Any]:
    """Trains while rank 0 kills a server in each training."""
    found = {}
    with zs.init(replicas=2):
        for stage, victim in zip(STAGES, victims):
            trainings = {name: sharded(name, stage) for name in ("muon and adamw", "soap-like")}
            for name, (model, optimizers) in trainings.items():
                step = 0
                while step < STEPS:
                    if rank == 0 and step == 3 and name == "soap-like":
                        os.kill(victim, signal.SIGKILL)
                    try:
                        make_step(model, optimizers, models.batch("mlp", step, 8))
                        step += 1
                    except zs.StepAbortedError:
                        pass
                found[name, stage] = final(model, optimizers)
    return found


def assert_as_calm(name: str, found: Any) -> None:
    state, of_optimizers = train_plain(name, STEPS)
    if name == "muon and adamw":
        assert distance(found[0], state) <= 1e-6
        assert_equal_state(found[1], of_optimizers, rtol=1e-4, atol=1e-6)
    else:
        assert_same(found[0], state)
        assert_equal_state(found[1], of_optimizers)


def test_replicas_keep_the_state_when_servers_are_killed() -> None:
    with killable(5) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        victims = [process.pid for process in shards[:3]]
        outcomes = ranks.run(2, through_lost_servers, victims, env=environment, init=None)
    for found in outcomes:
        for (name, _), outcome in found.items():
            assert_as_calm(name, outcome)


class Killed(Rotated):
    """Kills its process in the middle of a step, if the process is told to."""

    in_step = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        steps = {state["step"] for state in self.state.values()}
        if steps == {self.in_step}:
            os.kill(os.getpid(), signal.SIGKILL)


def continue_from_checkpoint(
    rank: int, directory: str, until: int, killed_in: int
) -> dict[str, Any]:
    """Trains until a step, from the last checkpoint. ``killed_in``: rank 1, which owns some of the
    parameters, is killed in this step of the last training."""
    found: dict[str, Any] = {}
    with zs.init(name="train"):
        for stage in STAGES:
            for cls in (Killed, Paced):
                torch.manual_seed(rank)
                model = models.build("mlp")
                optimizer = cls(model.parameters())
                checkpoints = zs.Checkpoints(f"file://{directory}", every=EVERY)
                shard(
                    model,
                    optimizer,
                    stage,
                    segment_size=SEGMENT,
                    checkpoints=checkpoints,
                    separable=cls is Killed,
                )
                step, _ = checkpoints.resume()
                first = step
                is_last = stage == STAGES[-1] and cls is Killed
                Killed.in_step = killed_in if is_last and rank == 1 else 0
                while step < until:
                    make_step(model, [optimizer], models.batch("mlp", step, 8))
                    step += 1
                checkpoints.save()
                group = dict(optimizer.param_groups[0])
                del group["params"]
                state, [of_optimizer] = final(model, [optimizer])
                found[f"{cls.__name__} {stage}"] = first, state, of_optimizer, group
    return found


def plain(cls: Any) -> Any:
    model = models.build("mlp")
    optimizer = cls(model.parameters())
    Killed.in_step = 0
    for step in range(STEPS):
        make_step(model, [optimizer], models.batch("mlp", step, 8))
    return model.state_dict(), optimizer.state_dict()


def test_a_run_continues_after_an_owner_was_killed_and_with_other_ranks() -> None:
    with in_memory() as directory:
        arguments = continue_from_checkpoint, str(directory)
        with servers(2) as address:
            environment = {"ZEROSHARD_ADDRESS": address}
            with pytest.raises(ranks.RankFailed, match="SIGKILL"):
                ranks.run(2, *arguments, 6, 5, env=environment)
            found = ranks.run(2, *arguments, 6, 0, env=environment)
        assert all(rank["Paced 1"][0] == 6 for rank in found)  # it was complete
        # The step in which the rank was killed has changed nothing.
        assert all(rank[f"Killed {STAGES[-1]}"][0] == 4 for rank in found)
        # The state is on disk: other servers, and one rank.
        with servers(3) as address:
            environment = {"ZEROSHARD_ADDRESS": address}
            [found] = ranks.run(1, *arguments, STEPS, 0, env=environment)
    for cls in (Killed, Paced):
        state, of_optimizer = plain(cls)
        for stage in STAGES:
            first, own, of_own, group = found[f"{cls.__name__} {stage}"]
            assert first == 6
            assert_same(own, state)
            assert_equal_state(of_own, of_optimizer)
            expected = dict(of_optimizer["param_groups"][0])
            del expected["params"]
            assert group == expected
