# promise: atomic-steps
"""Steps that are interrupted, or that lose a rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import models
import ranks
import zeroshard as zs
from training import assert_close, assert_same
from zeroshard.torch import (
    ShardingStage1,
    ShardingStage2,
    group_sharded_parallel,
    shard_optimizer,
)

LEVELS = ["os", "os_g", "p_g_os"]


class Interrupted:
    """A job whose next commit is interrupted, either before it reaches the servers or after they
    have decided."""

    def __init__(self, job: Any, decided: bool) -> None:
        self._job = job
        self._decided = decided

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        self._job.flush()
        if self._decided:
            # The new parameters do not arrive any more.
            self._job.commit(*args, **{**kwargs, "targets": []})
        raise KeyboardInterrupt


class InterruptedFetch:
    """A job whose fetches are interrupted."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def fetch(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def wrapped(level: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A sharded model with momentum, whose state depends on every applied gradient."""
    return sharded(level, dtype)[:2]


def sharded(level: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any]:
    """The sharded model and its optimizer."""
    model = models.build("mlp").to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return group_sharded_parallel(model, optimizer, level, segment_size=64, **options)


def step(model: Any, optimizer: Any, index: int) -> None:
    """Makes a step with its own batch."""
    optimizer.zero_grad()
    inputs, labels = models.batch("mlp", index, 8)
    model(inputs.to(next(model.parameters()).dtype), labels).backward()
    optimizer.step()


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_interrupted_step_is_applied_completely_or_not_at_all(
    level: str, decided: bool, cluster: zs.Session
) -> None:
    model, optimizer = wrapped(level)
    link = optimizer.sharding.job
    step(model, optimizer, 0)
    job = link.job
    link.job = Interrupted(job, decided)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 1)
    link.job = job
    # Another batch: of the interrupted step nothing may be mixed into it.
    for index in (2, 3):
        step(model, optimizer, index)

    calm, steps = wrapped(level)
    for index in (0, 1, 2, 3) if decided else (0, 2, 3):
        step(calm, steps, index)
    assert_same(model.state_dict(), calm.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_an_interruption_while_the_result_of_a_step_is_taken_loses_nothing(
    level: str, cluster: zs.Session
) -> None:
    model, optimizer = wrapped(level)
    link = optimizer.sharding.job
    step(model, optimizer, 0)
    job = link.job
    link.job = Interrupted(job, decided=True)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 1)
    # The result of step 1 is fetched before the next forward, which is interrupted as well.
    link.job = InterruptedFetch(job)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 2)
    link.job = job
    for index in (2, 3):
        step(model, optimizer, index)

    calm, steps = wrapped(level)
    for index in (0, 1, 2, 3):
        step(calm, steps, index)
    assert_same(model.state_dict(), calm.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_an_interruption_after_the_decision_of_a_step_loses_nothing(
    level: str, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The servers keep more of each parameter than a worker has of it.
    model, optimizer = wrapped(level, torch.bfloat16)
    step(model, optimizer, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.sharding.job, "mark", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, 1)
    step(model, optimizer, 2)

    calm, steps = wrapped(level, torch.bfloat16)
    for index in (0, 1, 2):
        step(calm, steps, index)
    assert_same(model.state_dict(), calm.state_dict())


@pytest.mark.parametrize("stage", [ShardingStage1(), ShardingStage2()], ids=["os", "os_g"])
def test_an_interrupted_step_is_not_mixed_into_the_next_if_the_model_is_not_wrapped(
    stage: Any, cluster: zs.Session
) -> None:
    def train(interrupt: bool) -> Any:
        model = models.build("mlp")
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = shard_optimizer(sgd, stage)
        step(model, optimizer, 0)
        if interrupt:
            job = optimizer.sharding.job.job
            optimizer.sharding.job.job = Interrupted(job, decided=False)
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, 1)
            optimizer.sharding.job.job = job
        for index in (2, 3):
            step(model, optimizer, index)
        return model.state_dict()

    assert_same(train(True), train(False))


def interrupt_all_ranks(rank: int, level: str) -> int:
    """Interrupts every rank in the second step, then continues with another batch."""
    with zs.init():
        model, optimizer = wrapped(level)
        link = optimizer.sharding.job
        step(model, optimizer, 0)
        job = link.job
        link.job = Interrupted(job, decided=False)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, 1)
        link.job = job
        for index in (2, 3):
            step(model, optimizer, index)
        calm, steps = wrapped(level)
        for index in (0, 2, 3):
            step(calm, steps, index)
        assert_same(model.state_dict(), calm.state_dict())
        return link.version


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_an_interrupted_step_are_not_mixed_into_the_next(level: str) -> None:
    assert ranks.run(2, interrupt_all_ranks, level) == [3, 3]


