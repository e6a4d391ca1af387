"""The options of ``torch.distributed.checkpoint.state_dict``, with models and optimizers whose
state is on the servers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeroshard as zs
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from facts import Facts
from training import LEVELS, SEGMENT, assert_same
from zeroshard._session import connection
from zeroshard.torch import group_sharded_parallel, shard

FEATURES, WIDTH = 20, 33


def net(seed: int = 0) -> nn.Module:
    """A model with buffers, and with matrices whose rows two ranks cannot share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 7)
    )


def in_place(model: nn.Module, optimizer: Any, stage: int) -> tuple[Any, Any]:
    return shard(model, optimizer, stage, segment_size=SEGMENT, sync_buffers=True)


def wrapped(model: nn.Module, optimizer: Any, stage: int) -> tuple[Any, Any]:
    level = LEVELS[stage - 1]
    return group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT, sync_buffers=True)[
        :2
    ]


Way = Callable[[nn.Module, Any, int], tuple[Any, Any]]


def ways() -> Iterator[tuple[Way, int]]:
    """Each API with each stage."""
    for way in (in_place, wrapped):
        for stage in (1, 2, 3):
            yield way, stage


def step(model: Any, optimizer: Any, index: int) -> float:
    """Makes a step on the same batch on every rank. Returns the loss."""
    torch.manual_seed(1000 + index)
    optimizer.zero_grad()
    loss = model(torch.randn(8, FEATURES)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained(way: Way, stage: int, seed: int = 0, steps: int = 2) -> tuple[Any, Any]:
    model = net(seed)
    model, optimizer = way(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage)
    for index in range(steps):
        step(model, optimizer, index)
    return model, optimizer


def named_states(model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """The whole state of each parameter by its name, from plain state dicts."""
    names = [name for name, _ in model.named_parameters()]
    return {names[number]: of for number, of in optimizer.state_dict()["state"].items()}


def assert_same_states(found: Any, expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, state in found.items():
        assert_same(state, expected[name])


TWO = Facts(2)


@TWO
def a_state_dict_does_not_change_with_the_next_step(rank: int) -> None:
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        model, optimizer = trained(in_place, 3)
        state = dsd.get_state_dict(model, optimizer, options=options)
        names = dict(model.named_parameters()).keys()
        before = copy.deepcopy({name: state[0][name] for name in names}), copy.deepcopy(state[1])
        step(model, optimizer, 2)
        for name, value in before[0].items():
            assert torch.equal(_local(state[0][name]), _local(value)), name
        for name, of_one in before[1]["state"].items():
            for key, value in of_one.items():
                assert torch.equal(_local(state[1]["state"][name][key]), _local(value)), (name, key)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@TWO
def by_default_each_rank_has_its_rows_as_in_fsdp2(rank: int) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage)
        plain, states = model.state_dict(), named_states(model, optimizer)
        ours, of_optimizer = dsd.get_state_dict(model, optimizer)
        assert list(ours) == list(plain)
        for name, value in ours.items():
            if stage == 3 and name in dict(model.named_parameters()):
                assert isinstance(value, DTensor) and value.placements == (Shard(0),)
                rows = torch.chunk(plain[name], 2)[rank]
                assert torch.equal(value.to_local(), rows)
                assert value.shape == plain[name].shape and value.stride() == plain[name].stride()
            else:
                assert not isinstance(value, DTensor) and torch.equal(value, plain[name])
        assert of_optimizer["state"].keys() == states.keys()
        for name, state in of_optimizer["state"].items():
            assert not isinstance(state["step"], DTensor) and state["step"] == 2
            for key in ("exp_avg", "exp_avg_sq"):
                assert isinstance(state[key], DTensor), (name, key)
                assert torch.equal(state[key].to_local(), torch.chunk(states[name][key], 2)[rank])


@TWO
def parts_in_host_memory_are_the_same(rank: int) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage)
        options = StateDictOptions(cpu_offload=True)
        on_host = dsd.get_state_dict(model, optimizer, options=options)
        usual = dsd.get_state_dict(model, optimizer)
        for name, value in usual[0].items():
            assert type(on_host[0][name]) is type(value), name
            assert torch.equal(_local(on_host[0][name]), _local(value)), name
        for name, of_one in usual[1]["state"].items():
            for key, value in of_one.items():
                found = on_host[1]["state"][name][key]
                assert type(found) is type(value) and found.dtype == value.dtype
                assert found.shape == value.shape and found.stride() == value.stride()
                assert torch.equal(_local(found), _local(value)), (name, key)


@TWO
def full_state_dicts_are_those_of_state_dict(rank: int) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage)
        options = StateDictOptions(full_state_dict=True)
        ours, of_optimizer = dsd.get_state_dict(model, optimizer, options=options)
        assert not any(isinstance(value, DTensor) for value in ours.values())
        assert_same(ours, model.state_dict())
        assert_same_states(of_optimizer["state"], named_states(model, optimizer))


