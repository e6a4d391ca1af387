"""Styles for modules with pairs of Linears, and for the modules between them that compute on a
sharded sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from facts import Facts
from parallel import assert_gradients, assert_trains_as, mesh_1d, part, placements
from zeroshard.torch.parallel import (
    PairwiseParallel,
    SequenceParallel,
    make_input_shard_1d,
    make_output_shard_1d,
    parallelize_module,
)

TWO, THREE = Facts(2), Facts(3)


# ---- pairs


def mlp(*sizes: int, inner: Callable[..., nn.Module] = nn.Sequential) -> nn.Module:
    """Linears of these sizes with activations in between."""
    layers: list[nn.Module] = []
    for given, made in zip(sizes, sizes[1:]):
        layers += [nn.Linear(given, made), nn.Tanh()]
    return inner(*layers)


@TWO
@THREE
def pairs_are_sharded_by_columns_and_rows(rank: int) -> None:
    by_columns = {"weight": Shard(0), "bias": Shard(0)}
    by_rows = {"weight": Shard(1), "bias": Replicate()}
    for sizes in ((4, 6, 3), (4, 7, 5, 2, 3)):
        dense = mlp(*sizes)
        module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
        linears = [child for child in module if isinstance(child, nn.Linear)]
        assert [placements(linear) for linear in linears] == [by_columns, by_rows] * (
            len(linears) // 2
        )
        assert_trains_as(module, dense, torch.randn(5, 4))


@TWO
def an_odd_last_linear_is_not_changed(rank: int) -> None:
    dense = mlp(4, 6, 5, 3)
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
    assert isinstance(module[2].weight, DTensor) and not isinstance(module[4].weight, DTensor)
    assert_trains_as(module, dense, torch.randn(5, 4))


@TWO
def children_are_searched_for_pairs(rank: int) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.alone, self.second = mlp(4, 6, 4), nn.Linear(4, 4), mlp(4, 8, 4)

        def forward(self, given: Tensor) -> Tensor:
            return self.second(self.alone(self.first(given)))

    dense = Nested()
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
    kinds = {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}
    assert kinds == {name: not name.startswith("alone") for name in kinds}
    assert_trains_as(module, dense, torch.randn(3, 4))


@TWO
def a_transformers_layer_has_a_pair(rank: int) -> None:
    dense = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
    assert placements(module.linear1)["weight"] == Shard(0) and placements(module.linear2)[
        "weight"
    ] == Shard(1)
    assert_trains_as(module, dense, torch.randn(2, 3, 8))


@TWO
def pairs_take_functions_for_their_ends(rank: int) -> None:
    dense = mlp(4, 6, 4)
    module = parallelize_module(
        copy.deepcopy(dense), mesh_1d(), PairwiseParallel(make_input_shard_1d, make_output_shard_1d)
    )
    value = torch.randn(6, 4)
    output = module(part(value, rank, 0))
    assert isinstance(output, DTensor) and output.placements == (Shard(0),)
    torch.testing.assert_close(output.full_tensor(), dense(value))


@TWO
@THREE
def sequence_parallel_pairs_have_shards_as_input_and_output(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))
    value = torch.randn(2 * mesh.size(), 4)
    weight = torch.randn(2 * mesh.size(), 4)
    module = parallelize_module(copy.deepcopy(dense), mesh, SequenceParallel())
    mine, reference = part(value, rank, 0).clone().requires_grad_(), value.clone().requires_grad_()
    output, expected = module(mine), dense(reference)
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, part(expected, rank, 0))
    (output * part(weight, rank, 0)).sum().backward()
    (expected * weight).sum().backward()
    assert_gradients(module, dense)
    torch.testing.assert_close(mine.grad, part(reference.grad, rank, 0))
    along_time = parallelize_module(
        copy.deepcopy(dense), mesh, SequenceParallel(sequence_dim=1, use_local_output=False)
    )
    value = torch.randn(3, mesh.size(), 4)
    output = along_time(part(value, rank, 1))
    assert isinstance(output, DTensor) and output.placements == (Shard(1),)
    torch.testing.assert_close(output.full_tensor(), dense(value))


# ---- sequences


class OwnNorm(nn.Module):
    """A custom norm with a buffer, whose weight is not initialised to ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, width))
        self.register_buffer("eps", torch.tensor(1e-6))

    def forward(self, value: Tensor) -> Tensor:
        return value * (value.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


@TWO
@THREE
def sequence_parallel_runs_norms_on_shards(rank: int) -> None:
    mesh = mesh_1d()
    for dense in (
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        OwnNorm(6),
        nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.0)),
    ):
        for dim, local in ((None, None), (1, True), (0, False), (-2, True)):
            module = parallelize_module(
                copy.deepcopy(dense),
                mesh,
                SequenceParallel(sequence_dim=dim, use_local_output=local),
            )
            assert set(placements(module).values()) == {Replicate()}
            along = 1 if dim is None else dim
            value = torch.randn(2 * mesh.size(), 2 * mesh.size(), 6)
            for taken in (part(value, rank, along), distribute_tensor(value, mesh, [Replicate()])):
                dense.zero_grad()
                module.zero_grad()
                output, expected = module(taken), dense(value)
                assert isinstance(output, DTensor) is not bool(local)
                if isinstance(output, DTensor):
                    assert output.placements == (Shard(along),)
                mine = output.to_local() if isinstance(output, DTensor) else output
                torch.testing.assert_close(mine, part(expected, rank, along))
                (mine**2).sum().backward()
                (expected**2).sum().backward()
                assert_gradients(module, dense)


@TWO
def sequence_parallel_of_parameters_that_differ_takes_the_first_ranks(rank: int) -> None:
    module = nn.LayerNorm(4)
    with torch.no_grad():
        module.weight.fill_(rank + 2.0)
    parallelize_module(module, mesh_1d(), SequenceParallel())
    assert torch.equal(module.weight.to_local(), torch.full((4,), 2.0))


test_on_two_ranks = TWO.test(__name__)
test_on_three_ranks = THREE.test(__name__)
