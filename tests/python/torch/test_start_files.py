"""Trainings that start from files which plain torch has written: ``torch.save`` and
``torch.distributed.checkpoint``. Safetensors are
tested in ``frameworks/test_checkpoint.py``."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zeroshard as zs
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd

import models
from facts import Facts
from training import LEVELS, SEGMENT, assert_same, worst
from zeroshard.torch import DataParallel, _weight_files, group_sharded_parallel, load_weights

#: Steps before the files are written, and after.
BEFORE, AFTER = 3, 3
BATCH = 8
#: The largest relative difference of a loss to that of plain torch, whose AdamW rounds differently.
TOLERANCE = 1e-5

# ---- plain torch


def step(model: Any, optimizer: Any, index: int, rank: int = 0, world: int = 1) -> float:
    optimizer.zero_grad()
    loss = model(*models.share(models.batch("gpt", index, BATCH), rank, world))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def fresh(seed: int = 1) -> tuple[Any, Any]:
    """A model with tied parameters and its optimizer, with other values than those of the files."""
    torch.manual_seed(seed)
    model = models.GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Files:
    """Files of a training with plain torch, and the losses that it has after them."""

    def __init__(self, folder: Path, write: bool) -> None:
        self.folder = folder
        model, optimizer = fresh(0)
        for index in range(BEFORE):
            step(model, optimizer, index)
        self.state = copy.deepcopy(model.state_dict())
        self.optimizer_state = copy.deepcopy(optimizer.state_dict())
        if write:
            states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            torch.save(states["model"], folder / "model.pt")
            torch.save(states["optim"], folder / "optimizer.pt")
            torch.save({"epoch": 1, **states}, folder / "both.pt")
            dcp.save(states, checkpoint_id=folder / "dcp", no_dist=True)
            dcp.save(states["model"], checkpoint_id=folder / "flat", no_dist=True)
            ours, of_optimizer = dsd.get_state_dict(model, optimizer)
            named = {"model": ours, "optim": of_optimizer}
            dcp.save(named, checkpoint_id=folder / "named", no_dist=True)
            dcp.save({"app": named}, checkpoint_id=folder / "app", no_dist=True)
        self.losses = [step(model, optimizer, BEFORE + index) for index in range(AFTER)]

    def load(self, name: str) -> Any:
        return torch.load(self.folder / name, mmap=True, weights_only=True)


#: What ``load_weights`` accepts.
WEIGHTS = ("model.pt", "both.pt", "dcp", "flat", "named", "app")


@functools.cache
def files() -> Files:
    """The files that rank 0 has written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder: list[Any] = [None]
    if rank == 0:
        kept.append(tempfile.TemporaryDirectory())
        folder = [kept[0].name]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    made = Files(Path(folder[0]), write=rank == 0)
    if dist.is_initialized():
        dist.barrier()
    return made


kept: list[Any] = []


def shard(model: Any, optimizer: Any, level: str, **options: Any) -> tuple[Any, Any]:
    options = {"segment_size": SEGMENT, **options}
    return group_sharded_parallel(model, optimizer, level, **options)[:2]


def assert_continues(model: Any, optimizer: Any, rank: int = 0, world: int = 1) -> None:
    """Asserts that a training has the losses of plain torch after the files."""
    losses = [step(model, optimizer, BEFORE + index, rank, world) for index in range(AFTER)]
    if world > 1:
        mean = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(mean)
        losses = (mean / world).tolist()
    assert worst(losses, files().losses) <= TOLERANCE, (losses, files().losses)