@TWO
def with_cpu_offload_only_rank_0_reads_full_state_dicts(rank: int) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage)
        plain, states = model.state_dict(), named_states(model, optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        before = connection().cluster.traffic()[0]
        ours, of_optimizer = dsd.get_state_dict(model, optimizer, options=options)
        pulled = connection().cluster.traffic()[0] - before
        if rank:
            assert not ours and not of_optimizer and pulled < 1000
        else:
            assert_same(ours, plain)
            assert_same_states(of_optimizer["state"], states)
            assert all(value.device.type == "cpu" for value in ours.values())


@TWO
def a_rank_reads_no_more_than_its_rows(rank: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(model, optimizer, 3, segment_size=SEGMENT, sync_comm=True)  # nothing is prefetched
    step(model, optimizer, 0)
    before = connection().cluster.traffic()[0]
    ours, of_optimizer = dsd.get_state_dict(model, optimizer)
    pulled = connection().cluster.traffic()[0] - before
    tensors = [*ours.values(), *(t for s in of_optimizer["state"].values() for t in s.values())]
    own = sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))
    assert 0.9 * own < pulled <= own
    assert model._zeroshard.sharding.gatherer.holdings.nbytes == 0


@TWO
def whole_values_of_rank_0_are_broadcast(rank: int) -> None:
    for way, stage in ways():
        source = trained(way, stage)
        plain, states = source[0].state_dict(), named_states(*source)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        ours, of_optimizer = dsd.get_state_dict(*source, options=whole)
        for steps in (0, 1):
            model, optimizer = trained(way, stage, seed=5, steps=steps)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            dsd.set_model_state_dict(model, dict(ours), options=options)
            dsd.set_optimizer_state_dict(model, optimizer, of_optimizer, options=options)
            assert_same(model.state_dict(), plain)
            assert_same_states(named_states(model, optimizer), states)
        assert step(model, optimizer, 7) == step(*source, 7)


@TWO
def full_state_dicts_of_every_rank_are_loaded(rank: int) -> None:
    for way, stage in ways():
        source = trained(way, stage)
        options = StateDictOptions(full_state_dict=True)
        ours, of_optimizer = dsd.get_state_dict(*source, options=options)
        model, optimizer = trained(way, stage, seed=5, steps=0)
        dsd.set_state_dict(
            model,
            optimizer,
            model_state_dict=ours,
            optim_state_dict=of_optimizer,
            options=options,
        )
        assert_same(model.state_dict(), source[0].state_dict())
        assert_same_states(named_states(model, optimizer), named_states(*source))
        assert step(model, optimizer, 7) == step(*source, 7)


@TWO
def sharded_state_dicts_are_loaded(rank: int) -> None:
    for way, stage in ways():
        for flat in (False, True):
            source = trained(way, stage)
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            ours, of_optimizer = dsd.get_state_dict(*source, options=options)
            model, optimizer = trained(way, stage, seed=5, steps=0)
            result = dsd.set_state_dict(
                model,
                optimizer,
                model_state_dict=ours,
                optim_state_dict=of_optimizer,
                options=options,
            )
            assert not result.missing_keys and not result.unexpected_keys
            assert_same(model.state_dict(), source[0].state_dict())
            assert_same_states(named_states(model, optimizer), named_states(*source))
            assert step(model, optimizer, 7) == step(*source, 7)


