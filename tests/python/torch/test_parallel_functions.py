"""The input and output functions, with plain tensors, DTensors and invalid values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zeroshard as zs
from facts import Facts
from parallel import mesh_1d, part
from zeroshard.torch import ProcessMesh
from zeroshard.torch.parallel import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_output_replicate_1d,
    make_output_reshard_tensor,
    make_output_shard_1d,
    make_output_tensor,
    make_sharded_output_tensor,
)

TWO, THREE = Facts(2), Facts(3)

INPUTS: list[Callable[..., Any]] = [
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_input_reshard_replicate,
    make_input_replicate_1d,
]
OUTPUTS: list[Callable[..., Any]] = [
    make_output_shard_1d,
    make_output_replicate_1d,
    make_output_tensor,
    make_sharded_output_tensor,
    make_output_reshard_tensor,
]


def whole(*shape: int) -> Tensor:
    """A tensor with the same values on every rank."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@TWO
@THREE
def a_plain_input_is_this_ranks_shard(rank: int) -> None:
    mesh, world = mesh_1d(), dist.get_world_size()
    mine = torch.full((2, 5), float(rank))
    for dim in (0, 1, -1):
        made = make_input_shard_1d(mine, mesh, dim)
        size = [2, 5]
        size[dim] *= world
        assert made.shape == torch.Size(size) and made.placements == (Shard(dim % 2),)
        assert made.to_local().data_ptr() == mine.data_ptr(), "data moved"
        assert torch.equal(
            made.full_tensor(), torch.cat([torch.full((2, 5), float(r)) for r in range(world)], dim)
        )
    assert make_input_shard_1d(mine, mesh).placements == (Shard(0),)
    last = make_input_shard_1d_last_dim(torch.ones(2, 3, 4), mesh)
    assert last.placements == (Shard(2),) and last.shape == (2, 3, 4 * world)


@TWO
@THREE
def a_dtensor_input_is_redistributed(rank: int) -> None:
    mesh = mesh_1d()
    value = whole(6, 7)
    for placement in (Replicate(), Shard(0), Shard(1)):
        given = distribute_tensor(value, mesh, [placement])
        for made, dim in (
            (make_input_shard_1d(given), 0),
            (make_input_shard_1d(given, mesh, 1), 1),
            (make_input_shard_1d_last_dim(given, mesh), 1),
        ):
            assert made.placements == (Shard(dim),) and torch.equal(
                made.to_local(), part(value, rank, dim)
            )
        for made in (make_input_replicate_1d(given, mesh), make_input_reshard_replicate(given)):
            assert made.placements == (Replicate(),) and torch.equal(made.to_local(), value)


@TWO
@THREE
def a_plain_input_is_gathered_by_reshard_and_taken_by_replicate(rank: int) -> None:
    mesh, world = mesh_1d(), dist.get_world_size()
    mine = torch.full((2, 3), float(rank))
    gathered = make_input_reshard_replicate(mine, mesh)
    assert gathered.placements == (Replicate(),) and gathered.shape == (2 * world, 3)
    assert torch.equal(
        gathered.to_local(), torch.arange(world).float().repeat_interleave(2)[:, None].expand(-1, 3)
    )
    replicated = make_input_replicate_1d(whole(2, 3), mesh)
    assert replicated.shape == (2, 3) and torch.equal(replicated.to_local(), whole(2, 3))


@TWO
@THREE
def outputs_of_every_placement_are_converted(rank: int) -> None:
    mesh, world = mesh_1d(), dist.get_world_size()
    value = whole(6, 7)
    sums = DTensor.from_local(value / world, mesh, [Partial()], run_check=False)
    for given in (
        distribute_tensor(value, mesh, [Shard(0)]),
        distribute_tensor(value, mesh, [Shard(1)]),
        sums,
    ):
        for dim in (0, 1):
            sharded = make_output_shard_1d(given, mesh, dim)
            assert sharded.placements == (Shard(dim),)
            torch.testing.assert_close(sharded.to_local(), part(value, rank, dim))
        assert make_output_shard_1d(given).placements == (Shard(0),)
        replicated = make_output_replicate_1d(given)
        assert replicated.placements == (Replicate(),)
        torch.testing.assert_close(replicated.to_local(), value)
        plain = make_output_tensor(given, mesh)
        assert not isinstance(plain, DTensor)
        torch.testing.assert_close(plain, value)
        scattered = make_output_reshard_tensor(given, mesh)
        assert not isinstance(scattered, DTensor)
        torch.testing.assert_close(scattered, part(value, rank, 0))
        shard = make_sharded_output_tensor(given)
        assert not isinstance(shard, DTensor) and torch.equal(shard, given.to_local())


