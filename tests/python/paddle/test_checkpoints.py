# promise: durability
"""Programs that continue from checkpoints: in a new run, and after the loss of a server or rank."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import paddle
import pytest
import zeroshard as zs
from paddle import nn

import models
import ranks
from servers import killable, servers
from training import LEVELS, SEGMENT
from zeroshard._random import RandomState
from zeroshard.paddle import GradScaler, group_sharded_parallel

STEPS = 8
EVERY = 3
#: Seconds until a checkpoint is complete.
SAVED_WITHIN = 30

#: The hash of the state, the learning rate, and on rank 0 the running statistics of batch norm.
Result = tuple[str, float, list[Any]]
Disturb = Callable[[int], None]


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory, because files are flushed to disk."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as found:
        yield Path(found)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for checkpoints."""
    with in_memory() as found:
        yield found


def network(width: int = 32) -> Any:
    """A model whose result depends on the random state, with buffers and frozen parameters."""
    model = models.Classifier(
        nn.Linear(models.FEATURES, width),
        nn.BatchNorm1D(width),
        nn.Dropout(0.3),
        nn.Linear(width, 24),
        nn.Tanh(),
        nn.Linear(24, models.CLASSES),
    )
    model.layers[3].bias.stop_gradient = True
    return model


def adam(model: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    schedule = paddle.optimizer.lr.LinearWarmup(
        paddle.optimizer.lr.ExponentialDecay(0.01, 0.9), 3, 0.001, 0.01
    )
    return paddle.optimizer.AdamW(schedule, parameters=trained)


def wait_for(directory: str, model: int, version: int) -> None:
    """Returns when the checkpoint of a version is complete."""
    pattern = f"*sharded-{model}*/{version:020}/manifest.json"
    until = time.monotonic() + SAVED_WITHIN
    while not list(Path(directory).glob(f"**/{pattern}")):
        assert time.monotonic() < until, f"{pattern}: {list(Path(directory).glob('**/*'))}"
        time.sleep(0.02)


class Run:
    """A training of one level on one rank, which continues from checkpoints."""

    def __init__(self, rank: int, world: int, level: str, directory: str, seed: int = 1) -> None:
        paddle.seed(seed)
        self.rank, self.world, self.level = rank, world, level
        self.bare = network()
        self.checkpoints = zs.Checkpoints(f"file://{directory}", every=EVERY, state=self.state)
        self.model, self.optimizer, scaler = group_sharded_parallel(
            self.bare,
            adam(self.bare),
            level,
            GradScaler(init_loss_scaling=16.0, incr_every_n_steps=2),
            segment_size=SEGMENT,
            checkpoints=self.checkpoints,
        )
        assert scaler is not None
        self.scaler = scaler
        for draw in (paddle.seed, random.seed, numpy.random.seed):
            draw(100 * seed + rank)
        self.rows = Path(directory) / f"rows.{level}.{rank}"

    def state(self) -> bytes:
        return pickle.dumps(self.scaler.state_dict())

    def restore(self, saved: bytes | None) -> None:
        if saved is not None:
            self.scaler.load_state_dict(pickle.loads(saved))

    def train(self, until: int, disturb: Disturb) -> None:
        """Trains from the checkpoint until a step. ``disturb`` is called in each forward."""
        for step in zs.steps(until, self.checkpoints, restore=self.restore):
            with step:
                data = models.batch("mlp", step.number, 16)
                loss = self.model(*models.broadcast(data, self.rank, self.world))
                scale = self.scaler.state_dict()["scale"].item()
                row = [step.number, loss.item(), scale, self.optimizer.get_lr()]
                with self.rows.open("a") as file:
                    print(json.dumps([*row, random.random(), numpy.random.random()]), file=file)
                disturb(step.number)
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer._learning_rate.step()
                self.optimizer.clear_grad()

    def result(self) -> Result:
        norm = self.bare.layers[1]
        statistics = [norm._mean.numpy(), norm._variance.numpy()] if self.rank == 0 else []
        return self.optimizer.state_hash(), self.optimizer.get_lr(), statistics


def nothing(step: int) -> None:
    pass


def train_all(rank: int, world: int, directory: str, until: int, seed: int) -> dict[str, Result]:
    """Trains each level until a step, from the last checkpoint, and saves it."""
    found = {}
    with zs.init(name="train"):
        for level in LEVELS:
            run = Run(rank, world, level, directory, seed)
            run.train(until, nothing)
            # Between two checkpoints of the policy, or the version that the run has started from.
            assert run.checkpoints.save() == until
            found[level] = run.result()
    return found


def train_through_losses(
    rank: int, directory: str, victims: list[int], dies: str | None
) -> dict[str, Result]:
    """Trains all levels. Rank 0 kills a server of each level after a checkpoint; rank 1 is killed
    later, in the level ``dies``."""
    found = {}
    with zs.init(name="train"):
        for number, level in enumerate(LEVELS):
            run = Run(rank, 2, level, directory)
            mark = Path(directory) / f"killed.{level}"

            def disturb(step: int) -> None:
                if rank == 0 and step == EVERY + 1 and not mark.exists():
                    wait_for(directory, number, EVERY)
                    mark.touch()
                    os.kill(victims[number], signal.SIGKILL)
                if rank == 1 and level == dies and step == EVERY + 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            run.train(STEPS, disturb)
            found[level] = run.result()
    return found


def rows(directory: Path, level: str, rank: int) -> list[str]:
    """The numbers that a rank has found in each attempt at a step, in order."""
    return (directory / f"rows.{level}.{rank}").read_text().splitlines()


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[list[dict[str, Result]], Path]]:
    """The results of both ranks when they are not disturbed, and the directory of their rows."""
    with servers(2) as address, in_memory() as own:
        environment = {"ZEROSHARD_ADDRESS": address}
        yield ranks.run(2, train_all, 2, str(own), STEPS, 1, env=environment, init=False), own


