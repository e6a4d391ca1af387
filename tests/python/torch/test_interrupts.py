# promise: consistent-reads
"""State dicts that a signal handler or another thread makes have the values of one version."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import zeroshard as zs
from training import LEVELS, SEGMENT
from zeroshard._core import reading
from zeroshard._core.step_state import Phase, StepStateError
from zeroshard.torch import group_sharded_parallel

State = dict[str, Tensor]


def copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def position(state: State, states: list[State]) -> int:
    """The index of a state among those of all versions; -1 if it is none of them."""
    same = [all(torch.equal(state[name], other[name]) for name in other) for other in states]
    return same.index(True) if True in same else -1


class Interrupting:
    """A job whose calls of ``commit`` are interrupted by a signal before and after."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        report = self._job.commit(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)
        return report


@pytest.fixture
def handler() -> Iterator[list[Any]]:
    """A list of functions that a handler of SIGUSR1 calls."""
    calls: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: [call() for call in calls])
    yield calls
    signal.signal(signal.SIGUSR1, before)


class Interrupted(nn.Module):
    """An activation whose forward and backward are interrupted by a signal."""

    def forward(self, x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGUSR1)
        if x.requires_grad:
            x.register_hook(lambda _: signal.raise_signal(signal.SIGUSR1))
        return x


def build(level: str) -> tuple[nn.Module, Any, Any]:
    raw = models.build("mlp")
    raw.layers.insert(2, Interrupted())  # type: ignore[operator, union-attr]
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    return raw, *group_sharded_parallel(raw, optimizer, level, segment_size=SEGMENT)[:2]


def step(model: Any, optimizer: Any, index: int) -> None:
    optimizer.zero_grad()
    model(*models.batch("mlp", index, 8)).backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_signal_handler_saves_one_version(
    level: str, cluster: zs.Session, handler: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_DECISION_TIME", 0.05)
    raw, model, optimizer = build(level)
    step(model, optimizer, 0)
    states = [copied(model.state_dict())]
    saved: list[tuple[State, State, float]] = []

    def save() -> None:
        whole, inner = copied(model.state_dict()), copied(raw.state_dict())
        saved.append((whole, inner, optimizer.state_dict()["state"][0]["step"].item()))

    handler.append(save)
    model.sharding.job.job = Interrupting(model.sharding.job.job)
    for index in range(1, 4):
        step(model, optimizer, index)
        states.append(copied(model.state_dict()))
    # In each step: in forward, in backward, before the vote, and after the decision.
    found = [position(state, states) for state, _, _ in saved]
    assert found == [position(state, states) for _, state, _ in saved]
    assert found == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [steps for _, _, steps in saved] == [1 + index for index in found]
    # The interruptions have changed nothing.
    handler.clear()
    _, plain, own = build(level)
    for index in range(4):
        step(plain, own, index)
    assert position(copied(plain.state_dict()), states) == 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_a_signal_handler_in_a_step_is_refused_and_changes_nothing(
    level: str, cluster: zs.Session, handler: list[Any]
) -> None:
    _, model, optimizer = build(level)
    _, plain, own = build(level)
    refused: list[str] = []

    def train() -> None:
        if model.sharding._step.phase is Phase.COMMITTED:
            with pytest.raises(StepStateError) as error:
                optimizer.step()
            refused.append(str(error.value))

    for index in range(3):
        step(plain, own, index)
        handler[:] = [train]
        model.sharding.job.job = Interrupting(model.sharding.job.job)
        step(model, optimizer, index)
        model.sharding.job.job = model.sharding.job.job._job
        handler.clear()
    assert len(refused) == 6 and "wait until optimizer.step() has returned" in refused[0]
    assert position(copied(model.state_dict()), [copied(plain.state_dict())]) == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_another_thread_saves_one_version(cluster: zs.Session, handler: list[Any]) -> None:
    _, model, optimizer = build("p_g_os")
    step(model, optimizer, 0)
    states, saved = [copied(model.state_dict())], []
    running = threading.Event()
    running.set()

    def save() -> None:
        while running.is_set() or len(saved) < 3:
            saved.append(copied(model.state_dict()))

    thread = threading.Thread(target=save)
    thread.start()
    for index in range(1, 40):
        step(model, optimizer, index)
        states.append(copied(model.state_dict()))
    running.clear()
    thread.join()
    assert len(saved) >= 3
    assert all(position(state, states) >= 0 for state in saved)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_can_be_saved_after_a_step_was_interrupted(
    level: str, cluster: zs.Session, handler: list[Any]
) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    def run(interrupt: bool) -> State:
        handler.clear()
        _, model, optimizer = build(level)
        step(model, optimizer, 0)
        optimizer.zero_grad()
        model(*models.batch("mlp", 1, 8)).backward()
        if not interrupt:
            optimizer.step()
            return copied(model.state_dict())
        model.sharding.job.job = Decided(model.sharding.job.job)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        return copied(model.state_dict())

    class Decided(Interrupting):
        def commit(self, *args: Any, **kwargs: Any) -> Any:
            self._job.commit(*args, **kwargs)
            leave()

    assert position(run(True), [run(False)]) == 0


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_after_a_reopened_job_is_saved(
    level: str, cluster: zs.Session, handler: list[Any]
) -> None:
    def average(parameters: list[Any]) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.25)

    _, model, optimizer = build(level)
    first = next(iter(model.parameters()))
    step(model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    # The new job begins at version 0, as the job whose first step was decided.
    assert not model.sharding.reads.is_undecided
    with model.summon_full_params():
        average(model.parameters())
    optimizer.state[first]["exp_avg"].fill_(0.5)
    assert all((value == 0.25).all() for value in model.state_dict().values())
    assert (optimizer.state_dict()["state"][0]["exp_avg"] == 0.5).all()
    step(model, optimizer, 1)
    assert optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.parametrize("level", LEVELS)
def test_writes_are_saved_by_the_thread_that_does_not_train(
    level: str, cluster: zs.Session, handler: list[Any]
) -> None:
    _, model, optimizer = build(level)
    first = next(iter(model.parameters()))
    thread = threading.Thread(target=step, args=(model, optimizer, 0))
    thread.start()
    thread.join()
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    optimizer.state[first]["exp_avg"].fill_(0.5)
    assert all((value == 0.25).all() for value in model.state_dict().values())
    assert (optimizer.state_dict()["state"][0]["exp_avg"] == 0.5).all()
