"""Parameters that servers on this host show in the memory of their tensors, without a copy."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ranks
import zeroshard as zs
from zeroshard._core import writes
from zeroshard._core.sharded_models import find
from zeroshard.torch import group_sharded_parallel
from zeroshard.torch._panes import pane_of


@pytest.fixture
def session(processes: dict[str, str]) -> Iterator[None]:
    zs.shutdown()
    with zs.init(processes["ZEROSHARD_ADDRESS"], transport="shm"):
        yield


class Run:
    """A model and its steps, with ZeroShard or without."""

    def __init__(self, level: str | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 300))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.steps = 0
        if level is not None:
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.model, self.optimizer, level, segment_size=1000
            )

    def step(self) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.model(torch.full((2, 300), float(self.steps))).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """The parameters that are large enough to be shown."""
        return [parameter for parameter in self.parameters if parameter.dim() == 2]

    def shown(self) -> list[bool]:
        panes = [pane_of(parameter) for parameter in self.weights()]
        return [pane is not None and pane.shown for pane in panes]


@pytest.mark.parametrize("level", ["os", "os_g"])
def test_parameters_are_shown_at_the_address_that_they_keep(level: str, session: None) -> None:
    run = Run(level)
    addresses = [parameter.data_ptr() for parameter in run.parameters]
    views = [parameter.detach() for parameter in run.parameters]
    for _ in range(4):
        run.step()
        assert run.shown() == [True, True]
        assert [parameter.data_ptr() for parameter in run.parameters] == addresses
        assert all(map(torch.equal, views, run.parameters))


def test_gathered_parameters_are_shown(session: None) -> None:
    run, alone = Run("p_g_os"), Run(None)
    for _ in range(3):
        run.step()
        alone.step()
        weight = run.weights()[0]
        assert torch.allclose(weight, alone.weights()[0], atol=1e-5)
        pane = pane_of(weight.detach())
        assert pane is not None and pane.shown


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_values_that_the_program_writes_become_part_of_the_next_step(
    level: str, session: None
) -> None:
    run, alone = Run(level), Run(None)
    for number in range(4):
        for one in (run, alone):
            one.step()
            with torch.no_grad():
                one.weights()[number % 2][3, number] = 0.5  # one page
                one.weights()[1].mul_(1.0)  # every page, and no value
            one.step()
    for value, expected in zip(
        run.model.state_dict().values(), alone.model.state_dict().values(), strict=True
    ):
        assert torch.allclose(value, expected, atol=1e-5)


def test_a_write_to_a_view_is_found(session: None) -> None:
    run, alone = Run("os"), Run(None)
    for one in (run, alone):
        view = one.weights()[0].detach().view(-1)
        one.step()
        view[7:9].numpy()[:] = 0.25
        one.step()
    assert torch.allclose(run.weights()[0], alone.weights()[0], atol=1e-5)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_forked_child_keeps_the_values_of_the_fork(level: str, session: None) -> None:
    run = Run(level)
    run.step()
    weight = run.weights()[0].detach() if level == "p_g_os" else run.weights()[0]
    expected = weight.clone()
    to_child, from_parent = os.pipe()[::-1]
    child = os.fork()
    if child == 0:
        os.read(from_parent, 1)  # after the steps of the parent
        os._exit(0 if torch.equal(weight, expected) else 1)
    for _ in range(3):
        run.step()
    os.write(to_child, b"x")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    if level == "os":
        assert run.shown() == [True, True], "the parent continues as before"
        assert not torch.equal(weight, expected)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_values_stay_after_the_session(level: str, processes: dict[str, str]) -> None:
    zs.shutdown()
    with zs.init(processes["ZEROSHARD_ADDRESS"], transport="shm"):
        run = Run(level)
        run.step()
        run.step()
        expected = {name: value.clone() for name, value in run.model.state_dict().items()}
        kept = run.weights()[0].detach()
    assert torch.equal(kept, expected["0.weight"])
    if level == "os":
        assert run.shown() == [False, False], "the memory is the program's"
        found = run.model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_copy_of_a_model_has_its_own_values(session: None) -> None:
    run = Run("os")
    run.step()
    copied = copy.deepcopy(run.weights())
    stored = io.BytesIO()
    torch.save(run.model.state_dict(), stored)
    expected = [weight.detach().clone() for weight in run.weights()]
    run.step()
    stored.seek(0)
    loaded = torch.load(stored)
    for before, again, weight in zip(copied, (loaded["0.weight"], loaded["2.weight"]), expected):
        assert torch.equal(before, weight) and torch.equal(again, weight)


def test_memory_that_something_else_uses_stays_where_it_is(session: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    array = model.weight.detach().numpy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()
    assert pane_of(model.weight) is None
    assert torch.equal(torch.from_numpy(array), model.weight)


def test_memory_that_belongs_to_something_else_is_not_replaced(session: None) -> None:
    array = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    model = nn.Linear(300, 200)
    model.weight = nn.Parameter(torch.from_numpy(array))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()
    assert np.array_equal(array, model.weight.detach().numpy())


def written(run: Run) -> list[str]:
    """The parameters that count as written by the program."""
    sharding = find(run.parameters)
    assert sharding is not None
    return [entry.name for entry in writes.written(sharding.job)]


def test_values_that_change_their_memory_are_not_written_by_the_program(session: None) -> None:
    run = Run("os")
    run.step()
    weight = run.weights()[0]
    child = os.fork()  # makes them memory of the process
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert run.shown() == [False, False] and written(run) == []
    value = weight[0, 0].item()
    weight.data[0, 0] = value + 1
    assert written(run) == ["0.weight"]
    weight.data[0, 0] = value
    assert written(run) == []
    run.step()
    shown = weight.data
    for data in (shown.clone(), shown, torch.zeros_like(shown), shown.clone()):
        weight.data = data
        assert written(run) == ([] if torch.equal(weight, shown) else ["0.weight"])
    shown[0, 0] = 7  # nobody sees it any more
    assert written(run) == ["0.weight"], "the values of the servers are not known here any more"


def test_a_parameter_whose_memory_the_program_has_replaced_is_copied(session: None) -> None:
    run, alone = Run("os"), Run(None)
    for one in (run, alone):
        one.step()
        weight = one.weights()[0]
        weight.data = weight.detach().clone()
        one.step()
        one.step()
    assert run.shown() == [False, True]
    assert torch.allclose(run.weights()[0], alone.weights()[0], atol=1e-5)


def test_what_servers_show_takes_no_memory_of_the_worker(processes: dict[str, str]) -> None:
    zs.shutdown()
    for transport in ("shm", "grpc"):
        with zs.init(processes["ZEROSHARD_ADDRESS"], transport=transport):
            run = Run("p_g_os")
            run.step()
            run.step()
            gathered = zs.report(run.model).peak_gathered_bytes
            assert gathered == (0 if transport == "shm" else 2 * 4 * 300 * 200)


def train_beside_a_fork(rank: int, forks: bool) -> str:
    """Trains, and forks on rank 0 between the steps."""
    run = Run("os")
    for _ in range(3):
        run.step()
        if forks and rank == 0:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    return str(run.optimizer.state_hash())


def test_a_fork_on_one_rank_changes_nothing(processes: dict[str, str]) -> None:
    found = [ranks.run(2, train_beside_a_fork, forks, env=processes) for forks in (True, False)]
    assert len({value for values in found for value in values}) == 1
