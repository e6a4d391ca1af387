"""Parallel styles: what they cut, what goes in and out, and that a parallel module computes what the dense one does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import zeroshard as zs
from facts import Facts, Outcomes
from zeroshard.torch import ProcessMesh
from zeroshard.torch.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    make_input_replicate_1d,
    make_input_shard_1d,
    make_output_shard_1d,
    make_output_tensor,
    parallelize_module,
)

TWO, THREE = Facts(2), Facts(3)


def mesh_1d() -> ProcessMesh:
    """All ranks in a row."""
    return ProcessMesh(list(range(dist.get_world_size())), ["tp"])


def part(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """A rank's part, as torch.chunk cuts; empty where there is none for it."""
    parts = tensor.chunk(dist.get_world_size(), dim)
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def placements(module: nn.Module) -> dict[str, Placement]:
    """Of the parameters, by name."""
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        (found[name],) = parameter.placements
    return found


def assert_gradients(parallel: nn.Module, dense: nn.Module) -> None:
    """The gradients of all parameters are the dense module's."""
    own = dict(parallel.named_parameters())
    assert own.keys() == dict(dense.named_parameters()).keys()
    for name, parameter in dense.named_parameters():
        grad = own[name].grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, parameter.grad, msg=lambda text: f"{name}: {text}")


def assert_trains_as(parallel: nn.Module, dense: nn.Module, given: Tensor, taken: Tensor | None = None) -> None:
    """Same output, same gradients of parameters and input; ``taken`` is the parallel module's input, if another."""
    ours = (given if taken is None else taken).clone().requires_grad_()
    reference = given.clone().requires_grad_()
    output, expected = parallel(ours), dense(reference)
    torch.testing.assert_close(output, expected)
    weight = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_gradients(parallel, dense)
    torch.testing.assert_close(ours.grad, reference.grad)


# ---- Linear and Embedding


@TWO
@THREE
def colwise_cuts_a_linear_by_its_outputs(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Linear(4, 6)
    module = parallelize_module(copy.deepcopy(dense), mesh, ColwiseParallel())
    assert placements(module) == {"weight": Shard(0), "bias": Shard(0)}
    output = module(torch.ones(2, 5, 4))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, part(dense(torch.ones(2, 5, 4)), rank, -1))


@TWO
@THREE
def colwise_cuts_an_embedding_by_its_features(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Embedding(5, 6)
    module = parallelize_module(copy.deepcopy(dense), mesh, ColwiseParallel())
    assert placements(module) == {"weight": Shard(1)}
    tokens = torch.tensor([[0, 4], [3, 3]])
    torch.testing.assert_close(module(tokens), part(dense(tokens), rank, -1))


@TWO
@THREE
def rowwise_cuts_a_linear_by_its_inputs(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Linear(6, 4)
    module = parallelize_module(copy.deepcopy(dense), mesh, RowwiseParallel())
    assert placements(module) == {"weight": Shard(1), "bias": Replicate()}
    value = torch.randn(2, 5, 6)
    output = module(part(value, rank, -1))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, dense(value))


@TWO
@THREE
def rowwise_cuts_an_embedding_by_its_rows(rank: int) -> None:
    mesh, dense = mesh_1d(), nn.Embedding(5, 4)
    module = parallelize_module(copy.deepcopy(dense), mesh, RowwiseParallel(input_layouts=Replicate()))
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
    """Also where features do not divide by the ranks, and where a rank has none."""
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
                        expected = whole if isinstance(wanted, Replicate) else part(whole, rank, wanted.dim)
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
def tied_parameters_stay_one(rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    dense = Tied()
    plan = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), plan)
    assert module.head.weight is module.tokens.weight and len(list(module.parameters())) == 1
    tokens = torch.tensor([1, 5, 2])
    torch.testing.assert_close(module(tokens), dense(tokens))
    (module(tokens) ** 2).sum().backward()
    (dense(tokens) ** 2).sum().backward()
    assert_gradients(module, dense)
    with pytest.raises(zs.InvalidArgument, match="are one.*must get the same"):
        parallelize_module(Tied(), mesh_1d(), {"tokens": ColwiseParallel(), "head": ColwiseParallel()})


