"""Input and output layouts of modules, custom styles, and the loss of sharded logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleOutput as TorchPrepareModuleOutput
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from facts import Facts
from parallel import mesh_1d, part, placements
from zeroshard.torch.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    make_input_shard_1d,
    make_output_tensor,
    parallelize_module,
)

TWO, THREE = Facts(2), Facts(3)


# ---- what goes in and out of any module


class Two(nn.Module):
    """Takes two tensors, one of them by keyword, and another value. Returns two tensors."""

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
    assert (
        a.placements == (Replicate(),)
        and a.shape == (2, 4)
        and a.to_local()[:, 0].tolist() == [0.0, 1.0]
    )
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
            PrepareModuleOutput(
                output_layouts=Partial(), desired_output_layouts=Shard(0), use_local_output=local
            ),
        )
        output = module(torch.arange(4.0))
        assert isinstance(output, DTensor) is not local
        mine = output.to_local() if isinstance(output, DTensor) else output
        assert torch.equal(mine, part(2 * torch.arange(4.0), rank, 0))
    pair = parallelize_module(
        Two(),
        mesh,
        PrepareModuleOutput(
            output_layouts=(Replicate(), None), desired_output_layouts=(Shard(0), None)
        ),
    )
    first, second = pair(torch.arange(4.0), "left alone", True)
    assert torch.equal(first, part(torch.arange(4.0), rank, 0)) and second == "left alone"


@TWO
def a_tuple_of_one_output_becomes_the_output_as_in_torch(rank: int) -> None:
    class InTuple(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor]:
            return (value,)

    for parallelize, style in (
        (parallelize_module, PrepareModuleOutput),
        (torch_parallelize_module, TorchPrepareModuleOutput),
    ):
        layouts = style(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        output = parallelize(InTuple(), mesh_1d(), layouts)(torch.arange(4.0))
        assert torch.equal(output, part(torch.arange(4.0), rank, 0))


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
    assert (
        isinstance(output, DTensor) and output.placements == (Shard(0),) and output.shape == (2, 4)
    )
    torch.testing.assert_close(output.to_local()[0], module.weight.sum(1) * rank)


@TWO
def a_wrong_number_of_layouts_is_refused(rank: int) -> None:
    mesh = mesh_1d()
    with pytest.raises(ValueError, match="input_layouts has 2.*desired_input_layouts 1"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
    with pytest.raises(ValueError, match="input_layouts has 1.*desired_input_layouts 0"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(AssertionError, match="the keys.*must be the same"):
        PrepareModuleInput(input_kwarg_layouts={"a": Shard(0)})
    with pytest.raises(ValueError, match="output_layouts has 1.*desired_output_layouts 2"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(0)))
    module = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None)),
    )
    with pytest.raises(ValueError, match="with 1 inputs.*has 2"):
        module(torch.ones(2))
    module = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleOutput(
            output_layouts=(Shard(0), None), desired_output_layouts=(Shard(0), None)
        ),
    )
    with pytest.raises(ValueError, match="returned 1 outputs.*has 2"):
        module(torch.ones(2))
    module = parallelize_module(
        nn.Identity(),
        mesh,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)),
    )
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        module("x")


@TWO
def custom_styles_pass_two_functions(rank: int) -> None:
    class Gathered(ParallelStyle):
        def __init__(self) -> None:
            super().__init__(make_input_shard_1d, make_output_tensor)

    dense = nn.Linear(4, 3)
    module = parallelize_module(copy.deepcopy(dense), mesh_1d(), Gathered())
    assert set(placements(module).values()) == {Replicate()}
    value = torch.randn(4, 4)
    torch.testing.assert_close(module(part(value, rank, 0)), dense(value))


@TWO
def styles_of_torch_are_accepted(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

    dense = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    module = parallelize_module(
        copy.deepcopy(dense), mesh_1d(), {"0": TorchColwise(), "1": RowwiseParallel()}
    )
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
    with pytest.raises(
        RuntimeError, match="mixed"
    ):  # again as outside, where plain targets are not taken
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))


test_on_two_ranks = TWO.test(__name__)
test_on_three_ranks = THREE.test(__name__)
