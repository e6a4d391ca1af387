# promise: durability
"""Programs that continue from checkpoints: in a new run, and after the loss of a server."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from servers import BINARY, killable, servers
from training import LEVELS, SEGMENT
from zeroshard.torch import group_sharded_parallel

STEPS = 8
EVERY = 3
#: Seconds until a checkpoint is complete.
SAVED_WITHIN = 30


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
        nn.BatchNorm1d(width),
        nn.Dropout(0.3),
        nn.Linear(width, 24),
        nn.Tanh(),
        nn.Linear(24, models.CLASSES),
    )
    model.layers[3].bias.requires_grad_(False)
    return model


def wait_for(directory: str, name: str, model: int, version: int) -> None:
    """Returns when the checkpoint of a version is complete."""
    pattern = f"{name}*sharded-{model}*/{version:020}/manifest.json"
    until = time.monotonic() + SAVED_WITHIN
    while not list(Path(directory).glob(pattern)):
        assert time.monotonic() < until, f"{pattern}: {list(Path(directory).glob('**/*'))}"
        time.sleep(0.02)


class Run:
    """A training of one level on one rank, which can continue from checkpoints."""

    def __init__(self, rank: int, level: str, directory: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank = rank
        self.bare = network()
        optimizer = torch.optim.AdamW(
            [p for p in self.bare.parameters() if p.requires_grad], lr=0.01
        )
        self.checkpoints = zs.Checkpoints(f"file://{directory}", every=EVERY, state=self.state)
        self.model, self.optimizer, _ = group_sharded_parallel(
            self.bare, optimizer, level, segment_size=SEGMENT, checkpoints=self.checkpoints
        )
        torch.manual_seed(100 + rank)
        self.step = 0
        self.losses: dict[int, float] = {}
        self.rollbacks: list[int] = []

    def state(self) -> bytes:
        return pickle.dumps((self.step + 1, torch.get_rng_state()))

    def resume(self) -> None:
        self.step, saved = self.checkpoints.resume()
        if saved is not None:
            step, random = pickle.loads(saved)
            assert step == self.step
            torch.set_rng_state(random)

    def train_one(self, kill: int | None = None) -> None:
        data = models.share(models.batch("mlp", self.step, 16), self.rank, 2)
        loss = self.model(*data)
        if kill is not None:
            os.kill(kill, signal.SIGKILL)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = loss.item()
        self.step += 1

    def result(self) -> tuple[dict[int, float], str, dict[str, Tensor]]:
        """The losses, the hash of the state, and on rank 0 the buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.bare.named_buffers()}
        return self.losses, self.optimizer.state_hash(), buffers if self.rank == 0 else {}


def train_all(rank: int, directory: str, until: int, seed: int) -> dict[str, Any]:
    """Trains each level until a step, from the last checkpoint."""
    found = {}
    with zs.init(name="train"):
        for level in LEVELS:
            run = Run(rank, level, directory, seed)
            run.resume()
            first = run.step
            while run.step < until:
                run.train_one()
            # Between two checkpoints of the policy.
            assert run.checkpoints.save() == until
            found[level] = first, *run.result()
    return found


def train_through_loss(rank: int, directory: str, victims: list[int]) -> dict[str, Any]:
    """Trains each level while a server is killed."""
    found = {}
    with zs.init(name="train"):
        for number, level in enumerate(LEVELS):
            run = Run(rank, level, directory, 1)
            run.resume()
            killed = False
            while run.step < STEPS:
                due = run.step == EVERY + 1 and rank == 0 and not killed
                if due:
                    wait_for(directory, "train", number, EVERY)
                    killed = True
                try:
                    run.train_one(victims[number] if due else None)
                except zs.RolledBackError as error:
                    run.rollbacks.append(error.version)
                    run.resume()
            found[level] = run.rollbacks, *run.result()
    return found


@pytest.fixture(scope="module")
def calm() -> list[dict[str, Any]]:
    """What both ranks find when they are not disturbed."""
    with servers(2) as address, in_memory() as own:
        environment = {"ZEROSHARD_ADDRESS": address}
        found: list[dict[str, Any]] = ranks.run(2, train_all, str(own), STEPS, 1, env=environment)
    return found