@TWO
def first_styles_functions_are_used(rank: int) -> None:
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
def sizes_that_do_not_fit_are_named(rank: int) -> None:
    mesh = mesh_1d()
    row = parallelize_module(nn.Linear(7, 4), mesh, RowwiseParallel())
    with pytest.raises(zs.InvalidArgument, match=rf"has 5 features.*must have {4 - rank}: part {rank} of 7"):
        row(torch.ones(2, 5))
    old = parallelize_module(nn.Linear(7, 4), mesh, RowwiseParallel(make_input_shard_1d_last))
    with pytest.raises(zs.InvalidArgument, match="must have 7.*same size on every rank"):
        old(torch.ones(2, 4 - rank))
    scattered = parallelize_module(nn.Linear(4, 4), mesh, RowwiseParallel(output_layouts=Shard(0)))
    with pytest.raises(zs.InvalidArgument, match="dimension 0.*has 3 elements.*divide by the 2 ranks.*use_local_output"):
        scattered(torch.ones(3, 2))


def make_input_shard_1d_last(given: Tensor, mesh: Any) -> DTensor:
    """A function of somebody's own."""
    return make_input_shard_1d(given, mesh, given.dim() - 1)


# ---- pairs


def mlp(*sizes: int, inner: Callable[..., nn.Module] = nn.Sequential) -> nn.Module:
    """Linears of these sizes, and something between them."""
    layers: list[nn.Module] = []
    for given, made in zip(sizes, sizes[1:]):
        layers += [nn.Linear(given, made), nn.Tanh()]
    return inner(*layers)


@TWO
@THREE
def pairs_are_cut_by_columns_and_rows(rank: int) -> None:
    by_columns = {"weight": Shard(0), "bias": Shard(0)}
    by_rows = {"weight": Shard(1), "bias": Replicate()}
    for sizes in ((4, 6, 3), (4, 7, 5, 2, 3)):
        dense = mlp(*sizes)
        module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
        linears = [child for child in module if isinstance(child, nn.Linear)]
        assert [placements(linear) for linear in linears] == [by_columns, by_rows] * (len(linears) // 2)
        assert_trains_as(module, dense, torch.randn(5, 4))


@TWO
def a_linear_that_is_left_over_is_left_alone(rank: int) -> None:
    dense = mlp(4, 6, 5, 3)
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), PairwiseParallel())
    assert isinstance(module[2].weight, DTensor) and not isinstance(module[4].weight, DTensor)
    assert_trains_as(module, dense, torch.randn(5, 4))


@TWO
def pairs_are_looked_for_in_children_where_there_are_fewer_than_two(rank: int) -> None:
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
    assert placements(module.linear1)["weight"] == Shard(0) and placements(module.linear2)["weight"] == Shard(1)
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
def sequence_parallel_pairs_take_and_give_shards(rank: int) -> None:
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
    along_time = parallelize_module(copy.deepcopy(dense), mesh, SequenceParallel(sequence_dim=1, use_local_output=False))
    value = torch.randn(3, mesh.size(), 4)
    output = along_time(part(value, rank, 1))
    assert isinstance(output, DTensor) and output.placements == (Shard(1),)
    torch.testing.assert_close(output.full_tensor(), dense(value))


# ---- sequences


class OwnNorm(nn.Module):
    """A norm of somebody's own, not initialised to ones, with a buffer."""

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
    for dense in (nn.LayerNorm(6), nn.RMSNorm(6), OwnNorm(6), nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.0))):
        for dim, local in ((None, None), (1, True), (0, False), (-2, True)):
            module = parallelize_module(
                copy.deepcopy(dense), mesh, SequenceParallel(sequence_dim=dim, use_local_output=local)
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


# ---- what goes in and out of any module


class Two(nn.Module):
    """Takes two tensors, one by keyword and something else; gives two."""

    def forward(self, a: Any, b: Any, flag: bool, *, c: Any = None) -> Any:
        self.seen = (a, b, flag, c)
        return a, b


@TWO
def inputs_are_laid_out_as_given(rank: int) -> None:
    mesh = mesh_1d()
    module = parallelize_module(
        Two(),
        mesh,
        PrepareModuleInput(
            input_layouts=(Shard(0), Replicate(), None),
            desired_input_layouts=(Replicate(), Shard(1), None),
            input_kwarg_layouts={"c": Shard(0)},
            desired_input_kwarg_layouts={"c": Shard(0)},
        ),
    )
    module(torch.full((1, 4), float(rank)), torch.ones(2, 4), True, c=torch.ones(3))
    a, b, flag, c = module.seen
    assert a.placements == (Replicate(),) and a.shape == (2, 4) and a.to_local()[:, 0].tolist() == [0.0, 1.0]
    assert b.placements == (Shard(1),) and b.to_local().shape == (2, 2)
    assert flag is True and c.placements == (Shard(0),) and c.shape == (6,)
    local = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        ),
    )
    output = local(torch.full((1, 4), float(rank)))
    assert not isinstance(output, DTensor) and output[:, 0].tolist() == [0.0, 1.0]


