# promise: durability
"""``zeroshard.steps``: a step that is aborted is run again with the same results."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from servers import killable
from test_checkpoints import STEPS, assert_same_buffers, network
from training import LEVELS, SEGMENT
from zeroshard.torch import DataParallel, fused_allreduce_gradients, group_sharded_parallel

#: The step in which a server is killed or an abort is simulated.
DISTURBED = 3
#: The places in a step where this happens.
PLACES = ("before forward", "before backward", "before clipping", "before step")

Disturb = Callable[[str], None]


class Noisy(nn.Module):
    """Multiplies by numbers from all global generators, and counts its calls in a buffer that each
    call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return values * (1 + 0.1 * random.random() + 0.1 * numpy.random.random())


class Counting(nn.Module):
    """Counts its calls, as TorchScript: in a buffer that each call replaces, and in one that each
    call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("changed", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.changed.add_(1)
        return values + 0.01 * self.replaced + 0.01 * self.changed


def build(level: str, **options: Any) -> tuple[Any, Any, Any]:
    """A sharded model with batch norm and dropout, its optimizer, and a gradient scaler."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    model = network()
    model.layers.insert(3, Noisy())
    model.layers.append(torch.jit.script(Counting()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    return group_sharded_parallel(model, optimizer, level, scaler, segment_size=SEGMENT, **options)


Result = tuple[dict[int, float], str, dict[str, Tensor], float, list[float], list[int]]


def train(level: str, disturb: Disturb, zeroes_first: bool = True, **options: Any) -> Result:
    """Trains in a loop of ``zeroshard.steps``. ``disturb`` is called at each place of one step."""
    model, optimizer, scaler = build(level, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses: dict[int, float] = {}
    attempts: list[int] = []

    def at(place: str) -> None:
        if step.number == DISTURBED:
            disturb(place)

    for step in zs.steps(STEPS):
        data = models.batch("mlp", step.number, 16)
        attempts.append(step.number)
        with step:
            if zeroes_first:
                optimizer.zero_grad()
            at("before forward")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*data)
            at("before backward")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            at("before clipping")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            at("before step")
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses[step.number] = loss.item()
            if not zeroes_first:
                optimizer.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return (
        losses,
        optimizer.state_hash(),
        buffers,
        scaler.get_scale(),
        schedule.get_last_lr(),
        attempts,
    )


def assert_same_results(found: Result, expected: Result, repeated: int) -> None:
    assert found[:2] == expected[:2]
    assert_same_buffers(found[2], expected[2])
    assert found[3:5] == expected[3:5]
    assert found[5] == sorted([*range(STEPS), *[DISTURBED] * repeated])


def undisturbed(place: str) -> None:
    pass


class Killing:
    """Kills a server at a place of the step, once."""

    def __init__(self, place: str, victim: int) -> None:
        self.place = place
        self.victim = victim

    def __call__(self, place: str) -> None:
        if place == self.place:
            os.kill(self.victim, signal.SIGKILL)
            self.place = ""


def train_undisturbed_levels(rank: int) -> dict[str, Result]:
    with zs.init(shards=3):
        return {level: train(level, undisturbed) for level in LEVELS}


def train_through_kills(rank: int, place: str, victims: list[int]) -> dict[str, Result]:
    """Trains at each level, and kills a different server each time."""
    with zs.init(replicas=2):
        return {
            level: train(level, Killing(place, victim))
            for level, victim in zip(LEVELS, victims, strict=True)
        }


@pytest.fixture(scope="module")
def calm() -> dict[str, Result]:
    """The results of an undisturbed run at each level."""
    found: dict[str, Result] = ranks.run(1, train_undisturbed_levels, init=None)[0]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_the_results_are_those_of_an_undisturbed_run_when_servers_are_killed(
    place: str, calm: dict[str, Result]
) -> None:
    with killable(5) as (address, shards):
        victims = [process.pid for process in shards[: len(LEVELS)]]
        environment = {"ZEROSHARD_ADDRESS": address}
        [found] = ranks.run(1, train_through_kills, place, victims, env=environment, init=None)
    for level in LEVELS:
        repeated = len(found[level][5]) - STEPS
        assert_same_results(found[level], calm[level], repeated)
        # The step stands if it was decided before the loss was noticed, or nothing was sent before.
        assert repeated in (0, 1)


def train_in_ranks(rank: int, victims: list[int], size: int) -> list[Result]:
    """Trains all levels. Rank 0 kills a server in each, if there are any to be killed."""

    def disturb(place: str) -> None:
        if rank == 0 and place == "before backward" and len(victims) + len(found) == len(LEVELS):
            os.kill(victims.pop(0), signal.SIGKILL)

    found: list[Result] = []
    with zs.init(replicas=2):
        for level in LEVELS:
            found.append(train(level, disturb, group_size=size))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_have_the_results_of_an_undisturbed_run_when_servers_are_killed(
    size: int,
) -> None:
    with killable(5) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        expected = ranks.run(2, train_in_ranks, [], size, env=environment)
        victims = [process.pid for process in shards[: len(LEVELS)]]
        found = ranks.run(2, train_in_ranks, victims, size, env=environment)
    for ours, undisturbed in zip(found, expected, strict=True):
        for result, calm in zip(ours, undisturbed, strict=True):
            assert_same_results(result, calm, len(result[5]) - STEPS)


class Aborting:
    """Aborts the step at each of its places, once."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def __call__(self, place: str) -> None:
        if place not in self.aborted:
            self.aborted.append(place)
            raise zs.StepAbortedError(place)


def test_a_model_that_the_program_has_dropped_does_not_matter(cluster: zs.Session) -> None:
    gc.disable()
    try:
        dropped: list[Any] = [build("os")]
        dropped.append(dropped)
        with torch.no_grad():
            dropped[0][0].module.layers[0].weight.zero_()
        del dropped
        assert train("os", Aborting())[0].keys() == set(range(STEPS))
    finally:
        gc.enable()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_zeroed_after_the_step_are_not_added_to_those_of_an_aborted_one(
    level: str, calm: dict[str, Result], cluster: zs.Session
) -> None:
    disturb = Aborting()
    found = train(level, disturb, zeroes_first=False)
    assert disturb.aborted == list(PLACES)
    assert_same_results(found, calm[level], len(PLACES))


def loop_of(model: Any, optimizer: Any, total: int, body: Callable[[int], None]) -> list[int]:
    """The numbers of the steps that are begun."""
    begun = []
    for step in zs.steps(total):
        with step:
            begun.append(step.number)
            model(*models.batch("mlp", step.number, 8)).backward()
            body(len(begun))
            optimizer.step()
            optimizer.zero_grad()
    return begun


def abort_first(times: int) -> None:
    if times == 1:
        raise zs.StepAbortedError("a rank was lost")


def test_what_cannot_be_run_again_is_refused(cluster: zs.Session) -> None:
    model, optimizer, _ = build("os")
    assert loop_of(model, optimizer, 2, abort_first) == [0, 0, 1]

    def step_twice(times: int) -> None:
        optimizer.step()
        abort_first(times)

    with pytest.raises(zs.InvalidArgumentError, match="after an optimizer.step"):
        loop_of(model, optimizer, 1, step_twice)

    def write(times: int) -> None:
        with torch.no_grad():
            model.module.layers[0].weight.zero_()
        abort_first(times)

    optimizer.zero_grad()
    with pytest.raises(zs.InvalidArgumentError, match="layers.0.weight.*was written to"):
        loop_of(model, optimizer, 1, write)

    optimizer.zero_grad()
    # Neither does a block that has no backward pass of its own.
    model(*models.batch("mlp", 0, 8)).backward()
    with pytest.raises(zs.InvalidArgumentError, match="had a gradient before the block"):
        for step in zs.steps(1):
            with step:
                optimizer.zero_grad()
                raise zs.StepAbortedError("a rank was lost")
    model(*models.batch("mlp", 0, 8)).backward()
    with pytest.raises(zs.InvalidArgumentError, match="had a gradient before the block"):
        loop_of(model, optimizer, 1, abort_first)
    # The loop does not train the first model.
    other, its_optimizer, _ = build("os_g")
    assert loop_of(other, its_optimizer, 1, abort_first) == [0, 0]


def test_an_error_of_the_program_ends_the_loop_and_many_aborts_do(cluster: zs.Session) -> None:
    model, optimizer, _ = build("os")

    def fail(times: int) -> None:
        raise KeyError("of the program")

    with pytest.raises(KeyError):
        loop_of(model, optimizer, 1, fail)
    optimizer.zero_grad()
    aborts = []

    def abort(times: int) -> None:
        aborts.append(times)
        raise zs.StepAbortedError("a rank was lost")

    with pytest.raises(zs.StepAbortedError):
        loop_of(model, optimizer, 1, abort)
    assert aborts == list(range(1, 101))


def test_batches_are_numbers_sequences_or_iterables_and_are_kept_for_a_repetition() -> None:
    drawn = []

    def draw() -> Iterator[str]:
        for batch in "ab":
            drawn.append(batch)
            yield batch

    seen = []
    for step in zs.steps(draw()):
        with step:
            seen.append((step.number, step.batch))
            if len(seen) == 1:
                raise zs.StepAbortedError("a rank was lost")
    assert seen == [(0, "a"), (0, "a"), (1, "b")]
    assert drawn == ["a", "b"]
    assert [step.batch for step in zs.steps(["x", "y"])] == ["x", "y"]
    assert [(step.number, step.batch) for step in zs.steps(2)] == [(0, None), (1, None)]
    checkpoints = zs.Checkpoints("file:///checkpoints")
    for batches, more, error in (
        (-1, (), "0 or more"),
        (1.5, (), "is a float"),
        (draw(), (checkpoints,), "cannot go back"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=error):
            zs.steps(batches, *more)  # type: ignore[call-overload]
    with pytest.raises(zs.InvalidArgumentError, match="both or neither"):
        zs.steps(1, checkpoints, restore=print)


class Normed(nn.Module):
    """A model whose ranks communicate in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.SyncBatchNorm(2)


def abort_shared(rank: int) -> tuple[str, str]:
    """The errors of aborted steps in which ranks communicate, or that average gradients."""
    found = []
    with zs.init():
        bare = Normed()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        sharded = group_sharded_parallel(bare, optimizer, "os")
        found.append(abort_empty())
        del sharded, bare, optimizer
        gc.collect()
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        fused_allreduce_gradients(parameter)
        found.append(abort_empty())
    return found[0], found[1]


def abort_empty() -> str:
    try:
        for step in zs.steps(1):
            with step:
                raise zs.StepAbortedError("a rank was lost")
    except zs.InvalidArgumentError as error:
        return str(error)
    return ""


def test_steps_in_which_ranks_communicate_are_not_repeated() -> None:
    for normed, fused in ranks.run(2, abort_shared):
        assert "SyncBatchNorm" in normed
        assert "fused_allreduce_gradients" in fused


def average(rank: int) -> str:
    """The error of a step with DataParallel that is aborted."""
    with zs.init():
        model = DataParallel(models.build("mlp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            loop_of(model, optimizer, 1, abort_first)
        except zs.InvalidArgumentError as error:
            return str(error)
    return ""


def test_a_step_of_data_parallel_is_not_repeated() -> None:
    for error in ranks.run(2, average):
        assert "does not restore models of DataParallel" in error