def assert_same_buffers(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, expected[name]), name


def test_a_new_run_on_other_servers_continues_with_the_same_losses_and_state(
    directory: Path, calm: list[dict[str, Any]]
) -> None:
    for shards, until, seed in ((2, 7, 1), (3, STEPS, 2)):
        with servers(shards) as address:
            environment = {"ZEROSHARD_ADDRESS": address}
            found = ranks.run(2, train_all, str(directory), until, seed, env=environment)
    for rank, expected in zip(found, calm, strict=True):
        for level in LEVELS:
            first, losses, state, buffers = rank[level]
            _, all_losses, expected_state, expected_buffers = expected[level]
            assert first == 7, level
            assert losses == {step: all_losses[step] for step in range(7, STEPS)}, level
            assert state == expected_state, level
            assert_same_buffers(buffers, expected_buffers)


def test_a_run_returns_to_its_last_checkpoint_when_a_server_is_killed(
    directory: Path, calm: list[dict[str, Any]]
) -> None:
    with killable(4) as (address, shards):
        victims = [process.pid for process in shards[:3]]
        environment = {"ZEROSHARD_ADDRESS": address}
        found = ranks.run(2, train_through_loss, str(directory), victims, env=environment)
    for rank, expected in zip(found, calm, strict=True):
        for level in LEVELS:
            rollbacks, losses, state, buffers = rank[level]
            _, all_losses, expected_state, expected_buffers = expected[level]
            assert rollbacks == [EVERY], level
            assert losses == all_losses, level
            assert state == expected_state, level
            assert_same_buffers(buffers, expected_buffers)


def shard(
    directory: str, width: int = 32, every: int = 1, **options: Any
) -> tuple[Any, Any, zs.Checkpoints]:
    checkpoints = zs.Checkpoints(f"file://{directory}", every=every, **options)
    bare = network(width)
    model, optimizer, _ = group_sharded_parallel(
        bare, torch.optim.AdamW(bare.parameters(), lr=0.01), "os_g", checkpoints=checkpoints
    )
    return model, optimizer, checkpoints


