"""The state of optimizers that run on the ranks, in ``torch.distributed.checkpoint`` and in
files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions

import models
import ranks
import zeroshard as zs
from optimizers_on_ranks import (
    assert_equal_state,
    final,
    make_step,
    sharded,
    train_plain,
)
from training import assert_same
from zeroshard.torch import load_group_sharded_model, save_group_sharded_model

#: Optimizers, and the stages of the models that are saved and loaded.
TRAININGS = {"muon and adamw": (3,), "soap-like": (1, 3), "bytes": (2,)}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(name: str, stage: int, steps: int) -> Any:
    model, optimizers = sharded(name, stage)
    for step in range(steps):
        make_step(model, optimizers, models.batch("mlp", step, 8))
    return model, optimizers


def through_files(rank: int, directory: str) -> None:
    with zs.init():
        for name, stages in TRAININGS.items():
            for stage in stages:
                path = Path(directory, name, str(stage))
                model, optimizers = trained(name, stage, 3)
                ours, of_optimizers = dsd.get_state_dict(model, optimizers)
                dcp.save({"model": ours, "optim": of_optimizers}, checkpoint_id=path)
                # Another state, and one without any.
                for steps in (1, 0):
                    other, others = trained(name, stage, steps)
                    parts, of_others = dsd.get_state_dict(other, others)
                    states = {"model": parts, "optim": of_others}
                    dcp.load(states, checkpoint_id=path)
                    dsd.set_state_dict(
                        other,
                        others,
                        model_state_dict=states["model"],
                        optim_state_dict=states["optim"],
                    )
                    for own, its in zip(final(other, others), final(model, optimizers)):
                        assert_equal_state(own, its)
                    make_step(other, others, models.batch("mlp", 3, 8))
                    loaded = final(other, others)
                make_step(model, optimizers, models.batch("mlp", 3, 8))
                assert_equal_state(loaded, final(model, optimizers))


def test_torch_distributed_checkpoint_saves_and_loads_the_state(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        pair.run(through_files, directory, env=processes)


def whole_state(rank: int) -> Any:
    with zs.init():
        model, optimizers = trained("soap-like", 3, 3)
        return dsd.get_optimizer_state_dict(model, optimizers, options=WHOLE)


def test_a_whole_state_is_on_rank_0(pair: ranks.Team, processes: dict[str, str]) -> None:
    first, second = pair.run(whole_state, env=processes)
    assert second == {}
    _, [expected] = train_plain("soap-like", 3)
    names = list(models.build("mlp").state_dict())
    for number, name in enumerate(names):
        assert_equal_state(first["state"][name], expected["state"][number])


@pytest.mark.parametrize("name", ["soap-like", "bytes"])
def test_files_of_a_model_have_the_state(name: str, cluster: zs.Session, tmp_path: Path) -> None:
    model, [optimizer] = trained(name, 3, 3)
    save_group_sharded_model(model, tmp_path, optimizer)
    other, [its] = trained(name, 2, 1)
    load_group_sharded_model(other, tmp_path, its)
    assert_same(other.state_dict(), model.state_dict())
    assert_equal_state(its.state_dict(), optimizer.state_dict())
    assert dist.is_initialized() is False
    assert torch.equal(*(each.layers[0].weight for each in (other, model)))