def fill(module: Any) -> None:
    """Values for what is not loaded."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.ones_(tensor)


# ---- two ranks

TWO = Facts(2)


@TWO
def state_dicts_may_be_loaded_before_the_model_is_sharded(rank: int) -> None:
    for level in LEVELS:
        model, optimizer = fresh()
        model.load_state_dict(files().load("model.pt"))
        optimizer.load_state_dict(files().load("optimizer.pt"))
        assert_continues(*shard(model, optimizer, level), rank, 2)


@TWO
def state_dicts_may_be_loaded_after_the_model_is_sharded(rank: int) -> None:
    for level in LEVELS:
        model, optimizer = shard(*fresh(rank), level)
        model.load_state_dict(files().load("model.pt"))
        optimizer.load_state_dict(files().load("optimizer.pt"))
        assert_same(model.state_dict(), files().state)
        assert_continues(model, optimizer, rank, 2)


@TWO
def a_distributed_checkpoint_is_loaded_into_state_dicts(rank: int) -> None:
    for level in LEVELS:
        model, optimizer = shard(*fresh(), level)
        # As in torch, an optimizer has state to be loaded after its first step.
        step(model, optimizer, 0, rank, 2)
        states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(states, checkpoint_id=files().folder / "dcp")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optim"])
        assert_continues(model, optimizer, rank, 2)


@TWO
def a_distributed_checkpoint_is_loaded_with_set_state_dict(rank: int) -> None:
    for level in LEVELS:
        for sharded_first in (True, False):
            model, optimizer = fresh()
            if sharded_first:
                model, optimizer = shard(model, optimizer, level)
            ours, of_optimizer = dsd.get_state_dict(model, optimizer)
            states = {"model": ours, "optim": of_optimizer}
            dcp.load(states, checkpoint_id=files().folder / "named")
            dsd.set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optim"],
            )
            if not sharded_first:
                model, optimizer = shard(model, optimizer, level)
            assert_continues(model, optimizer, rank, 2)


@TWO
def options_of_set_state_dict_have_their_effect(rank: int) -> None:
    plain, plain_optimizer = fresh()
    plain.load_state_dict(files().state)
    plain_optimizer.load_state_dict(files().optimizer_state)
    for options in (
        dsd.StateDictOptions(full_state_dict=True),
        dsd.StateDictOptions(flatten_optimizer_state_dict=True),
    ):
        saved = dsd.get_state_dict(plain, plain_optimizer, options=options)
        model, optimizer = shard(*fresh(), "p_g_os")
        dsd.set_state_dict(
            model,
            optimizer,
            model_state_dict=copy.deepcopy(saved[0]),
            optim_state_dict=copy.deepcopy(saved[1]),
            options=options,
        )
        whole = dataclasses.replace(options, full_state_dict=True)
        found = dsd.get_state_dict(model, optimizer, options=whole)
        assert_same(found[0], saved[0])
        assert_equal(found[1], saved[1])
        assert_continues(model, optimizer, rank, 2)


def assert_equal(found: Any, expected: Any) -> None:
    """Compares nested state dicts."""
    if isinstance(expected, dict):
        assert found.keys() >= expected.keys(), expected.keys() - found.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):  # torch makes lists of tuples
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected, (found, expected)


@TWO
def weights_of_each_format_are_loaded_before_and_after_sharding(rank: int) -> None:
    for number, name in enumerate(WEIGHTS):
        path = files().folder / name
        for level in LEVELS[number % 3 :] if number else LEVELS:
            before, optimizer = fresh(rank)
            assert load_weights(before, path) == ([], [])
            model, optimizer = shard(before, optimizer, level)
            assert_same(model.state_dict(), files().state)
            after, optimizer = shard(*fresh(rank), level)
            assert load_weights(after, path) == ([], [])
            assert_same(after.state_dict(), files().state)
            optimizer.load_state_dict(files().load("optimizer.pt"))
            assert_continues(after, optimizer, rank, 2)


@TWO
def models_on_the_meta_device_take_the_weights_before_and_after_sharding(rank: int) -> None:
    for level in LEVELS:
        for name in ("model.pt", "named"):
            for early in (True, False):
                with torch.device("meta"):
                    model, optimizer = fresh()
                if early:
                    load_weights(model, files().folder / name)
                model, optimizer = shard(model, optimizer, level, param_init_fn=fill)
                if not early:
                    load_weights(model, files().folder / name)
                assert_same(model.state_dict(), files().state)
                assert model.module.head.weight is model.module.tokens.weight
                optimizer.load_state_dict(files().load("optimizer.pt"))
                assert_continues(model, optimizer, rank, 2)


@TWO
def rank_0_reads_the_values_of_a_sharded_model(rank: int) -> None:
    reads = []
    original = _weight_files._Saved.read
    try:
        setattr(_weight_files._Saved, "read", lambda *args: (reads.append(args), original(*args)))
        for level in LEVELS:
            load_weights(shard(*fresh(), level)[0], files().folder / "model.pt")
    finally:
        setattr(_weight_files._Saved, "read", original)
    assert bool(reads) == (rank == 0)


@TWO
def an_error_of_rank_0_while_it_reads_is_an_error_on_all_ranks(rank: int) -> None:
    def fail(*args: Any) -> None:
        raise OSError("on purpose")

    original = _weight_files._Saved.read
    model, _ = shard(*fresh(), "p_g_os")
    try:
        setattr(_weight_files._Saved, "read", fail)
        with pytest.raises(OSError if rank == 0 else zs.JobFailedError, match="on purpose"):
            load_weights(model, files().folder / "model.pt")
    finally:
        setattr(_weight_files._Saved, "read", original)


@TWO
def data_parallel_starts_from_the_same_files(rank: int) -> None:
    losses = []
    for number, name in enumerate(("", "model.pt", "dcp")):
        model, optimizer = fresh()
        if number == 0:
            model.load_state_dict(files().load("model.pt"))
        wrapped = DataParallel(model)
        if number > 0:
            load_weights(wrapped, files().folder / name)
        optimizer.load_state_dict(files().load("optimizer.pt"))
        assert_same(wrapped.state_dict(), files().state)
        assert_continues(wrapped, optimizer, rank, 2)
        losses.append(wrapped.state_dict())
    assert_same(losses[0], losses[1])
    assert_same(losses[0], losses[2])


test_on_two_ranks = TWO.test(__name__)

# ---- one rank


@pytest.mark.parametrize("level", LEVELS)
def test_get_state_dict_between_steps_does_not_change_the_training(
    cluster: zs.Session, level: str
) -> None:
    def train(looks: bool) -> str:
        model, optimizer = shard(*fresh(), level)
        for index in range(BEFORE):
            if looks and index:
                whole = dsd.StateDictOptions(full_state_dict=True)
                state, of_optimizer = dsd.get_state_dict(model, optimizer, options=whole)
                assert list(state) == list(models.GPT().state_dict())
                assert all(name in state for name in of_optimizer["state"])
                assert {float(one["step"]) for one in of_optimizer["state"].values()} == {index}
            step(model, optimizer, index)
        found: str = optimizer.state_hash()
        return found

    assert train(looks=True) == train(looks=False)


def test_the_state_of_a_parameter_is_that_of_the_servers(cluster: zs.Session) -> None:
    model, optimizer = shard(*fresh(), "p_g_os")
    assert not optimizer.state and optimizer.state[model.positions] == {}
    step(model, optimizer, 0)
    assert optimizer.state
    expected = optimizer.state_dict()["state"]
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        assert_equal(optimizer.state[parameter], expected[number])


def test_names_of_parameters_and_buffers_are_the_keys_of_the_state_dict(
    cluster: zs.Session,
) -> None:
    model, _ = wrapped(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    assert sorted(names) == sorted(model.state_dict())


def wrapped(model: nn.Module, level: str = "p_g_os") -> tuple[Any, Any]:
    return shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), level, segment_size=4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizer_state_stays_when_weights_are_loaded(cluster: zs.Session, level: str) -> None:
    def train(load: Callable[[Any], Any]) -> str:
        model, optimizer = shard(*fresh(), level)
        step(model, optimizer, 0)
        load(model)
        step(model, optimizer, 1)
        found: str = optimizer.state_hash()
        return found

    path = files().folder / "model.pt"
    expected = train(lambda model: model.load_state_dict(files().load("model.pt")))
    assert train(lambda model: load_weights(model, path)) == expected


def test_other_dtypes_and_buffers_and_frozen_parameters_are_as_load_state_dict_has_them(
    cluster: zs.Session, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        model[0].weight.requires_grad_(False)
        return model.to(torch.bfloat16)

    saved = make().to(torch.float64)
    saved(torch.rand(4, 6, dtype=torch.float64))
    state = saved.state_dict()
    torch.save(state, tmp_path / "model.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = make()
    expected.load_state_dict(state)
    for name in ("model.pt", "dcp"):
        for level in LEVELS:
            model, _ = wrapped(make(), level)
            load_weights(model, tmp_path / name)
            assert_same(model.state_dict(), expected.state_dict())


def test_at_most_one_parameter_is_held(cluster: zs.Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        expected = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(20)))
        torch.save(expected.state_dict(), path)
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(20)))
        model, _ = wrapped(module)
        sharding, most = model.sharding, []
        original = _weight_files._Saved.read

        def read(checkpoint: Any, name: str, target: Tensor) -> None:
            most.append(sharding.gatherer.holdings.nbytes)
            original(checkpoint, name, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_weight_files._Saved, "read", read)
            load_weights(model, path)
        # Beside the tensor that is read, the units that are fetched ahead of the next pass.
        assert len(most) == 20 and max(most) <= 2 * 32 * 32 * 4
        assert_same(model.state_dict(), expected.state_dict())


def test_a_module_of_a_model_is_loaded_by_itself(cluster: zs.Session, tmp_path: Path) -> None:
    inner = nn.Linear(5, 5)
    torch.save(inner.state_dict(), tmp_path / "inner.pt")
    for early in (True, False):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        if early:
            load_weights(model[1], tmp_path / "inner.pt")
        sharded, _ = wrapped(model)
        if not early:
            load_weights(model[1], tmp_path / "inner.pt")
        found = sharded.state_dict()
        assert torch.equal(found["1.weight"], inner.weight)
        assert not torch.equal(found["0.weight"], inner.weight)


@pytest.mark.parametrize("sharded", [False, True])
def test_keys_and_shapes_of_another_model_are_an_error_that_changes_nothing(
    cluster: zs.Session, tmp_path: Path, sharded: bool
) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = model.state_dict()
    state["2.bias"] = state.pop("1.bias")
    state["0.bias"] = torch.ones(4)
    path = tmp_path / "model.pt"
    torch.save(state, path)
    before = copy.deepcopy(model.state_dict())
    if sharded:
        model, _ = wrapped(model)
    for what in (
        r'Missing key\(s\) in state_dict: "1.bias"',
        r'Unexpected key\(s\) in state_dict: "2.bias"',
        r"size mismatch for 0.bias: .*torch.Size\(\[4\]\) from checkpoint.*torch.Size\(\[3\]\)",
    ):
        with pytest.raises(zs.InvalidArgumentError, match=what):
            load_weights(model, path)
    with pytest.raises(zs.InvalidArgumentError, match="size mismatch"):
        load_weights(model, path, strict=False)
    assert_same(model.state_dict(), before)
    del state["0.bias"]
    state["1.weight"] = torch.full((3, 3), 5.0)
    torch.save(state, path)
    found = load_weights(model, path, strict=False)
    assert found == (["0.bias", "1.bias"], ["2.bias"])
    assert torch.equal(model.state_dict()["1.weight"], state["1.weight"])
    assert torch.equal(model.state_dict()["0.bias"], before["0.bias"])


class Renaming(nn.Linear):
    """Loads its state in a way of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        raise AssertionError("not called")