@TWO
@THREE
def uneven_and_empty_shards_survive_a_round_trip(rank: int) -> None:
    mesh = mesh_1d()
    for rows in (7, 1, 0):
        value = whole(rows, 3)
        sharded = make_input_shard_1d(make_input_replicate_1d(value, mesh))
        assert torch.equal(sharded.to_local(), part(value, rank, 0))
        assert torch.equal(make_output_tensor(sharded), value)
        assert torch.equal(make_output_tensor(make_output_shard_1d(sharded, dim=1)), value)
        assert torch.equal(make_sharded_output_tensor(sharded), part(value, rank, 0))
        for named in ({"_device_mesh": mesh}, {"device_mesh": mesh}):
            assert torch.equal(make_sharded_output_tensor(sharded, **named), part(value, rank, 0))


@TWO
@THREE
def gradients_flow_through_inputs_and_outputs(rank: int) -> None:
    mesh, world = mesh_1d(), dist.get_world_size()
    mine = torch.full((2, 3), float(rank), requires_grad=True)
    weight = whole(2 * world, 3)
    (make_output_tensor(make_input_shard_1d(mine, mesh)) * weight).sum().backward()
    assert mine.grad is not None and torch.equal(mine.grad, part(weight, rank, 0))


@TWO
def shards_that_become_plain_tensors_must_have_the_same_size(rank: int) -> None:
    value = distribute_tensor(whole(7, 2), mesh_1d(), [Replicate()])
    with pytest.raises(zs.InvalidArgumentError, match="divisible by the 2 ranks"):
        make_output_reshard_tensor(value)


@TWO
def a_hooks_tuple_of_one_tensor_is_that_tensor(rank: int) -> None:
    mesh = mesh_1d()
    made = make_input_replicate_1d((whole(2, 3),), mesh)
    assert torch.equal(make_output_tensor([made], mesh), whole(2, 3))


@TWO
def another_type_than_a_tensor_is_refused(rank: int) -> None:
    mesh = mesh_1d()
    for function in INPUTS:
        for wrong in (3, None, "x", [1.0, 2.0], (torch.ones(2), torch.ones(2))):
            with pytest.raises(RuntimeError, match="must be a torch.Tensor or a DTensor"):
                function(wrong, mesh)
    for function in OUTPUTS:
        for wrong in (3, None, torch.ones(2, 2)):
            with pytest.raises(RuntimeError, match="must be a DTensor"):
                function(wrong, mesh)


@TWO
def meshes_have_one_dimension(rank: int) -> None:
    mesh = ProcessMesh([[0, 1]], ["dp", "tp"])
    on_it = distribute_tensor(whole(2, 2), mesh, [Replicate(), Shard(0)])
    for function in INPUTS + OUTPUTS:
        for arguments in (
            (on_it, mesh),
            (on_it,),
            *([(whole(2, 2), mesh)] if function in INPUTS else []),
        ):
            with pytest.raises(
                zs.InvalidArgumentError, match=r"2 dimensions \(dp, tp\).*must have 1.*'tp'"
            ):
                function(*arguments)


@TWO
def a_mesh_must_be_a_mesh_and_the_one_of_the_dtensor(rank: int) -> None:
    mesh, other = mesh_1d(), ProcessMesh([1, 0], ["tp"])
    made = make_input_replicate_1d(whole(2, 2), mesh)
    for function in INPUTS:
        with pytest.raises(zs.InvalidArgumentError, match="device_mesh is None"):
            function(whole(2, 2))
        with pytest.raises(zs.InvalidArgumentError, match="device_mesh is a list"):
            function(whole(2, 2), [0, 1])
    for function in INPUTS + OUTPUTS:
        with pytest.raises(zs.InvalidArgumentError, match=r"\[0, 1\].*must be on \[1, 0\]"):
            function(made, other)


@TWO
def a_missing_dimension_is_named(rank: int) -> None:
    mesh = mesh_1d()
    for dim in (2, -3):
        with pytest.raises(zs.InvalidArgumentError, match=rf"dimension {dim}.*2 dimensions"):
            make_input_shard_1d(whole(2, 2), mesh, dim)
        with pytest.raises(zs.InvalidArgumentError, match=rf"dimension {dim}.*2 dimensions"):
            make_output_shard_1d(make_input_replicate_1d(whole(2, 2), mesh), dim=dim)


test_on_two_ranks = TWO.test(__name__)
test_on_three_ranks = THREE.test(__name__)
