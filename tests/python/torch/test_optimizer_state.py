# promise: no-silent-difference
"""Programs that write to ``optimizer.state``: it has the effect that it has in torch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import zeroshard as zs
from torch import Tensor
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import clip_grad_norm_, group_sharded_parallel


def some(optimizer: Any) -> list[Any]:
    return list(optimizer.param_groups[0]["params"])[:3]


def zero_in_place(optimizer: Any) -> None:
    for parameter in some(optimizer):
        optimizer.state[parameter]["exp_avg"].zero_()
        optimizer.state[parameter]["exp_avg_sq"].data.mul_(0.5)


def write_by_hand(optimizer: Any) -> None:
    optimizer.state[some(optimizer)[0]]["exp_avg"].numpy()[0] = 0.25


def assign_tensors(optimizer: Any) -> None:
    for parameter in some(optimizer):
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def assign_states(optimizer: Any) -> None:
    for parameter in some(optimizer):
        optimizer.state[parameter] = {
            **optimizer.state[parameter],
            "step": torch.tensor(1.0),
        }


def zero_steps(optimizer: Any) -> None:
    for parameter in some(optimizer):
        optimizer.state[parameter]["step"].zero_()


def pop(optimizer: Any) -> None:
    for parameter in some(optimizer):
        assert "exp_avg" in optimizer.state.pop(parameter)
        assert optimizer.state.pop(parameter, None) is None and parameter not in optimizer.state


def delete(optimizer: Any) -> None:
    del optimizer.state[some(optimizer)[1]]
    with pytest.raises(KeyError):
        del optimizer.state[some(optimizer)[1]]


def clear(optimizer: Any) -> None:
    optimizer.state.clear()
    assert not optimizer.state and len(optimizer.state) == 0


def replace(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def iterate(optimizer: Any) -> None:
    """As ReLoRA does."""
    for parameter, state in optimizer.state.items():
        assert parameter in optimizer.state
        for value in state.values():
            if torch.is_tensor(value) and value.dim():
                value.mul_(0.1)
    assert len(list(optimizer.state)) == len(optimizer.state.values()) == len(optimizer.state)


def unfreeze(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.requires_grad_(True)


def look(optimizer: Any) -> None:
    kept = copy.deepcopy(optimizer.state)
    assert {p.shape for p in kept} == {p.shape for p in optimizer.state}
    for parameter in list(optimizer.state):
        optimizer.state[parameter] = {k: v.clone() for k, v in optimizer.state[parameter].items()}
        assert optimizer.state.get(parameter) is optimizer.state.setdefault(parameter, {})


EDITS: list[Callable[[Any], None]] = [
    zero_in_place,
    write_by_hand,
    assign_tensors,
    assign_states,
    zero_steps,
    pop,
    delete,
    clear,
    replace,
    iterate,
    look,
]


def train(
    level: str | None,
    edit: Callable[[Any], None],
    share: tuple[int, int] = (0, 1),
    cls: Any = None,
    frozen: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    inner: Any = models.build("mlp")
    model = inner
    for parameter in list(inner.parameters())[6 - frozen :]:
        parameter.requires_grad_(False)
    make = cls or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    optimizer: Any = make(inner.parameters())
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(inner, optimizer, level, segment_size=SEGMENT)
    for step in range(6):
        optimizer.zero_grad()
        model(*models.share(models.batch("mlp", step, 8), *share)).backward()
        optimizer.step()
        if step == 2:
            edit(optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, optimizer.state_dict()


def assert_as_torch(found: Any, expected: Any) -> None:
    assert_close(found[0], expected[0], rtol=2e-5, atol=2e-6)
    ours, torchs = found[1]["state"], expected[1]["state"]
    assert ours.keys() == torchs.keys()
    for number, state in torchs.items():
        assert_close(dict(ours[number]), dict(state))


@pytest.mark.parametrize("edit", EDITS)
def test_writes_to_optimizer_state_are_those_of_torch(
    edit: Callable[[Any], None], cluster: zs.Session
) -> None:
    expected = train(None, edit)
    for level in LEVELS:
        assert_as_torch(train(level, edit), expected)


def test_state_without_momentum_is_empty(cluster: zs.Session) -> None:
    def check(optimizer: Any) -> None:
        assert len(optimizer.state) == 0 and not list(optimizer.state.items())
        optimizer.state.clear()

    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    assert_as_torch(train("os", check, cls=plain), train(None, check, cls=plain))


def saved_by_one_rank(edit: Callable[[Any], None], rank: int) -> Callable[[Any], None]:
    """An edit after which rank 0 alone makes a state dict."""

    def edit_and_save(optimizer: Any) -> None:
        edit(optimizer)
        if rank == 0:
            state = optimizer.state_dict()["state"]
            assert len(state) == {zero_in_place: 6, clear: 0, unfreeze: 4}[edit]
            assert edit is not zero_in_place or not state[0]["exp_avg"].any()
        dist.barrier()

    return edit_and_save


def train_on_two_ranks(rank: int) -> None:
    for edit in (zero_in_place, clear, unfreeze):
        expected = train(None, edit, frozen=2 if edit is unfreeze else 0)
        for level in LEVELS:
            found = train(
                level,
                saved_by_one_rank(edit, rank),
                (rank, 2),
                frozen=2 if edit is unfreeze else 0,
            )
            assert_as_torch(found, expected)
    assert_steps_are_those_of_torch((rank, 2))
    lookahead_as_in_torch((rank, 2))


def stepping(level: str | None, share: tuple[int, int], way: str) -> dict[str, Tensor]:
    """Three steps that are clipped or scaled. Between that and the last or the first step, the
    program edits the state of the optimizer or unfreezes parameters."""
    inner: Any = models.build("mlp")
    model, parameters = inner, list(inner.parameters())
    for parameter in parameters[4:] if "unfreeze" in way else []:
        parameter.requires_grad_(False)
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, enabled="scale" in way)
    clip: Any = torch.nn.utils.clip_grad_norm_
    if level is not None:
        clip = clip_grad_norm_
        model, optimizer, scaler = group_sharded_parallel(
            inner, optimizer, level, scaler, segment_size=SEGMENT
        )
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*models.share(models.batch("mlp", step, 8), *share))
        scaler.scale(loss).backward()
        if "scale" in way:
            scaler.unscale_(optimizer)
        if "clip" in way:
            clip(parameters, 0.05)
        if "state" in way and step == 2:
            optimizer.state[parameters[0]]["momentum_buffer"].zero_()
        if "load" in way and step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        if "unfreeze" in way and step == 0:
            unfreeze(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_steps_are_those_of_torch(share: tuple[int, int]) -> None:
    ways = ["clip state", "clip load", "scale state", "scale clip state"]
    for way in [*ways, "scale unfreeze", "scale clip unfreeze"]:
        expected = stepping(None, (0, 1), way)
        # At the other levels the servers have the gradients, and a late edit is an error.
        for level in LEVELS if way == "scale unfreeze" else ["os"]:
            found = stepping(level, share, way)
            assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_steps_after_a_late_edit_are_clipped_and_unscaled(cluster: zs.Session) -> None:
    assert_steps_are_those_of_torch((0, 1))


def test_ranks_write_to_optimizer_state(pair: ranks.Team) -> None:
    pair.run(train_on_two_ranks)


def test_writes_that_come_too_late_are_errors(cluster: zs.Session) -> None:
    inner: Any = models.build("mlp")
    model, optimizer, _ = group_sharded_parallel(
        inner, torch.optim.AdamW(inner.parameters()), "os_g", segment_size=SEGMENT
    )

    def step() -> None:
        model(*models.batch("mlp", 0, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    first = some(optimizer)[0]
    old = optimizer.state[first]
    step()
    step()
    old["exp_avg"].zero_()  # nobody can know
    assert optimizer.state[first]["exp_avg"].any()
    old = optimizer.state[first]
    step()
    old["exp_avg"].zero_()
    with pytest.raises(zs.InvalidArgumentError, match="read optimizer.state"):
        model(*models.batch("mlp", 0, 8))
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.state[first]["exp_avg"].zero_()
    with pytest.raises(zs.InvalidArgumentError, match="change it before backward"):
        optimizer.step()


def with_lookahead(level: str | None, share: tuple[int, int] = (0, 1)) -> tuple[Any, Any, Any, int]:
    """As timm's Lookahead: slow weights in the state of each parameter, from before the model is
    sharded. Returns the values, the state, the state after it was loaded and a further step, and
    the number of jobs."""
    inner: Any = models.build("mlp")
    model, optimizer = inner, torch.optim.AdamW(inner.parameters(), lr=0.05)
    parameters, jobs = list(inner.parameters()), set()

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(*models.share(models.batch("mlp", number, 8), *share)).backward()
        optimizer.step()

    inner(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()
    for parameter in parameters:
        optimizer.state[parameter]["slow"] = parameter.detach().clone()
    optimizer.state[parameters[0]]["seen"] = {"tokens": 1}
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(inner, optimizer, level, segment_size=SEGMENT)
    for number in range(5):
        step(number)
        if number in (1, 3):
            for parameter in parameters:
                slow = optimizer.state[parameter]["slow"]
                slow.add_(parameter.detach() - slow, alpha=0.5)
                parameter.data.copy_(slow)
            optimizer.state["passes"] = {"number": number}
        if number == 3:
            del optimizer.state[parameters[-1]]["slow"]
            optimizer.state[parameters[0]]["seen"] = {"tokens": 2}
        if level is not None:
            jobs.add(optimizer.sharding.job.job.name)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    assert not optimizer.state
    optimizer.load_state_dict(copy.deepcopy(state))
    step(5)
    after = optimizer.state_dict()
    assert optimizer.state.pop("passes") == {"number": 3} and "passes" not in optimizer.state
    assert optimizer.state.pop(parameters[0])["seen"] == {"tokens": 2}
    assert "seen" not in optimizer.state[parameters[0]]
    return values, state["state"], after["state"], len(jobs)


def lookahead_as_in_torch(share: tuple[int, int]) -> None:
    expected = with_lookahead(None)
    for level in LEVELS:
        found = with_lookahead(level, share)
        assert_close(found[0], expected[0], rtol=2e-5, atol=2e-6)
        for ours, torchs in zip(found[1:3], expected[1:3], strict=True):
            assert ours.keys() == torchs.keys() and ours["passes"] == torchs["passes"]
            for number, state in torchs.items():
                if number != "passes":
                    torch.testing.assert_close(ours[number], state, rtol=2e-5, atol=2e-6)
        assert found[3] == 1, "state that the servers do not hold begins no new job"


def test_state_that_the_script_adds_is_kept_beside_the_state_of_the_optimizer(
    cluster: zs.Session,
) -> None:
    lookahead_as_in_torch((0, 1))
