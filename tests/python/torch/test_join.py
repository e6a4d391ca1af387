# promise: no-silent-hang
"""Ranks with different numbers of batches under ``join``, compared with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close, assert_same
from zeroshard.torch import DataParallel, group_sharded_parallel, join

SYSTEMS = ("ddp", "DataParallel", *LEVELS)
#: The systems that have the gradients of a batch as soon as its backward pass has ended.
REPLICATED = ("ddp", "DataParallel")


@dataclass(frozen=True)
class Case:
    """A training with a different number of batches on each rank."""

    #: The number of batches of each rank in each epoch.
    epochs: tuple[tuple[int, ...], ...] = ((5, 3),)
    model: str = "mlp"
    #: Backward passes for each step; "no_sync" announces that one is not the last.
    micro: int = 1
    no_sync: bool = False
    max_norm: float | None = None
    max_value: float | None = None
    #: How the program clips by value: "edit" changes gradients in place, "read" replaces them after
    #: it has read them, and "replace" without reading the gradient of the parameter.
    clips: str = "edit"
    scaled: bool = False
    divide_by_initial_world_size: bool = True
    sync_buffers: bool = False


CASES = {
    "rank 0 has more": Case(),
    "rank 1 has more, in two epochs": Case(epochs=((2, 4), (3, 1))),
    "none": Case(epochs=((0, 2), (2, 2))),
    "divided by the active ranks": Case(divide_by_initial_world_size=False, max_norm=0.5),
    "accumulation": Case(epochs=((6, 4), (4, 4)), micro=2),
    "accumulation without sync": Case(epochs=((6, 3), (4, 4)), micro=2, no_sync=True),
    "clipped by norm, scaled": Case(epochs=((5, 3), (2, 2)), max_norm=0.5, scaled=True),
    "clipped by value": Case(max_value=0.01),
    "replaced gradients": Case(max_value=0.01, clips="read", epochs=((0, 1), (4, 2))),
    "replaced gradients, scaled": Case(max_value=0.01, clips="read", scaled=True),
    "gradients replaced before they are read": Case(max_value=0.01, clips="replace"),
    "clipped by value, divided by the active ranks": Case(
        max_value=0.01, divide_by_initial_world_size=False
    ),
    "shared buffers": Case(epochs=((5, 3), (3, 2)), model="cnn", sync_buffers=True),
    "own buffers": Case(epochs=((2, 4),), model="cnn"),
    "tied": Case(model="gpt", epochs=((3, 2), (1, 2))),
}


def build(case: Case, system: str) -> tuple[Any, Any, Any]:
    model = models.build(case.model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler: Any = torch.amp.GradScaler(
        "cpu", init_scale=256.0, growth_interval=2, enabled=case.scaled
    )
    if system == "ddp":
        shared = DistributedDataParallel(model, broadcast_buffers=case.sync_buffers)
        return shared, optimizer, scaler
    if system == "DataParallel":
        return DataParallel(model), optimizer, scaler
    return group_sharded_parallel(
        model, optimizer, system, scaler, segment_size=SEGMENT, sync_buffers=case.sync_buffers
    )


def clip_by_value(case: Case, parameters: list[nn.Parameter]) -> None:
    limit = case.max_value
    assert limit is not None
    if case.clips == "edit":
        nn.utils.clip_grad_value_(parameters, limit)
        return
    for parameter in parameters:
        if parameter.grad is not None and case.clips == "read":
            parameter.grad = parameter.grad.clone().clamp(-limit, limit)
        elif parameter.grad is not None:
            parameter.grad = torch.full_like(parameter.detach(), limit)


def train_epoch(
    case: Case, rank: int, first: int, count: int, built: tuple[Any, Any, Any]
) -> list[float]:
    """Trains with ``count`` batches. Returns their losses."""
    model, optimizer, scaler = built
    losses = []
    for index in range(count):
        data = models.share(models.batch(case.model, first + index, 8), rank, 2)
        last = (index + 1) % case.micro == 0
        # Without no_sync, DistributedDataParallel averages a gradient once for each pass that
        # follows, over zeros of the ranks that have ended.
        quiet = not last and (
            case.no_sync or isinstance(model, (DistributedDataParallel, DataParallel))
        )
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = model(*data)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if not last:
            continue
        parameters = list(model.parameters())
        if case.max_norm is not None or case.max_value is not None:
            scaler.unscale_(optimizer)
        if case.max_norm is not None:
            losses.append(float(nn.utils.clip_grad_norm_(parameters, case.max_norm)))
        if case.max_value is not None:
            clip_by_value(case, parameters)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def train(case: Case, system: str, rank: int) -> tuple[list[float], dict[str, Tensor], str]:
    """The losses of this rank, the final state and its hash on the servers."""
    built = build(case, system)
    model, optimizer, scaler = built
    losses, first = [], 0
    for counts in case.epochs:
        options = {"divide_by_initial_world_size": case.divide_by_initial_world_size}
        with model.join(**options) if system == "ddp" else join(model, **options):
            losses += train_epoch(case, rank, first, counts[rank], built)
        if counts is case.epochs[-1]:
            break
        if system in REPLICATED:
            # Each rank has its own optimizer, and only the parameters are made equal.
            optimizer.state.clear()
            if scaler.is_enabled():
                states: list[Any] = [None, None]
                dist.all_gather_object(states, scaler.state_dict())
                scaler.load_state_dict(states[0])
        else:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        optimizer.zero_grad()
        first += max(counts)
    bare = model.module if system == "ddp" else model
    state = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    return losses, state, "" if system in REPLICATED else optimizer.state_hash()


def train_all(rank: int, name: str) -> None:
    """Trains with every system, and compares them."""
    case = CASES[name]
    with zs.init():
        losses, state, _ = train(case, "ddp", rank)
        hashes, parameters = [], dict(models.build(case.model).named_parameters())
        for system in SYSTEMS[1:]:
            ours, found, hash = train(case, system, rank)
            assert len(ours) == len(losses), system
            for one, other in zip(ours, losses, strict=True):
                assert math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6), (system, ours, losses)
            if case.sync_buffers:
                # Under join, DistributedDataParallel shares those of the highest rank, not rank 0.
                ours_only = {key for key in found if key not in parameters}
                shared = found
            else:
                ours_only = set()
                shared = {key: value for key, value in found.items() if key in parameters}
            if not (case.sync_buffers and system == "DataParallel"):
                states: list[Mapping[str, Tensor]] = [{}, {}]
                dist.all_gather_object(states, shared)
                assert_same(states[0], states[1])
            assert_close(
                {key: value for key, value in found.items() if key not in ours_only},
                {key: value for key, value in state.items() if key not in ours_only},
                rtol=1e-6,
                atol=1e-6,
            )
            if system in LEVELS:
                hashes.append(hash)
                if system == "os":
                    reference = found
                assert_same(found, reference)
        assert len(set(hashes)) == 1, hashes


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_ddp_and_the_same_at_every_level(name: str, pair: ranks.Team) -> None:
    pair.run(train_all, name)


def ends(rank: int, system: str) -> None:
    """Errors of this rank while the other one waits, and of the other one."""
    with zs.init():
        case = Case()
        # Without join: the other rank makes a further step.
        model, optimizer, _ = built = build(case, system)
        train_epoch(case, rank, 0, 2 + rank, built) if rank == 0 else None
        if rank == 1:
            with pytest.raises((zs.RankLeftError, zs.StepAbortedError), match="rank 0 .*left"):
                train_epoch(case, rank, 0, 3, built)
        else:
            leave(model)
        dist.barrier()
        # Rank 1 waits in join when rank 0 raises an error and leaves.
        model, optimizer, _ = built = build(case, system)
        if rank == 0:
            with pytest.raises(ZeroDivisionError), join(model):
                train_epoch(case, rank, 0, 2, built)
                raise ZeroDivisionError
            leave(model)
        else:
            with pytest.raises(zs.RankLeftError, match="rank 0"), join(model):
                train_epoch(case, rank, 0, 1, built)
        dist.barrier()
        # Every rank gets an error when one has no more batches, also if another waits for a norm.
        for clipped in (case, Case(max_norm=0.5)):
            built = build(clipped, system)
            with pytest.raises(zs.DisagreementError, match="rank [01] and rank [01] disagree"):
                with join(built[0], throw_on_early_termination=True):
                    train_epoch(clipped, rank, 0, 2 + rank, built)
            dist.barrier()
        built = build(case, system)
        dist.barrier()
        built = build(case, system)
        with join(built[0], throw_on_early_termination=True):
            train_epoch(case, rank, 0, 2, built)
        train_epoch(case, rank, 0, 2, built)
        with join(built[0], enable=False):
            train_epoch(case, rank, 0, 1, built)


def leave(model: Any) -> None:
    """Leaves the job of a model, as at the end of a program, before any rank does more."""
    leaves: Any = model._reducer.averager if isinstance(model, DataParallel) else model.sharding.job
    leaves.retire()
    for leaving in leaves.connection._leaving:
        leaving.wait()


@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_ranks_that_end_without_join_or_with_an_error_are_named_at_once(system: str) -> None:
    ranks.run(2, ends, system, timeout=60)


def trains_two_models(rank: int) -> None:
    """Two models, which are trained in turns, with different numbers of batches."""
    with zs.init():
        case = Case()
        first, second = build(case, "os_g"), build(case, "p_g_os")
        with join([first[0], second[0]]):
            for index in range(2 + rank):
                for built in (first, second):
                    train_epoch(case, rank, index, 1, built)
        assert_same(first[0].state_dict(), second[0].state_dict())
        # What cannot be done while a rank waits: a change of what is trained.
        model, optimizer, _ = first
        if rank == 0:
            with pytest.raises((zs.RankLeftError, zs.StepAbortedError)), join(model):
                pass
        else:
            with pytest.raises(zs.InvalidArgumentError, match="while rank 0 has no more batches"):
                with join(model):
                    train_epoch(case, rank, 0, 1, first)
                    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
                    train_epoch(case, rank, 0, 1, first)
            leave(model)
        dist.barrier()
        with pytest.raises(zs.InvalidArgumentError, match="at least one"), join([]):
            pass
        with join([second[0], second[0]]):
            pass
        with pytest.raises(zs.InvalidArgumentError, match="throw_on_early_termination"):
            with join([first[0], second[0]], throw_on_early_termination=True):
                pass
        with pytest.raises(zs.InvalidTypeError, match="Linear"), join(nn.Linear(1, 1)):  # type: ignore[arg-type]
            pass


def test_several_models_are_joined_together() -> None:
    ranks.run(2, trains_two_models, timeout=60)


def changes_between_and_in_loops(rank: int, system: str) -> None:
    """What the program may change between two loops, and what it may not change in one."""
    with zs.init():
        case = Case()
        model, optimizer, _ = built = build(case, system)
        first, last = model.module.layers[0], model.module.layers[-1]
        with join(model):
            train_epoch(case, rank, 0, 2 - rank, built)
        # Rank 1 rested in the last step of rank 0. That is over.
        first.weight.requires_grad_(False)
        with join(model):
            train_epoch(case, rank, 2, 1 + rank, built)
            # A parameter that is not trained, as a moving average of others.
            if system != "p_g_os":
                with torch.no_grad():
                    first.weight.fill_(rank)
            if rank == 1:
                # What the last rank writes after its last step becomes part of the next one.
                with torch.no_grad():
                    last.bias.fill_(7.0)
        state: list[Any] = [None, None]
        dist.all_gather_object(state, [first.weight.detach(), last.bias.detach()])
        assert torch.equal(state[0][1], state[1][1]) and bool((last.bias == 7.0).all())
        if system != "p_g_os":
            assert bool((state[0][0] == 1.0).all()) and bool((state[1][0] == 1.0).all())
        train_epoch(case, rank, 4, 1, built)
        # Ranks that write the same values after the same steps agree.
        with join(model):
            train_epoch(case, rank, 5, 1, built)
            for parameter in () if isinstance(model, DataParallel) else model.module.parameters():
                with model.summon_full_params(), torch.no_grad():
                    parameter.clamp_(-0.5, 0.5)
        train_epoch(case, rank, 5, 1, built)
        # A loop does not end between a backward pass and the step.
        if isinstance(model, DataParallel):
            return
        batch = models.share(models.batch(case.model, 5, 8), rank, 2)
        with pytest.raises(zs.InvalidArgumentError, match="before it ends"), join(model):
            model(*batch).backward()
        model.zero_grad()
        # After an error, the model is trained as before the loop.
        with pytest.raises(ZeroDivisionError), join(model, divide_by_initial_world_size=False):
            train_epoch(case, rank, 5, 1, built)
            raise ZeroDivisionError
        assert not model.sharding._step.excludes_resting
        first.weight.requires_grad_(True)
        train_epoch(case, rank, 6, 1, built)
        if rank == 0:
            return writes_are_refused(model, built, case)
        with pytest.raises(zs.InvalidArgumentError, match=r"wrote to tensor.*rank 0.*no more"):
            with join(model):
                train_epoch(case, rank, 7, 1, built)
                with model.summon_full_params(), torch.no_grad():
                    last.weight.mul_(2.0)
                train_epoch(case, rank, 8, 1, built)
        leave(model)


def writes_are_refused(model: Any, built: tuple[Any, Any, Any], case: Case) -> None:
    """Rank 0 rests while rank 1 writes to a parameter, which it cannot send."""
    with pytest.raises((zs.RankLeftError, zs.StepAbortedError), match="rank 1"), join(model):
        train_epoch(case, 0, 7, 1, built)


@pytest.mark.parametrize("system", SYSTEMS[1:])
def test_changes_of_the_model_between_loops_count_and_others_are_errors(system: str) -> None:
    ranks.run(2, changes_between_and_in_loops, system, timeout=60)


def is_interrupted(rank: int, system: str) -> None:
    """Ctrl-C while rank 1 waits: it does not take part in steps that it knows nothing about."""
    with zs.init():
        case = Case()
        model, _, _ = built = build(case, system)
        if rank == 0:
            with pytest.raises((zs.RankLeftError, zs.StepAbortedError), match="rank 1"):
                with join(model):
                    train_epoch(case, rank, 0, 3, built)
                    dist.barrier()
                    dist.barrier()
                    train_epoch(case, rank, 3, 1, built)
            return
        with pytest.raises(KeyboardInterrupt), join(model):
            train_epoch(case, rank, 0, 1, built)
            interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
            interrupt.start()
        dist.barrier()
        for _ in range(2):
            with pytest.raises(zs.InvalidArgumentError, match="rank 1 .* has rested since step 1"):
                train_epoch(case, rank, 1, 1, built)
        leave(model)
        dist.barrier()


@pytest.mark.parametrize("system", ["DataParallel", "os", "p_g_os"])
def test_an_interrupted_wait_does_not_mix_steps(system: str) -> None:
    ranks.run(2, is_interrupted, system, timeout=60)


class Branches(nn.Module):
    """Two layers, of which a forward may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        loss = self.first(inputs).sum()
        return loss + self.second(inputs).sum() if both else loss


