"""The blocks of Python in the documentation run, and the model can be trained after each of them.

Blocks are parts of scripts. Each gets the names that a script would have at this place, in
:func:`parts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import pickle
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import zeroshard as zs
from torch import Tensor, nn
from zeroshard.torch import group_sharded_parallel

import models
import ranks
from pages import KINDS, PART, Block, blocks, of_kinds
from servers import killable
from training import LEVELS, SEGMENT, assert_close

PASSES, CLIP = 3, 0.05


class Net(nn.Sequential):
    """A network with a parameter that is gathered at stage 3."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def parts() -> dict[str, Any]:
    """The names of a script that has not sharded its model yet."""
    torch.manual_seed(0)
    model = Net()
    inputs, targets = torch.randn(8, 64), torch.randint(10, (8,))
    return {
        "Net": Net,
        "contextlib": contextlib,
        "inputs": inputs,
        "loader": [(inputs, targets)] * 8,
        "loss_fn": nn.functional.cross_entropy,
        "model": model,
        "nn": nn,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "rank": 0,
        "scaler": torch.amp.GradScaler("cpu"),
        "targets": targets,
        "torch": torch,
        "zs": zs,
    }


def check_trains(names: dict[str, Any]) -> None:
    """Makes a step with the model and the optimizer of a script."""
    model, optimizer = names["model"], names["optimizer"]
    optimizer.zero_grad()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    dtype = next(model.parameters()).dtype
    nn.functional.cross_entropy(model(names["inputs"].to(dtype)), names["targets"]).backward()
    optimizer.step()
    after = model.state_dict().values()
    assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def changed(block: Block, values: dict[str, str]) -> Block:
    """A block with other values, such as fewer steps."""
    text = block.text
    for old, new in values.items():
        assert old in text, f"{block} does not contain {old}"
        text = text.replace(old, new)
    return dataclasses.replace(block, text=text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a block, with the files that a script may find."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with warnings.catch_warnings():
        # It says that there is one process.
        warnings.simplefilter("ignore", UserWarning)
        torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "directory")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    """Keeps the level of the logger, which a block changes."""
    logger = logging.getLogger("zeroshard")
    level = logger.level
    yield
    logger.setLevel(level)


def test_each_block_is_of_a_known_kind() -> None:
    known = {kind for kinds in KINDS.values() for kind in kinds}
    others = [block for block in blocks("python") if block.kind not in known]
    excluded = [block for block in others if block.kind.startswith("none, ")]
    assert others == excluded
    if excluded:
        pytest.skip("\n".join(f"{block}: {block.kind}" for block in excluded))


@pytest.mark.parametrize("block", of_kinds(PART, "load_weights"), ids=str)
def test_parts_of_a_script_run(block: Block, cluster: zs.Session, folder: Path) -> None:
    names = parts()
    block.run(names)
    check_trains(names)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("block", of_kinds("sharded", "sharded backward"), ids=str)
def test_parts_that_use_a_sharded_model_run(
    block: Block, stage: int, cluster: zs.Session, folder: Path
) -> None:
    names = parts()
    zs.shard(names["model"], names["optimizer"], stage=stage)
    if block.kind == "sharded backward":
        names["loss_fn"](names["model"](names["inputs"]), names["targets"]).backward()
    block.run(names)
    check_trains(names)


@pytest.mark.parametrize("block", of_kinds("averaged"), ids=str)
def test_parts_that_use_an_average_run(block: Block, cluster: zs.Session) -> None:
    names = parts()
    zs.shard(names["model"], names["optimizer"], ema={"slow": 0.9999})
    check_trains(names)
    block.run(names)
    check_trains(names)


@pytest.mark.parametrize("block", of_kinds("wrapped"), ids=str)
def test_parts_that_use_a_wrapper_run(block: Block, cluster: zs.Session, folder: Path) -> None:
    names = parts()
    names["model"], names["optimizer"], _ = group_sharded_parallel(
        names["model"], names["optimizer"], "p_g_os"
    )
    block.run(names)
    check_trains(names)


@pytest.mark.parametrize("block", of_kinds("meta"), ids=str)
def test_a_model_on_the_meta_device_takes_the_values_of_a_directory(
    block: Block, cluster: zs.Session, folder: Path
) -> None:
    names = parts()
    block.run(names)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert all(
        torch.equal(saved[name], value) for name, value in names["model"].state_dict().items()
    )
    check_trains(names)