def test_what_cannot_be_loaded_is_an_error(cluster: zs.Session, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "text").write_text("text")
    torch.save([model.weight], tmp_path / "list")
    torch.save(model.state_dict(), tmp_path / "old", _use_new_zipfile_serialization=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ".metadata").write_text("text")
    for name, message in {
        "nothing": "does not exist; it must be a directory",
        "": "has neither model.safetensors nor model.safetensors.index.json nor .metadata",
        "text": "cannot open the checkpoint .*text",
        "list": "contains a list; it must contain a state dict",
        "old": "cannot open the checkpoint .*mmap",
        "broken": "cannot open the checkpoint .*torch.distributed.checkpoint.save",
    }.items():
        with pytest.raises(zs.InvalidArgumentError, match=message):
            load_weights(model, tmp_path / name)
    path = files().folder / "model.pt"
    with pytest.raises(zs.InvalidArgumentError, match=r"module '0' \(Renaming\).*load_state_dict"):
        load_weights(nn.Sequential(Renaming(2, 2)), path)
    sharded, optimizer = shard(*fresh(), "p_g_os", accumulation_steps=1)
    sharded(*models.batch("gpt", 0, 4)).backward()
    with pytest.raises(zs.InvalidArgumentError, match="weights are loaded between backward and"):
        load_weights(sharded, path)
    optimizer.zero_grad()
    load_weights(sharded, path)
    assert_same(sharded.state_dict(), files().state)