def zero_sent_gradients(rank: int) -> tuple[int, int]:
    """Drops gradients after they were sent. Returns the versions of the job before and after."""
    with zs.init():
        model, optimizer, _ = sharded("os_g", accumulation_steps=1)
        step(model, optimizer, 0)
        optimizer.zero_grad()
        model(*models.batch("mlp", 1, 8)).backward()
        assert optimizer.sharding.gradients.any_sent
        before = optimizer.sharding.job.version
        optimizer.zero_grad()
        after = optimizer.sharding.job.version
        step(model, optimizer, 2)
        calm, steps, _ = sharded("os_g", accumulation_steps=1)
        for index in (0, 2):
            step(calm, steps, index)
        assert_same(model.state_dict(), calm.state_dict())
        return before, after


def test_zero_grad_after_gradients_were_sent_does_not_move_the_version() -> None:
    assert ranks.run(2, zero_sent_gradients) == [(1, 1)] * 2


def test_an_interrupted_forward_frees_gathered_parameters(cluster: zs.Session) -> None:
    model, optimizer = wrapped("p_g_os")
    gatherer = optimizer.sharding.gatherer

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.module.layers[2].register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(*models.batch("mlp", 0, 8))
    hook.remove()
    step(model, optimizer, 0)
    calm, steps = wrapped("p_g_os")
    step(calm, steps, 0)
    assert_same(model.state_dict(), calm.state_dict())
    # Nothing is held for a forward that has ended.
    assert all(unit.users == 0 for unit in gatherer.units)
    # Nor does autograd go on to ask what to do with what it saves.
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_written_before_gradients_are_dropped_are_used(
    level: str, cluster: zs.Session
) -> None:
    model, optimizer, _ = sharded(level, accumulation_steps=1)
    plain = models.build("mlp")
    steps = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for net, sgd in ((model, optimizer), (plain, steps)):
        net(*models.batch("mlp", 0, 8)).backward()
        with torch.no_grad():
            net.layers[0].weight.mul_(0.5)
            net.layers[2].bias.add_(1)
        sgd.zero_grad()
        step(net, sgd, 1)
    assert_close(model.state_dict(), plain.state_dict())


def lose_a_rank(rank: int, level: str) -> str:
    """Rank 1 is lost in the second step. Returns the error on rank 0."""
    with zs.init() as session:
        model, optimizer = wrapped(level)
        step(model, optimizer, 0)
        optimizer.zero_grad()
        model(*models.batch("mlp", 1, 8)).backward()
        optimizer.sharding.gradients.send_rest()
        optimizer.sharding.job.job.flush()
        dist.barrier()
        if rank == 1:
            # Dropped without a word, as by the death of the process.
            session._connection._jobs.clear()
            optimizer.sharding.job._current.clear()
            optimizer.sharding.job.job = None
            return ""
        with pytest.raises(zs.StepAbortedError) as caught:
            optimizer.step()
        assert caught.value.step == 1  # type: ignore[attr-defined]
        return str(caught.value)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_loses_a_rank_is_aborted(level: str, processes: dict[str, str]) -> None:
    told, _ = ranks.run(2, lose_a_rank, level, env=processes)
    assert "step 1" in told and "aborted" in told


def lose_a_rank_between_buckets(rank: int) -> bool:
    """Rank 1 is lost after rank 0 has sent a part of its gradients."""
    with zs.init() as session:
        model, optimizer = wrapped("os_g")
        step(model, optimizer, 0)
        link = optimizer.sharding.job
        job, epoch = link.job, link.job.epoch
        first, second, third = list(link.trained)[:3]

        def send(entry: Any) -> None:
            job.gradient(link.version, entry.index, entry.outgoing())
            job.flush()

        send(first)
        dist.barrier()
        if rank == 1:
            session._connection._jobs.clear()
            link._current.clear()
            link.job = None
            return True
        until = time.monotonic() + 30
        while job.epoch == epoch:
            assert time.monotonic() < until
        for entry in (second, third):
            with pytest.raises(zs.StepAbortedError):
                send(entry)
        # The step is run again.
        job.forget()
        send(first)
        return True


def test_the_rest_of_a_backward_pass_is_refused_after_a_rank_was_lost(
    processes: dict[str, str],
) -> None:
    assert ranks.run(2, lose_a_rank_between_buckets, env=processes) == [True, True]