@pytest.mark.parametrize("block", of_kinds("gan"), ids=str)
def test_several_models_are_sharded(block: Block, cluster: zs.Session) -> None:
    names = parts()
    for model, optimizer in (("generator", "optimizer_g"), ("critic", "optimizer_c")):
        names[model] = Net()
        names[optimizer] = torch.optim.AdamW(names[model].parameters())
    block.run(names)
    for model, optimizer in (("generator", "optimizer_g"), ("critic", "optimizer_c")):
        check_trains({**names, "model": names[model], "optimizer": names[optimizer]})


def _train(rank: int, loop: Block, state: Block, address: str, url: str) -> list[int]:
    steps: list[int] = []
    names = parts()
    model, optimizer = names["model"], names["optimizer"]

    def train_one(number: int) -> None:
        steps.append(number)
        check_trains({**names, "model": model, "optimizer": optimizer})

    names |= {
        "batches": range(12),
        "pickle": pickle,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "train_one": train_one,
        "url": url,
    }
    with zs.init(address, name="book"):
        state.run(names)
        loop.run(names)
    return steps


def test_a_run_with_checkpoints_continues(processes: dict[str, str], tmp_path: Path) -> None:
    loop, state = of_kinds("checkpoints")
    where = processes["ZEROSHARD_ADDRESS"], tmp_path.as_uri()
    for steps, expected in ((6, range(6)), (12, range(6, 12))):
        shorter = changed(loop, {"1000": str(steps), "every=100": "every=2"})
        assert ranks.run(1, _train, shorter, state, *where, init=None) == [list(expected)]


def _read(rank: int, block: Block, address: str) -> None:
    with zs.init(address, name="train"):
        names = parts()
        zs.shard(names["model"], names["optimizer"])
        check_trains(names)
        reader = parts()
        changed(block, {"127.0.0.1:7400": address}).run(reader)
        assert reader["latest"].version == 1
        expected, found = names["model"].state_dict(), reader["model"].state_dict()
        assert all(torch.equal(expected[name], value) for name, value in found.items())


@pytest.mark.parametrize("block", of_kinds("pin"), ids=str)
def test_another_program_reads_a_version(block: Block, processes: dict[str, str]) -> None:
    ranks.run(1, _read, block, processes["ZEROSHARD_ADDRESS"], init=None)


def _follow(rank: int, block: Block, address: str) -> None:
    with zs.init(address, name="train"):
        names = parts()
        zs.shard(names["model"], names["optimizer"])
        check_trains(names)
        reader = parts()
        for parameter in reader["model"].parameters():
            parameter.data = parameter.data.bfloat16()
        block = changed(block, {"127.0.0.1:7400": address, "generate(model)": "break"})
        block.run(reader)
        assert reader["version"].number == 1
        expected, found = names["model"].state_dict(), reader["model"].state_dict()
        assert all(torch.equal(expected[of].to(value.dtype), value) for of, value in found.items())


@pytest.mark.parametrize("block", of_kinds("follow"), ids=str)
def test_another_program_follows_the_job(block: Block, processes: dict[str, str]) -> None:
    ranks.run(1, _follow, block, processes["ZEROSHARD_ADDRESS"], init=None)


def _follow_boxes(rank: int, block: Block, address: str) -> None:
    with zs.init(address, name="train"):
        names = parts()
        zs.shard(names["model"], names["optimizer"])
        check_trains(names)
        block = changed(block, {"127.0.0.1:7400": address, "generate(part)": "break"})
        state = names["model"].state_dict()
        for number in range(2):
            reader = {**parts(), "rank": number}
            block.run(reader)
            assert reader["version"].number == 1
            for name, found in reader["part"].state_dict().items():
                expected = state[name].bfloat16()
                for dim, (offset, size) in enumerate(reader["boxes"].get(name, ())):
                    expected = expected.narrow(dim, offset, size)
                assert torch.equal(expected, found), name


@pytest.mark.parametrize("block", of_kinds("follow boxes"), ids=str)
def test_a_part_of_a_model_follows_the_job(block: Block, processes: dict[str, str]) -> None:
    ranks.run(1, _follow_boxes, block, processes["ZEROSHARD_ADDRESS"], init=None)