@TWO
def loading_gathers_no_parameter(rank: int) -> None:
    source, _ = trained(in_place, 3)
    plain = source.state_dict()
    model, _ = trained(in_place, 3, seed=5, steps=0)
    holdings = model._zeroshard.sharding.gatherer.holdings
    holdings.peak_nbytes = 0
    model.load_state_dict(plain)
    assert holdings.peak_nbytes == holdings.nbytes == 0
    dsd.set_model_state_dict(model, dsd.get_model_state_dict(source))
    assert holdings.peak_nbytes == 0
    assert_same(model.state_dict(), plain)


@TWO
def a_broadcast_leaves_each_rank_its_rows(rank: int) -> None:
    for way in (in_place, wrapped):
        source, _ = trained(way, 3)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = dsd.get_model_state_dict(source, options=options)
        expected = source.state_dict()
        model, _ = trained(way, 3, seed=5, steps=0)
        given: dict[str, Any] = {}
        original = model.load_state_dict

        def recorded(state_dict: dict[str, Any], **others: Any) -> Any:
            given.update(state_dict)
            return original(state_dict, **others)

        model.__dict__["load_state_dict"] = recorded
        for offload in (False, True):
            given.clear()
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload
            )
            dsd.set_model_state_dict(model, dict(whole), options=options)
            assert given.keys() == expected.keys()
            for name in ("0.weight", "3.weight"):
                assert given[name].to_local().shape == torch.chunk(expected[name], 2)[rank].shape
            assert_same(model.state_dict(), expected)
        if rank == 0:
            del whole["3.weight"]
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with pytest.raises(RuntimeError, match="Missing key.*3.weight"):
            dsd.set_model_state_dict(model, dict(whole), options=options)


@TWO
def a_module_around_a_sharded_one_is_saved_and_loaded(rank: int) -> None:
    for way in (in_place, wrapped):
        source, _ = trained(way, 3)
        model, optimizer = trained(way, 3, seed=5, steps=0)
        state = dsd.get_model_state_dict(nn.ModuleDict({"inner": source}))
        assert all(isinstance(state[f"inner.{n}"], DTensor) for n, _ in source.named_parameters())
        dsd.set_model_state_dict(nn.ModuleDict({"inner": model}), state)
        step(model, optimizer, 7)
        again, its = trained(way, 3, seed=5, steps=0)
        again.load_state_dict(source.state_dict())
        step(again, its, 7)
        assert_same(model.state_dict(), again.state_dict())


@TWO
def a_module_that_reads_what_it_loads_reads_the_new_values(rank: int) -> None:
    source, _ = trained(in_place, 3)
    model, _ = trained(in_place, 3, seed=5, steps=0)
    seen = []

    def look(module: nn.Module, keys: Any) -> None:
        seen.append(module.get_parameter("weight").detach().clone())

    model[0].register_load_state_dict_post_hook(look)
    model.load_state_dict(source.state_dict())
    assert torch.equal(seen[0], source.state_dict()["0.weight"])
    assert_same(model.state_dict(), source.state_dict())


@TWO
def keys_that_are_missing_are_an_error_only_if_strict(rank: int) -> None:
    for way in (in_place, wrapped):
        model, _ = trained(way, 3, steps=0)
        ours = dsd.get_model_state_dict(model)
        before = model.state_dict()
        del ours["3.weight"]
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(ours)
        loose = StateDictOptions(strict=False)
        result = dsd.set_model_state_dict(model, ours, options=loose)
        assert result.missing_keys == ["3.weight"]
        assert_same(model.state_dict(), before)
        ours["0.weight"] = torch.zeros(2, 2)
        with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
            model.load_state_dict(ours, strict=False)


@TWO
def frozen_parameters_can_be_left_out(rank: int) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    in_place(model, optimizer, 3)
    step(model, optimizer, 0)
    kept = dsd.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert "0.weight" not in kept and isinstance(kept["3.weight"], DTensor)
    everything = dsd.get_model_state_dict(model)
    assert isinstance(everything["0.weight"], DTensor)
    assert torch.equal(everything["0.weight"].full_tensor(), model.state_dict()["0.weight"])