def assert_same_results(found: list[dict[str, Result]], expected: list[dict[str, Result]]) -> None:
    for rank, undisturbed in zip(found, expected, strict=True):
        for level in LEVELS:
            (*same, statistics), (*calm, calm_statistics) = rank[level], undisturbed[level]
            assert same == calm, level
            for values, calm_values in zip(statistics, calm_statistics, strict=True):
                numpy.testing.assert_array_equal(values, calm_values)


def test_a_new_run_on_other_servers_and_ranks_continues_with_the_same_results(
    directory: Path, calm: tuple[list[dict[str, Result]], Path]
) -> None:
    expected, undisturbed = calm
    for shards, until, seed in ((2, 7, 1), (3, STEPS, 2)):
        with servers(shards) as address:
            environment = {"ZEROSHARD_ADDRESS": address}
            arguments = 2, str(directory), until, seed
            found = ranks.run(2, train_all, *arguments, env=environment, init=False)
    assert_same_results(found, expected)
    for level in LEVELS:
        for rank in range(2):
            assert rows(directory, level, rank) == rows(undisturbed, level, rank), (level, rank)
    # Another number of ranks, of which one has no data in the checkpoint.
    with servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        arguments = 3, str(directory), STEPS, 3
        found = ranks.run(3, train_all, *arguments, env=environment, init=False)
    for more in found:
        for level in LEVELS:
            assert more[level][:2] == expected[0][level][:2], level


def test_a_run_continues_with_the_same_results_when_a_server_is_killed_and_when_a_rank_is(
    directory: Path, calm: tuple[list[dict[str, Result]], Path]
) -> None:
    expected, undisturbed = calm
    with killable(4) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        arguments = str(directory), [process.pid for process in shards[:3]]
        for level in LEVELS:
            # As Paddle's launcher does, all ranks are killed when one has died, and start again.
            with pytest.raises(ranks.RankFailed, match="rank 1:\nended without a word: SIGKILL"):
                ranks.run(2, train_through_losses, *arguments, level, env=environment, init=False)
        found = ranks.run(2, train_through_losses, *arguments, None, env=environment, init=False)
    assert_same_results(found, expected)
    for level in LEVELS:
        for rank in range(2):
            found_rows = rows(directory, level, rank)
            same = rows(undisturbed, level, rank)
            assert sorted(set(found_rows)) == sorted(same), (level, rank)
            # The step since the checkpoint was run again, and that in which rank 1 was killed; also
            # that in which rank 0 has killed the server, which may have ended the forward of rank 1
            # at level p_g_os.
            assert len(found_rows) >= len(same) + (3 if rank == 0 else 2), (level, rank)


def shard(directory: str, width: int = 32, **options: Any) -> tuple[Any, Any, zs.Checkpoints]:
    checkpoints = zs.Checkpoints(f"file://{directory}", every=1, **options)
    bare = network(width)
    model, optimizer, _ = group_sharded_parallel(bare, adam(bare), "os_g", checkpoints=checkpoints)
    return model, optimizer, checkpoints


def train_one(model: Any, optimizer: Any) -> None:
    optimizer.clear_grad()
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()