def _session(rank: int, block: Block) -> None:
    names = parts()
    block.run(names)
    zs.shard(names["model"], names["optimizer"])
    check_trains(names)


@pytest.mark.parametrize("block", of_kinds("init"), ids=str)
def test_sessions_are_opened(block: Block) -> None:
    ranks.run(1, _session, block, init=None)


def _on_two_ranks(rank: int, block: Block) -> None:
    with zs.init():
        names = parts()
        block.run(names)
        check_trains(names)


@pytest.mark.parametrize("block", of_kinds("two ranks"), ids=str)
def test_parts_for_two_ranks_run(block: Block, pair: ranks.Team) -> None:
    # As torchrun sets it.
    pair.run(_on_two_ranks, block, env={"LOCAL_WORLD_SIZE": "2"})


def _script(rank: int, block: Block, folder: Path, victim: int | None = None) -> list[str]:
    """Runs a script. Returns the lines that it prints. Kills a process at step 100."""
    os.chdir(folder)
    lines: list[str] = []

    def say(*words: object, **_: object) -> None:
        lines.append(" ".join(map(str, words)))
        if victim is not None and lines[-1].startswith("step  100 "):
            os.kill(victim, signal.SIGKILL)

    block.run({"__name__": "__main__", "print": say})
    return lines


def _losses(lines: list[str]) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", "\n".join(lines))]


@pytest.mark.parametrize("block", of_kinds("script, two ranks"), ids=str)
def test_scripts_run_on_two_ranks(block: Block, tmp_path: Path) -> None:
    printed, _ = ranks.run(2, _script, block, tmp_path, init="env")
    losses = _losses(printed)
    assert losses[-1] < losses[0]


def test_the_tutorial_converts_a_script_without_changing_its_losses(tmp_path: Path) -> None:
    before, after = (
        _losses(ranks.run(2, _script, block, tmp_path, init="env")[0]) for block in of_kinds("ddp")
    )
    assert len(before) == 30 and before == pytest.approx(after, abs=2e-4)


def test_the_tutorial_shows_all_lines_that_change() -> None:
    before, after = (block.text.splitlines() for block in of_kinds("ddp"))
    changes = [line[0] + line[2:] for line in difflib.ndiff(before, after) if line[0] in "+-"]
    (shown,) = (of for of in blocks("diff") if of.page == "docs/tutorials/from-ddp.md")
    lines = [line for line in shown.text.splitlines() if line[0] in "+-"]
    assert sorted(lines) == sorted(changes)


def test_the_run_of_the_tutorial_survives_a_dead_server(tmp_path: Path) -> None:
    (block,) = of_kinds("survive")
    hashes = []
    for kills in (False, True):
        with killable(3) as (address, (_, server, _)):
            victim = server.pid if kills else None
            env = {"ZEROSHARD_ADDRESS": address}
            shorter = changed(block, {"4000": "200"})
            ((*_, last),) = ranks.run(1, _script, shorter, tmp_path, victim, env=env, init=None)
            assert (server.poll() is not None) == kills
        assert last.startswith("hash ")
        hashes.append(last)
    assert hashes[0] == hashes[1]


class Engine:
    """What an engine of DeepSpeed does on one rank, as its documentation describes it."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.passes = 0

    def backward(self, loss: Tensor) -> None:
        (loss / PASSES).backward()
        self.passes += 1

    def step(self) -> None:
        if self.passes % PASSES:
            return
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_the_guide_replaces_an_engine_of_deepspeed(level: str, cluster: zs.Session) -> None:
    (guide,) = of_kinds("deepspeed")
    batches = [models.batch("mlp", step, 8) for step in range(4 * PASSES)]
    plain: Any = models.build("mlp")
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = Engine(plain, optimizer, scheduler)
    for batch in batches:
        engine.backward(plain(*batch))
        engine.step()
    ours: Any = models.build("mlp")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, _ = group_sharded_parallel(ours, optimizer, level, segment_size=SEGMENT)
    names = {
        "batches": batches,
        "contextlib": contextlib,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": CLIP,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "torch": torch,
    }
    guide.run(names)
    assert_close(dict(model.state_dict()), plain.state_dict(), rtol=2e-5, atol=2e-6)