def train_one(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()


def save_what_is_lost(rank: int, directory: str, victim: int) -> int:
    """Loses a server between the last step and its save. Returns the version of the checkpoint."""
    with zs.init(name="lost"):
        model, optimizer, checkpoints = shard(directory, every=100)
        train_one(model, optimizer)
        assert checkpoints.save() == 1
        train_one(model, optimizer)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(zs.RolledBackError, match="continue from step 1") as error:
            checkpoints.save()
        return int(error.value.version)


def test_a_save_of_a_version_that_is_lost_is_an_error(directory: Path) -> None:
    with killable(2) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        [version] = ranks.run(
            1, save_what_is_lost, str(directory), shards[0].pid, env=environment, init=None
        )
    assert version == 1


def misuse(rank: int, directory: str) -> None:
    """Uses checkpoints in ways that are refused."""
    with zs.init(name="misuse"):
        sizes = iter((b"saved", b"0" * ((16 << 20) + 1), "text", b"later"))
        model, optimizer, checkpoints = shard(directory, state=lambda: next(sizes))
        assert checkpoints.resume() == (0, None)
        train_one(model, optimizer)
        wait_for(directory, "misuse", 0, 1)
        with pytest.raises(zs.InvalidArgumentError, match="after step 0"):
            checkpoints.resume()
        with pytest.raises(zs.InvalidArgumentError, match="user_data"):
            train_one(model, optimizer)
        with pytest.raises(zs.InvalidTypeError, match="must return bytes"):
            train_one(model, optimizer)
        before = optimizer.state_hash()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(zs.InvalidArgumentError, match="does not support"):
            train_one(model, optimizer)
        del optimizer.param_groups[1]
        with pytest.raises(zs.InvalidArgumentError, match="does not support"):
            optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state_hash() == before
        other = network()
        with pytest.raises(zs.InvalidArgumentError, match="already used"):
            group_sharded_parallel(
                other, torch.optim.SGD(other.parameters()), "os", checkpoints=checkpoints
            )
    with zs.init(name="misuse"):
        with pytest.raises(zs.InvalidArgumentError, match="layers.0.weight"):
            shard(directory, width=16)
    with zs.init(name="misuse"):
        with pytest.raises(zs.InvalidArgumentError):
            shard(directory, resume="never")
    with zs.init(name="misuse"):
        _, _, checkpoints = shard(directory)
        assert checkpoints.resume() == (1, b"saved")


def test_other_models_other_groups_and_large_states_are_refused(directory: Path) -> None:
    ranks.run(1, misuse, str(directory), init=None)


def save_elsewhere(rank: int, directory: str) -> bytes | None:
    """Saves a restored version at another place. Returns the data of the rank there."""
    other = f"file://{directory}/other"
    with zs.init(name="elsewhere"):
        model, optimizer, checkpoints = shard(directory, state=lambda: b"of step 0")
        train_one(model, optimizer)
        checkpoints.save()
    with zs.init(name="elsewhere"):
        _, _, checkpoints = shard(directory)
        name = checkpoints.job_name
        command = [BINARY.with_name("zsctl"), "checkpoint", "save", name, "--url", other]
        subprocess.run(command, check=True)
        return zs._native.user_data(other, name, 1, rank)


def test_a_restored_version_is_saved_elsewhere_with_the_data_of_the_ranks(directory: Path) -> None:
    with servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        [data] = ranks.run(1, save_elsewhere, str(directory), env=environment, init=None)
    assert data == b"of step 0"


def outlive(rank: int, directory: str, first: bool) -> tuple[int, bytes | None]:
    """Makes a step in a run that ends between two checkpoints."""
    zs.init(name="outlive")
    bare = network()
    checkpoints = zs.Checkpoints(f"file://{directory}", every=100, state=lambda: b"of step 0")
    model, optimizer, _ = group_sharded_parallel(
        bare, torch.optim.SGD(bare.parameters()), "os", checkpoints=checkpoints
    )
    resumed = checkpoints.resume()
    if first:
        train_one(model, optimizer)
    return resumed


def test_a_run_that_ends_between_two_checkpoints_is_continued_with_its_data(
    directory: Path,
) -> None:
    with servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        for first, expected in ((True, (0, None)), (False, (1, b"of step 0"))):
            [found] = ranks.run(1, outlive, str(directory), first, env=environment, init=None)
            assert found == expected


def lack_memory(rank: int, directory: str, policy: Any) -> int:
    """Makes steps beside saves on a server that has no memory for second copies."""
    zs.init(name="shortage")
    bare = network()
    checkpoints = zs.Checkpoints(f"file://{directory}", every=1, on_memory_shortage=policy)
    model, optimizer, _ = group_sharded_parallel(
        bare, torch.optim.AdamW(bare.parameters()), "os", checkpoints=checkpoints
    )
    for _ in range(STEPS):
        train_one(model, optimizer)
    return checkpoints.save()


@pytest.mark.parametrize("policy", ["wait", "give_up"])
def test_a_run_trains_beside_saves_without_memory_for_second_copies(
    directory: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROSHARD_SNAPSHOT_BYTES", "1")
    with servers(1) as address:
        environment = {"ZEROSHARD_ADDRESS": address}
        [version] = ranks.run(1, lack_memory, str(directory), policy, env=environment, init=None)
    assert version == STEPS
    wait_for(str(directory), "shortage", 0, STEPS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "/checkpoints"},
        {"every": 0},
        {"every_seconds": 0.5},
        {"every_seconds": float("nan")},
        {"keep": -1},
        {"on_loss": "ignore"},
        {"on_memory_shortage": "ignore"},
        {"resume": "always"},
    ],
)
def test_an_invalid_policy_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(zs.InvalidArgumentError):
        zs.Checkpoints(**{"url": "file:///checkpoints", **arguments})


@pytest.mark.parametrize("method", ["resume", "save"])
def test_resume_and_save_need_a_model(method: str) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=f"{method}.*group_sharded_parallel"):
        getattr(zs.Checkpoints("file:///checkpoints"), method)()
