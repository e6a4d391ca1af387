# promise: durability
"""Runs that are rewound while they train."""

from __future__ import annotations

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
from zeroshard._rewind import ranges
from zeroshard.torch import group_sharded_parallel

__all__ = ["directory"]

EVERY = 3
BATCHES = list(range(10))
#: What is left of them without those that are skipped from step 3 on.
LEFT = [0, 1, 2, 5, 6, 7, 8, 9]


def train(rank: int, directory: str, batches: list[int], is_rewound: bool) -> dict[str, Any]:
    """Trains each level. Rank 0 rewinds the job in step 7 to the first checkpoint."""
    found = {}
    with zs.init(name="rewound"):
        for number, level in enumerate(LEVELS):
            torch.manual_seed(1)
            bare = network()
            trained = [p for p in bare.parameters() if p.requires_grad]
            checkpoints = zs.Checkpoints(f"file://{directory}", every=EVERY)
            model, optimizer, _ = group_sharded_parallel(
                bare,
                torch.optim.AdamW(trained, lr=0.01),
                level,
                segment_size=SEGMENT,
                checkpoints=checkpoints,
            )
            torch.manual_seed(100 + rank)
            losses: dict[int, float] = {}
            made: list[int] = []
            line = None
            for step in zs.steps(batches, checkpoints):
                with step:
                    if is_rewound and rank == 0 and line is None and step.number == 7:
                        wait_for(directory, "rewound", number, EVERY)
                        [job] = [of.name for of in zs.status().jobs if of.version == 7]
                        line = zs.rewind(job, to=EVERY, skip=range(3, 5))
                    optimizer.zero_grad()
                    loss = model(*models.share(models.batch("mlp", step.batch, 16), rank, 2))
                    loss.backward()
                    optimizer.step()
                    losses[step.number] = loss.item()
                    made.append(step.batch_number)
            checkpoints.save()
            found[level] = losses, optimizer.state_hash(), made, line
    return found


def test_a_rewound_run_has_the_losses_and_the_state_of_one_without_the_skipped_batches(
    directory: Path,
) -> None:
    with servers(2) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        found = ranks.run(2, train, str(directory / "one"), BATCHES, True, env=environment)
        expected = ranks.run(2, train, str(directory / "two"), LEFT, False, env=environment)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for level in LEVELS:
            losses, state, made, line = one[level]
            expected_losses, expected_state, _, _ = other[level]
            assert losses == expected_losses, level
            assert state == expected_state, level
            assert made == [*range(7), 5, 6, 7, 8, 9], level
            assert line == (1 if rank == 0 else None), level


def test_batches_are_named_by_any_range() -> None:
    assert ranges(range(3, 5)) == [(3, 5)]
    assert ranges(range(4, 4)) == []
    assert ranges(range(7, 1, -3)) == [(4, 5), (7, 8)]
    assert ranges(range(7, 4, -1)) == [(5, 8)]
    with pytest.raises(zs.InvalidArgumentError, match="at most 1000"):
        ranges(range(0, 10**12, 2))
    assert ranges(range(5, 9, 2)) == [(5, 6), (7, 8)]


def test_a_job_that_does_not_exist_is_not_rewound() -> None:
    with servers(1) as address, pytest.raises(zs.InvalidArgumentError, match="0 jobs"):
        zs.rewind("nowhere", to=1, address=address)
