"""``save_group_sharded_model`` writes what torch can read, tensor by tensor, and of one version."""

from __future__ import annotations

import copy
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import zeroshard as zs
from torch import nn

from test_state_dict_options import in_place, named_states, net, step, trained, ways
from training import SEGMENT, assert_same
from zeroshard.torch import (
    _placeholders,
    _streamed_file,
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
)


def test_files_have_the_values_and_checksums_of_torch_save(
    tmp_path: Path, cluster: zs.Session
) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage)
        save_group_sharded_model(model, tmp_path, optimizer)
        for name, expected in (
            ("model.pt", model.state_dict()),
            ("optimizer.pt", optimizer.state_dict()),
        ):
            torch.save(expected, tmp_path / "expected.pt")
            with zipfile.ZipFile(tmp_path / name) as ours:
                assert ours.testzip() is None
            for options in ({}, {"mmap": True}):
                found = torch.load(tmp_path / name, weights_only=True, **options)
                theirs = torch.load(tmp_path / "expected.pt", weights_only=True)
                assert str(found) == str(theirs)
            assert getattr(found, "_metadata", None) == getattr(theirs, "_metadata", None)
        assert_same(torch.load(tmp_path / "model.pt"), model.state_dict())


def test_one_tensor_is_read_at_a_time(
    tmp_path: Path, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(in_place, 3)
    read: list[int] = []
    original = _placeholders.Placeholders.values

    def recorded(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        values = original(self, tensor)
        if values is not tensor:
            read.append(values.nbytes)
        return values

    monkeypatch.setattr(_placeholders.Placeholders, "values", recorded)
    save_group_sharded_model(model, tmp_path, optimizer)
    on_servers = [p.numel() * 4 for p in model.parameters() if p.numel() > SEGMENT]
    of_optimizer = 2 * [p.numel() * 4 for p in model.parameters()]
    assert sorted(read) == sorted([*on_servers, *of_optimizer])


def test_other_objects_in_a_state_dict_are_saved_with_the_values(
    tmp_path: Path, cluster: zs.Session
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(20, 33)

        def get_extra_state(self) -> Any:
            return {"seen": {1, 2}}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Counting()
    before = copy.deepcopy(model.state_dict())
    in_place(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    save_group_sharded_model(model, tmp_path)
    found = torch.load(tmp_path / "model.pt", weights_only=False)
    assert found["_extra_state"] == {"seen": {1, 2}}
    assert torch.equal(found["inner.weight"], before["inner.weight"])


def test_files_that_another_thread_writes_while_the_model_trains_are_of_one_version(
    tmp_path: Path, cluster: zs.Session
) -> None:
    for stage in (1, 3):
        model, optimizer = trained(in_place, stage, steps=1)
        enough, errors = threading.Event(), []
        saved: list[tuple[Any, Any]] = []

        def save() -> None:
            try:
                while len(saved) < 4:
                    save_group_sharded_model(model, tmp_path, optimizer)
                    saved.append(
                        (torch.load(tmp_path / "model.pt"), torch.load(tmp_path / "optimizer.pt"))
                    )
            except BaseException as error:
                errors.append(error)
            finally:
                enough.set()

        def look() -> tuple[Any, Any]:
            return copy.deepcopy((model.state_dict(), named_states(model, optimizer)))

        versions = {1: look()}
        thread = threading.Thread(target=save)
        thread.start()
        while not enough.is_set():
            step(model, optimizer, number := len(versions))
            versions[number + 1] = look()
        thread.join()
        assert not errors, errors
        names = [name for name, _ in model.named_parameters()]
        for state, of_optimizer in saved:
            steps = {int(one["step"]) for one in of_optimizer["state"].values()}
            assert len(steps) == 1
            expected, expected_states = versions[steps.pop()]
            for name in names:
                assert torch.equal(state[name], expected[name]), name
            for number, one in of_optimizer["state"].items():
                assert_same(one, expected_states[names[number]])


def test_a_file_without_room_for_values_is_written_at_once(
    tmp_path: Path, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(in_place, 3)
    monkeypatch.setattr(_streamed_file, "_tensors", lambda state: [None])
    save_group_sharded_model(model, tmp_path, optimizer)
    again = net(5)
    plain = torch.optim.AdamW(again.parameters(), lr=0.01)
    load_group_sharded_model(again, tmp_path, plain)
    assert_same(again.state_dict(), model.state_dict())


def test_tied_parameters_are_written_once(tmp_path: Path, cluster: zs.Session) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(20, 20, bias=False)
            self.other = nn.Linear(20, 20, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))

    model = Tied()
    before = copy.deepcopy(model.one.weight.detach())
    wrapped, _, _ = group_sharded_parallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "p_g_os", segment_size=SEGMENT
    )
    save_group_sharded_model(wrapped, tmp_path)
    found = torch.load(tmp_path / "model.pt")
    assert found["one.weight"].data_ptr() == found["other.weight"].data_ptr()
    assert torch.equal(found["one.weight"], before)
    assert (tmp_path / "model.pt").stat().st_size < 4000