def misuse(rank: int, directory: str) -> None:
    """Uses checkpoints in a loop of its own, and in ways that are refused."""
    with zs.init(name="misuse"):
        model, optimizer, checkpoints = shard(directory, state=lambda: b"saved")
        assert checkpoints.resume() == (0, None)
        train_one(model, optimizer)
        before = optimizer.state_hash(), optimizer.get_lr()
        with pytest.raises(zs.InvalidArgumentError, match="after step 0"):
            checkpoints.resume()
        optimizer._learning_rate.step()
        state = optimizer.state_dict()
        optimizer._learning_rate.step(0)
        with pytest.raises(zs.InvalidArgumentError, match="does not support"):
            optimizer.set_state_dict(state)
        assert (optimizer.state_hash(), optimizer.get_lr()) == before
        with pytest.raises(zs.InvalidArgumentError, match="already used"):
            other = network()
            group_sharded_parallel(other, adam(other), "os", checkpoints=checkpoints)
        assert checkpoints.save() == 1
    with zs.init(name="misuse"), pytest.raises(zs.InvalidArgumentError, match="layers.0.weight"):
        shard(directory, width=16)
    with (
        zs.init(name="misuse"),
        pytest.raises(zs.InvalidArgumentError, match="already has a checkpoint"),
    ):
        shard(directory, resume="never")
    with zs.init(name="misuse"):
        model, optimizer, checkpoints = shard(directory)
        assert checkpoints.resume() == (1, b"saved")
        assert optimizer.state_hash() == before[0]


def save_schedule(rank: int, directory: str) -> None:
    """Saves a scheduler whose learning rate is a number of NumPy, and continues with another."""
    with zs.init(name="schedule"):
        _, optimizer, checkpoints = shard(f"{directory}/numpy")
        optimizer._learning_rate = paddle.optimizer.lr.LambdaDecay(0.1, lambda _: numpy.float32(1))
        with pytest.raises(zs.InvalidArgumentError, match="'last_lr'.* LambdaDecay"):
            next(zs.steps(1, checkpoints))
    with zs.init(name="schedule"):
        model, optimizer, checkpoints = shard(f"{directory}/saved")
        optimizer._learning_rate = paddle.optimizer.lr.StepDecay(0.1, step_size=3)
        for step in zs.steps(1, checkpoints):
            with step:
                train_one(model, optimizer)
        checkpoints.save()
    lr = paddle.optimizer.lr
    for other, name in (
        (lr.ReduceOnPlateau(0.1), "ReduceOnPlateau"),
        # Its state has the same names.
        (lr.CosineAnnealingDecay(0.1, T_max=3), "CosineAnnealingDecay"),
        (0.1, "a number"),
    ):
        # Copies: a run waits until one that has ended without a checkpoint is taken for over.
        copy = shutil.copytree(f"{directory}/saved", f"{directory}/{name}")
        with zs.init(name="schedule"):
            _, optimizer, checkpoints = shard(copy)
            optimizer._learning_rate = other
            with pytest.raises(zs.InvalidArgumentError, match=f"is {name}, .* it is StepDecay"):
                next(zs.steps(2, checkpoints))


def restart_warmly(rank: int, directory: str, until: int) -> list[float]:
    """The learning rates of the steps up to ``until``."""
    rates = []
    with zs.init(name="restarts"):
        model, optimizer, checkpoints = shard(directory)
        schedule = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.1, T_0=3, T_mult=2)
        optimizer._learning_rate = schedule
        for step in zs.steps(until, checkpoints):
            with step:
                rates.append(optimizer.get_lr())
                train_one(model, optimizer)
                schedule.step()
        checkpoints.save()
    return rates


def test_warm_restarts_continue_at_their_position(directory: Path) -> None:
    [all_rates] = ranks.run(1, restart_warmly, str(directory / "whole"), 12)
    [first] = ranks.run(1, restart_warmly, str(directory / "parts"), 7)
    [second] = ranks.run(1, restart_warmly, str(directory / "parts"), 12)
    assert first + second == all_rates


def test_a_loop_of_its_own_is_continued_and_changes_and_other_models_are_refused(
    directory: Path,
) -> None:
    ranks.run(1, misuse, str(directory))


def test_a_scheduler_that_cannot_be_saved_or_continued_is_refused(directory: Path) -> None:
    ranks.run(1, save_schedule, str(directory))


def test_random_numbers_continue_from_a_state_in_json_which_is_checked() -> None:
    paddle.seed(3)
    paddle.rand([3])
    saved = json.loads(json.dumps(RandomState.current().to_json()))
    drawn = paddle.rand([5]).numpy()
    RandomState.from_json(saved).restore()
    numpy.testing.assert_array_equal(paddle.rand([5]).numpy(), drawn)
    [state] = saved["paddle"]["cpu"]
    for invalid in ([*state[:3], "1 2 3"], [*state[:3], "x"], [*state[:2], "0", state[3]]):
        with pytest.raises(zs.InvalidArgumentError, match="version"):
            RandomState.from_json({**saved, "paddle": {"cpu": [invalid]}})
    for others in ({"cpu": [state, state]}, {"cpu": [state], "gpu": [state]}):
        with pytest.raises(zs.InvalidArgumentError, match="devices"):
            RandomState.from_json({**saved, "paddle": others})
