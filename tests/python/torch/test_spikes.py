# promise: durability
"""Policies on spikes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import ranks
import zeroshard as zs
from servers import servers
from test_checkpoints import directory, network, wait_for
from training import LEVELS, SEGMENT
from zeroshard.torch import group_sharded_parallel

__all__ = ["directory"]

BATCHES = list(range(10))
#: The batch with a spike.
SPIKE = 6
LEFT = [batch for batch in BATCHES if batch != SPIKE]


def train(rank: int, directory: str, batches: list[int], is_spiky: bool) -> dict[str, Any]:
    """Trains each level. The gradients of rank 1 for one batch are too large."""
    found = {}
    policy = zs.SpikePolicy("rewind", window=3, rewind_steps=1) if is_spiky else None
    with zs.init(name="spiky"):
        for number, level in enumerate(LEVELS):
            torch.manual_seed(1)
            bare = network()
            trained = [p for p in bare.parameters() if p.requires_grad]
            checkpoints = zs.Checkpoints(f"file://{directory}", every=3)
            model, optimizer, _ = group_sharded_parallel(
                bare,
                torch.optim.AdamW(trained, lr=0.01),
                level,
                segment_size=SEGMENT,
                checkpoints=checkpoints,
                spikes=policy,
            )
            torch.manual_seed(100 + rank)
            losses: dict[int, float] = {}
            made: list[int] = []
            for step in zs.steps(batches, checkpoints):
                with step:
                    # A save that is due during another one is skipped.
                    if is_spiky and step.number in (4, SPIKE):
                        wait_for(directory, "spiky", number, step.number // 3 * 3)
                    optimizer.zero_grad()
                    loss = model(*models.share(models.batch("mlp", step.batch, 16), rank, 2))
                    is_spike = is_spiky and rank == 1 and step.batch_number == SPIKE
                    (loss * (1e4 if is_spike else 1.0)).backward()
                    optimizer.step()
                    losses[step.number] = loss.item()
                    made.append(step.batch_number)
            checkpoints.save()
            found[level] = losses, optimizer.state_hash(), made
    return found


def test_a_run_rewinds_after_a_spike_and_ends_as_one_without_the_batch(directory: Path) -> None:
    with servers(2) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        found = ranks.run(2, train, str(directory / "one"), BATCHES, True, env=environment)
        expected = ranks.run(2, train, str(directory / "two"), LEFT, False, env=environment)
    for one, other in zip(found, expected, strict=True):
        for level in LEVELS:
            losses, state, made = one[level]
            expected_losses, expected_state, _ = other[level]
            assert (losses, state) == (expected_losses, expected_state), level
            assert made == LEFT, level


def skip(rank: int, losses: list[float], scaled: bool) -> dict[str, Any]:
    """Trains with a policy on losses. Returns the weight after each step, the warnings, and the
    scale of a scaler."""
    told = iter(losses)
    policy = zs.SpikePolicy(
        norm_factor=None, loss_factor=3.0, loss=lambda: next(told), window=2, limit=10
    )
    with zs.init(name="losses"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        bare = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        model, sharded, shared = group_sharded_parallel(
            bare, optimizer, "os_g", scaler, spikes=policy
        )
        weights = []
        for _ in losses:
            sharded.zero_grad()
            loss = model(torch.ones(2, 2)).sum()
            if shared is None:
                loss.backward()
                sharded.step()
            else:
                shared.scale(loss).backward()
                shared.step(sharded)
                shared.update()
            weights.append(bare.weight.detach().clone())
        texts = [str(one.message) for one in caught if "policy on spikes" in str(one.message)]
        return {
            "weights": weights,
            "warnings": texts,
            "scale": None if shared is None else shared.get_scale(),
        }


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_far_above_the_median_skips_the_step(scaled: bool) -> None:
    with servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        losses = [1.0, 1.0, 5.0, 1.0]
        found = ranks.run(2, skip, losses, scaled, env=environment)
    for rank, one in enumerate(found):
        first, second, third, fourth = one["weights"]
        assert not torch.equal(first, second)
        assert torch.equal(second, third), "step 2 was skipped"
        assert not torch.equal(third, fourth)
        if rank == 0:
            [warning] = one["warnings"]
            assert warning.startswith("step 2 was skipped") and "its loss 5" in warning
        assert one["scale"] == (8.0 if scaled else None), "the gradients were finite"


def test_arguments_are_checked() -> None:
    with pytest.raises(zs.InvalidArgumentError, match="must be one of 'skip'"):
        zs.SpikePolicy("ignore")  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="only one of loss_factor and loss"):
        zs.SpikePolicy(loss_factor=2.0)
    with pytest.raises(zs.InvalidArgumentError, match="window of a SpikePolicy is 0"):
        zs.SpikePolicy(window=0)
    with pytest.raises(zs.InvalidArgumentError, match="spikes is 'skip'"):
        model = torch.nn.Linear(2, 1)
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), spikes="skip")  # type: ignore[call-overload]


def test_a_policy_that_rewinds_needs_checkpoints() -> None:
    with zs.init(), pytest.raises(zs.InvalidArgumentError, match="needs checkpoints"):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.shard(model, optimizer, spikes=zs.SpikePolicy("rewind"))
