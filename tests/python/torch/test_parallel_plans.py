"""``parallelize_module``: the modules that a plan matches, and errors, after which the module is
unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

import zeroshard as zs
from facts import Facts
from parallel import mesh_1d
from zeroshard import _agreement
from zeroshard.torch import ProcessMesh
from zeroshard.torch.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TWO = Facts(2)


class Block(nn.Module):
    """Two named Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)


class Model(nn.Module):
    """Several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)


def parallel(module: nn.Module) -> list[str]:
    """The names of the parameters that are DTensors."""
    return [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]


# ---- what a plan means


@TWO
def keys_match_part_by_part(rank: int) -> None:
    plan = {
        "layers.[02].fc1": ColwiseParallel(),
        "layers.*.fc2": RowwiseParallel(),
        "he?d": ColwiseParallel(),
    }
    module = parallelize_module(Model(), mesh_1d(), plan)
    assert parallel(module) == [
        "layers.0.fc1.weight", "layers.0.fc1.bias", "layers.0.fc2.weight", "layers.0.fc2.bias",
        "layers.1.fc2.weight", "layers.1.fc2.bias",
        "layers.2.fc1.weight", "layers.2.fc1.bias", "layers.2.fc2.weight", "layers.2.fc2.bias",
        "head.weight", "head.bias",
    ]  # fmt: skip


@TWO
def a_star_does_not_match_a_point(rank: int) -> None:
    with pytest.warns(UserWarning, match="'fc1'"):
        assert not parallel(parallelize_module(Model(), mesh_1d(), {"*.fc1": ColwiseParallel()}))


@TWO
def a_key_that_matches_no_module_is_skipped_with_a_warning_as_in_torch(rank: int) -> None:
    plan = {"layers.*.fc3": RowwiseParallel(), "blocks.0.fc1": RowwiseParallel()}
    plan |= {"head": ColwiseParallel()}
    message = r"'fc3'.*'layers.\*.fc3'.*'layers.0.fc1', .*skipped"
    with pytest.warns(UserWarning, match=message) as warned:
        module = parallelize_module(Model(), mesh_1d(), plan)
    assert [each.filename for each in warned] == [__file__, __file__]
    with pytest.warns(UserWarning):
        reference = torch_parallelize_module(
            Model(), mesh_1d(), {name: TorchColwiseParallel() for name in plan}
        )
    assert parallel(module) == parallel(reference) == ["head.weight", "head.bias"]
    with pytest.warns(UserWarning, match="'fc'.*the modules are none"):
        parallelize_module(nn.Linear(2, 2), mesh_1d(), {"fc": ColwiseParallel()})


@TWO
def one_style_is_for_the_module_itself(rank: int) -> None:
    for plan in (ColwiseParallel(), {"": ColwiseParallel()}):
        assert parallel(parallelize_module(nn.Linear(4, 6), mesh_1d(), plan)) == ["weight", "bias"]


@TWO
def first_plans_have_pairs_for_parts_of_the_module(rank: int) -> None:
    module = parallelize_module(
        Model(), mesh_1d(), {"layers.0": PairwiseParallel(), "layers.1": SequenceParallel()}
    )
    assert [name for name in parallel(module) if name.endswith("fc1.weight")] == [
        "layers.0.fc1.weight", "layers.1.fc1.weight",
    ]  # fmt: skip
    assert not any("norm" in name or "head" in name for name in parallel(module))


@TWO
def one_dimension_of_a_mesh_is_chosen_by_number_or_name(rank: int) -> None:
    named = ProcessMesh([[0, 1]], ["dp", "tp"])
    unnamed = DeviceMesh("cpu", [[0, 1]])
    for mesh, dim in ((named, "tp"), (named, 1), (named, -1), (unnamed, 1)):
        module = parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel(), dim)
        assert module.weight.to_local().shape == (3, 4)
    assert parallelize_module(
        nn.Linear(4, 6), named, ColwiseParallel(), 0
    ).weight.to_local().shape == (6, 4)
    assert parallelize_module(
        nn.Linear(4, 6), named["tp"], ColwiseParallel()
    ).weight.to_local().shape == (3, 4)


@TWO
def inputs_can_be_prepared_beside_another_style(rank: int) -> None:
    module = nn.Sequential(nn.Linear(4, 6))
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(module, mesh_1d(), {"": prepare, "0": ColwiseParallel()})
    parallelize_module(
        module[0],
        mesh_1d(),
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    )
    assert module(torch.ones(2, 4)).shape == (4, 3)


# ---- what is refused


def refused(error: type[Exception], match: str, *arguments: Any, **named: Any) -> None:
    """Asserts that an error is raised and the module is unchanged."""
    module = arguments[0]
    before = parallel(module) if isinstance(module, nn.Module) else []
    with pytest.raises(error, match=match):
        parallelize_module(*arguments, **named)
    assert not isinstance(module, nn.Module) or parallel(module) == before


@TWO
def a_module_type_that_the_style_does_not_support_is_refused(rank: int) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        refused(
            NotImplementedError,
            "LayerNorm.*nn.Linear and nn.Embedding",
            nn.LayerNorm(4),
            mesh_1d(),
            style,
        )
    plan = {"head": ColwiseParallel(), "layers.0.norm": ColwiseParallel()}
    refused(zs.UnsupportedModuleError, "'layers.0.norm' is a LayerNorm", Model(), mesh_1d(), plan)
    for style in (PairwiseParallel(), SequenceParallel()):
        for module in (nn.Linear(4, 4), nn.MultiheadAttention(4, 2)):
            refused(NotImplementedError, "two or more nn.Linear", module, mesh_1d(), style)
    refused(
        NotImplementedError,
        "two or more nn.Linear",
        nn.Conv2d(1, 1, 1),
        mesh_1d(),
        PairwiseParallel(),
    )


@TWO
def a_module_is_parallelised_only_once(rank: int) -> None:
    for style, module in (
        (ColwiseParallel(), nn.Linear(4, 4)),
        (SequenceParallel(), nn.LayerNorm(4)),
        (PairwiseParallel(), Block()),
    ):
        parallelize_module(module, mesh_1d(), style)
        refused(RuntimeError, "already parallelised", module, mesh_1d(), style)
    once = parallelize_module(Block(), mesh_1d(), PairwiseParallel())
    refused(
        zs.AlreadyParallelError, "'fc1' is already", once, mesh_1d(), {"fc1": ColwiseParallel()}
    )
    refused(
        RuntimeError,
        "two styles.*'fc1'",
        Block(),
        mesh_1d(),
        {"fc1": ColwiseParallel(), "fc?": RowwiseParallel()},
    )


@TWO
def a_mesh_of_several_dimensions_needs_tp_mesh_dim(rank: int) -> None:
    mesh = ProcessMesh([[0, 1]], ["dp", "tp"])
    refused(
        zs.InvalidArgumentError,
        r"2 dimensions.*dp, tp.*device_mesh\['tp'\]",
        nn.Linear(4, 4),
        mesh,
        ColwiseParallel(),
    )
    refused(
        zs.InvalidArgumentError,
        "no dimension 'pp'.*'dp', 'tp'",
        nn.Linear(4, 4),
        mesh,
        ColwiseParallel(),
        "pp",
    )
    refused(zs.InvalidArgumentError, "no dimension 2", nn.Linear(4, 4), mesh, ColwiseParallel(), 2)
    for wrong in ([0, 1], "tp"):
        refused(
            zs.InvalidArgumentError,
            "device_mesh is .*must be a ProcessMesh",
            nn.Linear(4, 4),
            wrong,
            ColwiseParallel(),
        )


@TWO
def a_plan_must_consist_of_styles(rank: int) -> None:
    for wrong in ("colwise", [ColwiseParallel()], ColwiseParallel):
        refused(
            zs.InvalidArgumentError,
            "must be a ParallelStyle, or a dict",
            nn.Linear(4, 4),
            mesh_1d(),
            wrong,
        )
    refused(zs.InvalidArgumentError, "'': 'colwise'", nn.Linear(4, 4), mesh_1d(), {"": "colwise"})
    refused(
        zs.InvalidArgumentError, "must be a torch.nn.Module", "model", mesh_1d(), ColwiseParallel()
    )


@TWO
def layouts_and_functions_do_not_go_together(rank: int) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="_prepare_input and input_layouts"):
        ColwiseParallel(lambda given, mesh: given, input_layouts=Shard(0))
    with pytest.raises(zs.InvalidArgumentError, match="_prepare_output is given together"):
        RowwiseParallel(None, lambda output, mesh: output, use_local_output=True)
    with pytest.raises(zs.InvalidArgumentError, match="must be Shard"):
        ColwiseParallel(input_layouts="replicate")  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="function of a tensor and a mesh"):
        PairwiseParallel(Shard(0))  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="sequence_dim"):
        SequenceParallel(sequence_dim="time")  # type: ignore[arg-type]


# ---- optional arguments


@TWO
def the_mesh_may_surround_the_call(rank: int) -> None:
    module = nn.Linear(4, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(zs.InvalidArgumentError, match="no mesh surrounds the call"):
        parallelize_module(module, parallelize_plan=ColwiseParallel())
    with mesh:
        assert parallelize_module(module, parallelize_plan=ColwiseParallel()) is module
    assert module.weight.device_mesh == mesh


@TWO
def without_a_plan_the_module_stays_as_it_is(rank: int) -> None:
    module = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="parallelize_plan is None"):
        assert parallelize_module(module, mesh_1d()) is module
    assert type(module.weight) is nn.Parameter


@TWO
def errors_have_the_types_of_torchs(rank: int) -> None:
    with pytest.raises(TypeError, match="parallelize_plan is a str"):
        parallelize_module(nn.Linear(4, 4), mesh_1d(), "colwise")
    with pytest.raises(AssertionError, match="the same number"):
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Shard(0), None))


# ---- ranks that disagree


@TWO
def ranks_that_disagree_about_the_plan_are_both_named(rank: int) -> None:
    plans: list[Any] = [{"fc1": ColwiseParallel()}, {"fc1": RowwiseParallel()}]
    refused(
        zs.DisagreementError,
        "rank 0 and rank 1.*the plan.*rank 0.*Colwise.*rank 1.*Rowwise",
        Block(),
        mesh_1d(),
        plans[rank],
    )
    layouts = [ColwiseParallel(), ColwiseParallel(output_layouts=Replicate())]
    refused(zs.DisagreementError, "the plan", nn.Linear(4, 4), mesh_1d(), layouts[rank])


@TWO
def ranks_that_disagree_about_the_mesh_are_both_named(rank: int) -> None:
    with pytest.raises(zs.DisagreementError, match="rank 0 and rank 1.*the mesh") as raised:
        ProcessMesh([rank, 1 - rank], ["tp"])
    assert "rank 0 has [0, 1]" in str(raised.value) and "rank 1 has [1, 0]" in str(raised.value)
    with pytest.raises(zs.DisagreementError, match="the mesh"):
        ProcessMesh([0, 1], ["dp", "tp"][rank : rank + 1])
    meshes = [
        DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)),
        DeviceMesh("cpu", [0, 1], mesh_dim_names=("b",)),
    ]
    refused(
        zs.DisagreementError, "the mesh.*'a'.*'b'", nn.Linear(4, 4), meshes[rank], ColwiseParallel()
    )


@TWO
def ranks_that_disagree_about_the_module_are_both_named(rank: int) -> None:
    module = nn.Linear(4, 4 + 2 * rank)
    refused(
        zs.DisagreementError,
        "the module's parameters.*rank 0.*rank 1",
        module,
        mesh_1d(),
        ColwiseParallel(),
    )


@TWO
def the_wait_for_another_rank_times_out(rank: int) -> None:
    if rank == 0:
        timeout, _agreement.TIMEOUT = _agreement.TIMEOUT, 0.2
        try:
            refused(
                zs.TimeoutError,
                "rank 0 waited.*for rank 1 to call parallelize_module",
                nn.Linear(4, 4),
                mesh_1d_of_torch(),
                ColwiseParallel(),
            )
        finally:
            _agreement.TIMEOUT = timeout
    else:
        mesh_1d_of_torch()


def mesh_1d_of_torch() -> DeviceMesh:
    """A DeviceMesh of torch, which is created without comparing the ranks' arguments."""
    return DeviceMesh("cpu", [0, 1])


test_on_two_ranks = TWO.test(__name__)