@TWO
def outputs_are_laid_out_as_given(rank: int) -> None:
    mesh = mesh_1d()
    for local in (True, False):
        module = parallelize_module(
            nn.Identity(),
            mesh,
            PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(0), use_local_output=local),
        )
        output = module(torch.arange(4.0))
        assert isinstance(output, DTensor) is not local
        mine = output.to_local() if isinstance(output, DTensor) else output
        assert torch.equal(mine, part(2 * torch.arange(4.0), rank, 0))
    pair = parallelize_module(
        Two(),
        mesh,
        PrepareModuleOutput(output_layouts=(Replicate(), None), desired_output_layouts=(Shard(0), None)),
    )
    first, second = pair(torch.arange(4.0), "left alone", True)
    assert torch.equal(first, part(torch.arange(4.0), rank, 0)) and second == "left alone"


@TWO
def inputs_and_outputs_are_laid_out_by_one_style(rank: int) -> None:
    module = parallelize_module(
        nn.Linear(4, 4, bias=False),
        mesh_1d(),
        PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
            use_local_output=False,
        ),
    )
    output = module(torch.full((1, 4), float(rank)))
    assert isinstance(output, DTensor) and output.placements == (Shard(0),) and output.shape == (2, 4)
    torch.testing.assert_close(output.to_local()[0], module.weight.sum(1) * rank)


@TWO
def layouts_that_are_fewer_than_tensors_are_refused(rank: int) -> None:
    mesh = mesh_1d()
    with pytest.raises(ValueError, match="input_layouts.*2 and 1"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(ValueError, match="input_layouts.*1 and None"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(ValueError, match="same keys"):
        PrepareModuleInput(input_kwarg_layouts={"a": Shard(0)})
    with pytest.raises(ValueError, match="output_layouts.*1 and 2"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(0)))
    module = parallelize_module(
        nn.Identity(), mesh, PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None))
    )
    with pytest.raises(ValueError, match="given 1 inputs.*has 2"):
        module(torch.ones(2))
    module = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Shard(0), None)),
    )
    with pytest.raises(ValueError, match="has 1 outputs.*has 2"):
        module(torch.ones(2))
    module = parallelize_module(
        nn.Identity(), mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
    )
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        module("x")


@TWO
def styles_of_ones_own_give_two_functions(rank: int) -> None:
    class Gathered(ParallelStyle):
        def __init__(self) -> None:
            super().__init__(make_input_shard_1d, make_output_tensor)

    dense = nn.Linear(4, 3)
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), Gathered())
    assert set(placements(module).values()) == {Replicate()}
    value = torch.randn(4, 4)
    torch.testing.assert_close(module(part(value, rank, 0)), dense(value))


@TWO
def styles_of_torch_itself_are_taken(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

    dense = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), {"0": TorchColwise(), "1": RowwiseParallel()})
    torch.testing.assert_close(module(torch.ones(2, 4)), dense(torch.ones(2, 4)))


# ---- the loss


@TWO
@THREE
def a_parallel_loss_is_the_dense_one(rank: int) -> None:
    mesh = mesh_1d()
    for classes in (12, 7):
        logits, targets = torch.randn(5, classes), torch.randint(classes, (5,))
        dense = logits.clone().requires_grad_()
        F.cross_entropy(dense, targets).backward()
        sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(sharded, targets)
            loss.backward()
        torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, targets))
        assert sharded.grad.placements == (Shard(1),)
        torch.testing.assert_close(sharded.grad.full_tensor(), dense.grad)


@TWO
def a_parallel_loss_ends_with_its_block_also_after_an_error(rank: int) -> None:
    logits = distribute_tensor(torch.randn(5, 6), mesh_1d(), [Replicate()])

    def inside() -> None:
        with pytest.raises(ValueError, match="exactly one mesh dim"):
            F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))

    with pytest.raises(KeyError), loss_parallel():
        inside()
        raise KeyError
    with pytest.raises(RuntimeError, match="mixed"):  # again as outside, where plain targets are not taken
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))


two, three = TWO.fixture(__name__), THREE.fixture(__name__)


@pytest.mark.parametrize("fact", TWO.names)
def test_on_two_ranks(fact: str, two: Outcomes) -> None:
    two.check(fact)


@pytest.mark.parametrize("fact", THREE.names)
def test_on_three_ranks(fact: str, three: Outcomes) -> None:
    three.check(fact)