def leaves_parameters_unused(rank: int) -> None:
    """Rank 2 leaves parameters unused while rank 0 waits."""
    with zs.init():
        model = DataParallel(Branches())
        inputs = torch.ones(2, 4)
        with join(model):
            model(inputs, True).backward()
            model.zero_grad()
            if rank > 0:
                with pytest.raises(zs.UnusedParameterError, match="none on rank 2"):
                    model(inputs, rank == 1).backward()


def test_a_rank_that_waits_does_not_hide_unused_parameters_of_another() -> None:
    ranks.run(3, leaves_parameters_unused, timeout=60)


def trains_three_ranks(rank: int) -> tuple[str, int]:
    """Three ranks end at different times, with buffers and edited gradients."""
    with zs.init():
        case = Case(max_value=0.01, sync_buffers=True, model="cnn")
        model, optimizer, _ = build(case, "os_g")
        for counts in ((4, 1, 2), (1, 3, 2)):
            with join(model):
                for index in range(counts[rank]):
                    optimizer.zero_grad()
                    model(*models.share(models.batch(case.model, index, 9), rank, 3)).backward()
                    nn.utils.clip_grad_value_(model.parameters(), 0.01)
                    optimizer.step()
        return optimizer.state_hash(), model.sharding.job.version


def test_three_ranks_end_at_different_times() -> None:
    found = ranks.run(3, trains_three_ranks, timeout=60)
    assert len(set(found)) == 1 and found[0][1] == 4 + 3
