"""Styles of a single Linear or Embedding: placements, inputs, outputs, and equality with the dense
module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zeroshard as zs
from facts import Facts
from parallel import assert_gradients, assert_trains_as, mesh_1d, part, placements
from zeroshard.torch.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    make_input_replicate_1d,
    make_input_shard_1d,
    make_output_shard_1d,
    parallelize_module,
)

TWO, THREE = Facts(2), Facts(3)


@TWO
@THREE
def colwise_shards_a_linear_by_its_outputs(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Linear(4, 6)
    module = parallelize_module(copy.deepcopy(dense), mesh, ColwiseParallel())
    assert placements(module) == {"weight": Shard(0), "bias": Shard(0)}
    output = module(torch.ones(2, 5, 4))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, part(dense(torch.ones(2, 5, 4)), rank, -1))


@TWO
@THREE
def colwise_shards_an_embedding_by_its_features(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Embedding(5, 6)
    module = parallelize_module(copy.deepcopy(dense), mesh, ColwiseParallel())
    assert placements(module) == {"weight": Shard(1)}
    tokens = torch.tensor([[0, 4], [3, 3]])
    torch.testing.assert_close(module(tokens), part(dense(tokens), rank, -1))


@TWO
@THREE
def rowwise_shards_a_linear_by_its_inputs(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Linear(6, 4)
    module = parallelize_module(copy.deepcopy(dense), mesh, RowwiseParallel())
    assert placements(module) == {"weight": Shard(1), "bias": Replicate()}
    value = torch.randn(2, 5, 6)
    output = module(part(value, rank, -1))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, dense(value))


@TWO
@THREE
def rowwise_shards_an_embedding_by_its_rows(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Embedding(5, 4)
    module = parallelize_module(
        copy.deepcopy(dense), mesh, RowwiseParallel(input_layouts=Replicate())
    )
    assert placements(module) == {"weight": Shard(0)}
    tokens = torch.tensor([[0, 4, 1], [3, 3, 2]])
    torch.testing.assert_close(module(tokens), dense(tokens))
    module(tokens).sum().backward()
    dense(tokens).sum().backward()
    assert_gradients(module, dense)
    # Its plain input is a shard of the last dimension unless something else is said.
    sharded = parallelize_module(copy.deepcopy(dense), mesh, RowwiseParallel())
    wide = torch.arange(2 * mesh.size()).reshape(1, -1) % 5
    torch.testing.assert_close(sharded(part(wide, rank, -1)), dense(wide))


@TWO
@THREE
def a_rows_bias_is_added_once(rank: int) -> None:
    module = nn.Linear(6, 4)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.arange(1.0, 5.0))
    parallelize_module(module, mesh_1d(), RowwiseParallel())
    for shape in ((6,), (3, 6), (2, 3, 6)):
        output = module(part(torch.ones(shape), rank, -1))
        torch.testing.assert_close(output, torch.arange(1.0, 5.0).expand(*shape[:-1], 4))


@TWO
@THREE
def column_then_row_equals_dense_forward_and_backward(rank: int) -> None:
    """Including features that are not divisible by the ranks, and ranks with an empty part."""
    for hidden in (12, 7, 2, 1):
        for bias in (True, False):
            dense = nn.Sequential(nn.Linear(5, hidden, bias), nn.GELU(), nn.Linear(hidden, 3, bias))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            module = parallelize_module(copy.deepcopy(dense), mesh_1d(), plan)
            assert module[0].weight.to_local().shape == part(dense[0].weight, rank, 0).shape
            assert_trains_as(module, dense, torch.randn(2, 4, 5))


@TWO
@THREE
def embeddings_by_columns_then_a_linear_by_rows_equal_dense(rank: int) -> None:
    dense = nn.Sequential(nn.Embedding(9, 7), nn.Linear(7, 3))
    module = parallelize_module(
        copy.deepcopy(dense), mesh_1d(), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    tokens = torch.arange(8).reshape(2, 4)
    output, expected = module(tokens), dense(tokens)
    torch.testing.assert_close(output, expected)
    (output**2).sum().backward()
    (expected**2).sum().backward()
    assert_gradients(module, dense)


@TWO
@THREE
def layouts_of_inputs_and_outputs_are_those_given(rank: int) -> None:
    mesh, world = mesh_1d(), dist.get_world_size()
    dense = nn.Linear(6, 12)
    value = torch.randn(2 * world, 5, 6)
    whole = dense(value)
    for style in (ColwiseParallel, RowwiseParallel):
        for given in (Replicate(), Shard(0), Shard(-1)):
            for wanted in (Replicate(), Shard(0), Shard(-1)):
                for local in (True, False):
                    module = parallelize_module(
                        copy.deepcopy(dense),
                        mesh,
                        style(input_layouts=given, output_layouts=wanted, use_local_output=local),
                    )
                    mine = value if isinstance(given, Replicate) else part(value, rank, given.dim)
                    for taken in (mine, distribute_tensor(value, mesh, [Shard(0)])):
                        output = module(taken)
                        assert isinstance(output, DTensor) is not local
                        expected = (
                            whole
                            if isinstance(wanted, Replicate)
                            else part(whole, rank, wanted.dim)
                        )
                        torch.testing.assert_close(output if local else output.to_local(), expected)
                        if not local:
                            assert output.shape == whole.shape


@TWO
def parameters_become_those_of_the_first_rank_and_stay_frozen(rank: int) -> None:
    torch.manual_seed(rank)
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    mine = module.weight.detach().clone()
    first = mine.clone()
    dist.broadcast(first, 0)
    parallelize_module(module, mesh_1d(), ColwiseParallel())
    assert torch.equal(module.weight.full_tensor(), first)
    assert module.weight.requires_grad and not module.bias.requires_grad
    local = parallelize_module(nn.Linear(4, 4), mesh_1d(), ColwiseParallel(), src_data_rank=None)
    assert local.weight.to_local().shape == (2, 4)


@TWO
def tied_parameters_stay_tied(rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    dense = Tied()
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), plan)
    assert module.head.weight is module.tokens.weight and len(list(module.parameters())) == 1
    tokens = torch.tensor([1, 5, 2])
    torch.testing.assert_close(module(tokens), dense(tokens))
    (module(tokens) ** 2).sum().backward()
    (dense(tokens) ** 2).sum().backward()
    assert_gradients(module, dense)
    with pytest.raises(zs.InvalidArgumentError, match="are tied.*give them the same"):
        parallelize_module(
            Tied(), mesh_1d(), {"tokens": ColwiseParallel(), "head": ColwiseParallel()}
        )


@TWO
def functions_of_the_earlier_styles_are_used(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    plan = {
        "0": ColwiseParallel(make_input_replicate_1d, lambda output, mesh: output),
        "2": RowwiseParallel(lambda given, mesh: given, make_output_shard_1d),
    }
    module = parallelize_module(copy.deepcopy(dense), mesh, plan)
    value = torch.randn(4, 4)
    output = module(value)
    assert isinstance(output, DTensor) and output.placements == (Shard(0),)
    torch.testing.assert_close(output.full_tensor(), dense(value))


@TWO
def mismatched_sizes_are_named(rank: int) -> None:
    mesh = mesh_1d()
    row = parallelize_module(nn.Linear(7, 4), mesh, RowwiseParallel())
    with pytest.raises(
        zs.InvalidArgumentError,
        match=rf"has 5 features.*must have {4 - rank}, which is part {rank} of 7",
    ):
        row(torch.ones(2, 5))
    old = parallelize_module(nn.Linear(7, 4), mesh, RowwiseParallel(make_input_shard_1d_last))
    with pytest.raises(zs.InvalidArgumentError, match="must have 7.*same size on every rank"):
        old(torch.ones(2, 4 - rank))
    scattered = parallelize_module(nn.Linear(4, 4), mesh, RowwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(
        zs.InvalidArgumentError,
        match="dimension 0.*has 3 elements.*divisible by the 2 ranks.*use_local_output",
    ):
        scattered(torch.ones(3, 2))


def make_input_shard_1d_last(given: Tensor, mesh: Any) -> DTensor:
    """A function of somebody's own."""
    return make_input_shard_1d(given, mesh, given.dim() - 1)


test_on_two_ranks = TWO.test(__name__)
test_on_three_ranks = THREE.test(__name__)
