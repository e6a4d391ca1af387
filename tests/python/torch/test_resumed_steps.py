"""``zeroshard.steps`` with checkpoints: runs that continue after the loss of a server or rank."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import models
import ranks
import zeroshard as zs
from environment import IS_LONG
from servers import BINARY, killable, server, servers, start
from test_checkpoints import EVERY, STEPS, in_memory, network, wait_for
from training import LEVELS, SEGMENT
from zeroshard.torch import group_sharded_parallel


Disturb = Callable[[int, str], None]


class Run:
    """A training of one level on one of two ranks, which writes its losses to a file."""

    def __init__(
        self,
        rank: int,
        level: str,
        directory: str,
        on_loss: Literal["restore", "fail"] = "restore",
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        bare = network()
        trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        self.checkpoints = zs.Checkpoints(
            f"file://{directory}", every=EVERY, on_loss=on_loss, state=self.state
        )
        self.model, self.optimizer, self.scaler = group_sharded_parallel(
            bare,
            torch.optim.AdamW(trained, lr=0.01),
            level,
            torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2),
            segment_size=SEGMENT,
            checkpoints=self.checkpoints,
            **options,
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(100 + rank)
        self.rank, self.level = rank, level
        self.losses = Path(directory) / f"losses.{rank}"

    def state(self) -> bytes:
        schedule = self.schedule.state_dict(), self.schedule.get_last_lr()
        return pickle.dumps((*schedule, self.scaler.state_dict()))

    def restore(self, saved: bytes | None) -> None:
        if saved is None:
            return
        schedule, rates, scaler = pickle.loads(saved)
        self.schedule.load_state_dict(schedule)
        self.scaler.load_state_dict(scaler)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def train(self, disturb: Disturb) -> str:
        """Trains to the end, and returns the hash of the state. ``disturb`` is called at the places
        of each step."""
        for step in zs.steps(STEPS, self.checkpoints, restore=self.restore):
            with step:
                data = models.batch("mlp", step.number, 16)
                loss = self.model(*models.share(data, self.rank, 2))
                with self.losses.open("a") as losses:
                    scale, number = self.scaler.get_scale(), torch.rand(1).item()
                    losses.write(f"{self.level} {step.number} {loss.item().hex()} ")
                    losses.write(f"{scale} {number}\n")
                disturb(step.number, "before backward")
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                disturb(step.number, "after step")
                self.scaler.update()
                self.schedule.step()
                torch.rand(1)
                self.optimizer.zero_grad()
        return str(self.optimizer.state_hash())


def nothing(step: int, place: str) -> None:
    pass


def train_undisturbed(rank: int, directory: str) -> list[str]:
    with zs.init(name="steps"):
        return [Run(rank, level, directory).train(nothing) for level in LEVELS]


def train_through_losses(
    rank: int, directory: str, victims: list[int], dies: str | None, size: int
) -> list[str]:
    """Trains all levels. Rank 0 kills a server of each level after a checkpoint; rank 1 is killed
    later, in the level ``dies``."""
    hashes = []
    with zs.init(name="steps"):
        for number, level in enumerate(LEVELS):
            run = Run(rank, level, directory, group_size=size)
            mark = Path(directory) / f"killed.{level}"

            def disturb(step: int, place: str) -> None:
                if place == "after step":
                    return
                if rank == 0 and step == EVERY + 1 and not mark.exists():
                    wait_for(directory, "steps", number, EVERY)
                    mark.touch()
                    os.kill(victims[number], signal.SIGKILL)
                if rank == 1 and level == dies and step == EVERY + 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            hashes.append(run.train(disturb))
    return hashes


def losses(directory: Path, rank: int) -> tuple[list[str], list[str]]:
    """The losses that a rank has found, each once, and all of them in order."""
    lines = (directory / f"losses.{rank}").read_text().splitlines()
    return sorted(set(lines)), lines


@pytest.mark.parametrize("size", [1, 2] if IS_LONG else [2])
def test_a_run_with_checkpoints_continues_when_a_server_is_killed_and_when_a_rank_is(
    size: int,
) -> None:
    with in_memory() as calm, servers(2) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        expected = ranks.run(2, train_undisturbed, str(calm), env=environment)
        undisturbed = [losses(calm, rank)[0] for rank in range(2)]
    with in_memory() as directory, killable(4) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        arguments = str(directory), [process.pid for process in shards[:3]]
        for level in LEVELS:
            # As torchrun does, all ranks are killed when one has died, and start again.
            with pytest.raises(ranks.RankFailed, match="rank 1:\nended without a word: SIGKILL"):
                ranks.run(2, train_through_losses, *arguments, level, size, env=environment)
        found = ranks.run(2, train_through_losses, *arguments, None, size, env=environment)
        assert found == expected
        for rank in range(2):
            distinct, lines = losses(directory, rank)
            assert distinct == undisturbed[rank]
            # At least those after the checkpoint, and that of the killed rank, were run again. The
            # death of the server may have ended the forward of rank 1.
            assert len(lines) >= len(LEVELS) * (STEPS + (3 if rank == 0 else 2)), lines


def train_until_killed(
    rank: int, directory: str, on_loss: Literal["restore", "fail"] = "restore"
) -> str:
    """Rank 1 is killed after it has made a step, and before its block ends."""
    mark = Path(directory) / "killed"

    def disturb(step: int, place: str) -> None:
        if rank == 1 and (step, place) == (EVERY + 1, "after step") and not mark.exists():
            wait_for(directory, "steps", 0, EVERY)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with zs.init(name="steps"):
        return Run(rank, "os_g", directory, on_loss).train(disturb)


def test_a_rank_that_is_killed_after_its_step_continues_from_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    with in_memory() as calm, in_memory() as directory, servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        (calm / "killed").touch()
        expected = ranks.run(2, train_until_killed, str(calm), env=environment)
        with pytest.raises(ranks.RankFailed, match="rank 1:\nended without a word: SIGKILL"):
            ranks.run(2, train_until_killed, str(directory), env=environment)
        assert ranks.run(2, train_until_killed, str(directory), env=environment) == expected
        for rank in range(2):
            distinct, lines = losses(directory, rank)
            assert distinct == losses(calm, rank)[0]
            repeated = [int(line.split()[1]) for line in distinct if lines.count(line) > 1]
            # Rank 0 may have begun the step after.
            assert repeated[:2] == [EVERY, EVERY + 1]


def test_a_run_whose_data_is_lost_says_how_to_continue_if_it_may_not_be_restored() -> None:
    with in_memory() as calm, in_memory() as directory, servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        (calm / "killed").touch()
        expected = ranks.run(2, train_until_killed, str(calm), "fail", env=environment)
        train = str(directory), "fail"
        with pytest.raises(ranks.RankFailed, match="rank 1:\nended without a word: SIGKILL"):
            ranks.run(2, train_until_killed, *train, env=environment)
        advice = rf"UserDataLostError: version {EVERY + 2} .* rank 1, .*\(zsctl delete (\S+)\)"
        with pytest.raises(ranks.RankFailed, match=advice) as lost:
            ranks.run(2, train_until_killed, *train, env=environment)
        name = re.search(advice, str(lost.value))
        assert name is not None
        # It may have ended with its ranks.
        subprocess.run(
            [BINARY.with_name("zsctl"), "delete", name[1], "--yes", "--address", address],
            check=False,
        )
        assert ranks.run(2, train_until_killed, *train, env=environment) == expected


def save_early(rank: int, directory: str) -> str:
    """The error of a save in a block that has made a step."""
    with zs.init(name="early"):
        run = Run(rank, "os", directory)
        for step in zs.steps(2, run.checkpoints, restore=run.restore):
            with step:
                if step.number == 1:
                    assert run.checkpoints.save() == 1
                run.model(*models.batch("mlp", step.number, 16)).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if step.number == 1:
                    try:
                        run.checkpoints.save()
                    except zs.InvalidArgumentError as error:
                        return str(error)
    return ""


def test_a_save_in_a_block_that_has_made_a_step_is_refused(tmp_path: Path) -> None:
    [error] = ranks.run(1, save_early, str(tmp_path), init=None)
    assert "call it after the block" in error


def fail_late(rank: int, directory: str) -> None:
    """Makes a step outside of a block, and saves after a block that has failed after its step."""

    def train(number: int) -> None:
        run.model(*models.batch("mlp", number, 16)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    with zs.init(name="late"):
        run = Run(rank, "os", directory)
        loop = zs.steps(3, run.checkpoints, restore=run.restore)
        with next(loop) as step:
            train(step.number)
        with pytest.raises(zs.InvalidArgumentError, match="outside of the blocks"):
            train(step.number)
        run.optimizer.zero_grad()
        with pytest.raises(ValueError, match="log"), next(loop) as step:
            train(step.number)
            raise ValueError("the log is full")
        with pytest.raises(zs.InvalidArgumentError, match="block of step 1 .* ended with an error"):
            run.checkpoints.save()
        with next(loop) as step:
            train(step.number)
        assert run.checkpoints.save() == 3


def test_a_step_outside_of_a_block_and_a_save_after_a_failed_block_are_refused(
    tmp_path: Path,
) -> None:
    ranks.run(1, fail_late, str(tmp_path), init=None)


def make_steps(rank: int, directory: str, total: int) -> None:
    """Trains in a run that is killed between two checkpoints. Writes the steps that it has made to
    a file."""
    zs.init(name="gone")
    run = Run(rank, "os", directory)
    made = []
    for step in zs.steps(total, run.checkpoints, restore=run.restore):
        with step:
            run.model(*models.batch("mlp", step.number, 16)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            made.append(step.number)
    Path(directory, "made.json").write_text(json.dumps(made))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_data_was_lost_with_the_coordinator_continues_from_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        coordinator, address = start("coordinator")
        stack.callback(lambda: (coordinator.kill(), coordinator.communicate()))
        stack.enter_context(server("shard", "--coordinator", address))
        environment = {"ZEROSHARD_ADDRESS": address}

        def run(total: int) -> Any:
            with pytest.raises(ranks.RankFailed, match="SIGKILL"):
                ranks.run(1, make_steps, str(tmp_path), total, env=environment, init=None)
            return json.loads((tmp_path / "made.json").read_text())

        assert run(1) == [0]
        assert run(2) == [1]
        coordinator.kill()
        coordinator.communicate()
        coordinator, _ = start("coordinator", listen=address)
        assert run(3) == [1, 2]