@TWO
def an_optimizer_without_state_makes_no_step_to_get_some(rank: int) -> None:
    for way, stage in ways():
        model, optimizer = trained(way, stage, steps=0)
        sharding = model._zeroshard.sharding
        states = dsd.get_optimizer_state_dict(model, optimizer)["state"]
        assert sharding.job.version == 0 and not optimizer.state
        assert all(parameter.grad is None for parameter in model.parameters())
        assert states.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert states[name]["step"] == 0
            assert states[name]["exp_avg"].shape == parameter.shape
            assert not states[name]["exp_avg"].full_tensor().any()


@TWO
def what_the_script_has_written_is_in_the_state_dicts(rank: int) -> None:
    model, optimizer = trained(in_place, 3)
    with torch.no_grad():
        model[3].weight.fill_(0.5)
    optimizer.state[model[0].weight]["exp_avg"].fill_(0.25)
    ours, of_optimizer = dsd.get_state_dict(model, optimizer)
    assert bool((ours["3.weight"].to_local() == 0.5).all())
    assert bool((of_optimizer["state"]["0.weight"]["exp_avg"].to_local() == 0.25).all())
    step(model, optimizer, 2)


@TWO
def tensors_lie_on_the_mesh_that_shard_was_given(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shard(model, optimizer, 3, mesh, segment_size=SEGMENT)
    step(model, optimizer, 0)
    ours, of_optimizer = dsd.get_state_dict(model, optimizer)
    assert ours["0.weight"].device_mesh is mesh
    momentum = of_optimizer["state"]["0.weight"]["momentum_buffer"]
    assert momentum.device_mesh is mesh and of_optimizer["state"]["0.weight"].keys() == {
        "momentum_buffer"
    }


@TWO
def small_tensors_of_adafactor_are_whole_on_each_rank(rank: int) -> None:
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    in_place(model, optimizer, 3)
    step(model, optimizer, 0)
    expected = named_states(model, optimizer)
    state = dsd.get_optimizer_state_dict(model, optimizer)
    of_weight = state["state"]["0.weight"]
    assert of_weight["row_var"].shape == (WIDTH, 1) and of_weight["col_var"].shape == (1, FEATURES)
    assert_same(of_weight, expected["0.weight"])
    other = net(5)
    again = torch.optim.Adafactor(other.parameters(), lr=0.01)
    in_place(other, again, 3)
    dsd.set_optimizer_state_dict(other, again, state)
    assert_same_states(named_states(other, again), expected)


@TWO
def another_thread_is_refused(rank: int) -> None:
    model, optimizer = trained(in_place, 3)
    errors: list[Exception] = []

    def read() -> None:
        for call in (
            lambda: dsd.get_model_state_dict(model),
            lambda: dsd.get_optimizer_state_dict(model, optimizer),
        ):
            try:
                call()
            except zs.InvalidArgumentError as error:
                errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert len(errors) == 2 and all("between two steps" in str(error) for error in errors)


test_on_two_ranks = TWO.test(__name__)


def test_without_a_process_group_an_error_says_what_to_do(cluster: zs.Session) -> None:
    assert not dist.is_initialized()
    model, optimizer = trained(in_place, 3)
    for call in (
        lambda: dsd.get_model_state_dict(model),
        lambda: dsd.get_optimizer_state_dict(model, optimizer),
    ):
        with pytest.raises(zs.NotInitialisedError, match="full_state_dict=True"):
            call()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_a_process_group_whole_state_dicts_are_saved_and_loaded(
    stage: int, cluster: zs.Session
) -> None:
    for way in (in_place, wrapped):
        source = trained(way, stage)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        ours, of_optimizer = dsd.get_state_dict(*source, options=options)
        assert_same(ours, source[0].state_dict())
        model, optimizer = trained(way, stage, seed=5, steps=0)
        dsd.set_state_dict(
            model, optimizer, model_state_dict=ours, optim_state_dict=of_optimizer, options=options
        )
        assert_same(model.state_dict(), source[0].state_dict())
        assert_same_states(named_states(model, optimizer), named_states(*source))
