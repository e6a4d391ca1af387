"""Meshes, placements, and the distribution of tensors, modules and batches over them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import zeroshard as zs
from facts import Facts
from zeroshard.torch import (
    Partial,
    ProcessMesh,
    Replicate,
    Shard,
    reshard,
    shard_dataloader,
    shard_layer,
    shard_tensor,
)
from zeroshard._native import redistribution
from zeroshard.torch._mesh import layout_on

TWO, FOUR = Facts(2), Facts(4)


def whole(*shape: int) -> Tensor:
    """A tensor with the same values on every rank."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


# ---- meshes


@FOUR
def a_mesh_has_ranks_in_named_dimensions(rank: int) -> None:
    mesh = ProcessMesh([[3, 1], [0, 2]], dim_names=["dp", "tp"])
    assert isinstance(mesh, DeviceMesh)
    assert mesh.shape == (2, 2) and mesh.ndim == 2 and mesh.dim_names == ["dp", "tp"]
    assert mesh.process_ids == [3, 1, 0, 2] and mesh.get_dim_size("tp") == 2
    assert mesh["tp"].mesh.tolist() == {3: [3, 1], 1: [3, 1], 0: [0, 2], 2: [0, 2]}[rank]
    assert ProcessMesh([0, 1, 2, 3]).dim_names == ["d0"]
    value = distribute_tensor(whole(4), mesh["tp"], [Shard(0)])
    assert value.to_local().tolist() == ([0.0, 1.0] if rank in (3, 0) else [2.0, 3.0])
    assert torch.equal(value.full_tensor(), whole(4))


@FOUR
def ranks_outside_of_a_mesh_have_an_empty_part(rank: int) -> None:
    mesh = ProcessMesh([1, 3], ["x"])
    made = shard_tensor(whole(4, 2), mesh, [Shard(0)])
    assert made.shape == (4, 2) and made.to_local().numel() == (4 if rank in (1, 3) else 0)


@TWO
def an_invalid_mesh_is_refused(rank: int) -> None:
    for array, match in (
        ([0, 0], "a rank twice"),
        ([0, 2], "0 to 1"),
        ([-1, 0], "0 to 1"),
        (0, "at least one dimension"),
        ([], "at least one dimension"),
        ([0.0, 1.0], "at least one dimension"),
        ("01", "nested lists"),
        ([[0], [1, 2]], "nested lists"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=match):
            ProcessMesh(array)
    for names in (["x", "y"], [], ["x"], ["x", "x"]):
        if names != ["x"]:
            with pytest.raises(zs.InvalidArgumentError, match="dim_names"):
                ProcessMesh([[0, 1]] if len(names) == 2 and names[0] == names[1] else [0, 1], names)


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(zs.NotInitialisedError, match="init_process_group"):
        ProcessMesh([0])


# ---- tensors


@TWO
def a_tensor_is_split_according_to_its_placements(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    value = whole(3, 4)
    for placement, mine in (
        (Shard(0), value.chunk(2)[rank]),
        (Shard(-1), value.chunk(2, 1)[rank]),
        (Replicate(), value),
    ):
        made = shard_tensor(value, mesh, [placement])
        assert (
            isinstance(made, DTensor)
            and torch.equal(made.to_local(), mine)
            and torch.equal(made.full_tensor(), value)
        )
    partial = shard_tensor(value, mesh, [Partial()])
    assert partial.placements == (Partial(),) and torch.equal(partial.full_tensor(), value)
    assert shard_tensor(
        [[1, 2], [3, 4]], mesh, [Shard(0)], dtype=torch.float64
    ).to_local().tolist() == [[1 + 2 * rank, 2 + 2 * rank]]


@TWO
def values_are_those_of_the_meshs_first_rank(rank: int) -> None:
    made = shard_tensor(torch.full((2, 2), rank + 5.0), ProcessMesh([1, 0]), [Shard(0)])
    assert torch.equal(made.full_tensor(), torch.full((2, 2), 6.0))


@TWO
def a_parameter_stays_a_parameter_with_the_given_stop_gradient(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    parameter = nn.Parameter(whole(2, 2))
    assert isinstance(shard_tensor(parameter, mesh, [Shard(0)]), nn.Parameter)
    assert shard_tensor(parameter, mesh, [Shard(0)]).requires_grad
    assert not shard_tensor(parameter, mesh, [Shard(0)], stop_gradient=True).requires_grad
    assert not shard_tensor(whole(2, 2), mesh, [Shard(0)]).requires_grad
    assert shard_tensor(whole(2, 2), mesh, [Shard(0)], stop_gradient=False).requires_grad
    layer = nn.Linear(2, 2)
    layer.weight = shard_tensor(layer.weight, mesh, [Shard(1)])
    assert isinstance(dict(layer.named_parameters())["weight"], DTensor)


@TWO
def mismatched_placements_are_refused(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    for placements, match in (
        ([Shard(2)], r"dimension 2; it has 2 dimensions"),
        ([Shard(-3)], "dimension -3"),
        ([], r"per mesh dimension \(1\), got 0"),
        ([Shard(0), Replicate()], r"per mesh dimension \(1\), got 2"),
        ([0], "they must be a list of Shard"),
        (Shard(0), "they must be a list of Shard"),
        (None, "they must be a list of Shard"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=match):
            shard_tensor(whole(2, 2), mesh, placements)  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="mesh is a list"):
        shard_tensor(whole(2, 2), [0, 1], [Shard(0)])  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="not a leaf"):
        shard_tensor(whole(2, 2).requires_grad_() * 2, mesh, [Shard(0)])
    made = shard_tensor(whole(2, 2), mesh, [Shard(0)])
    assert shard_tensor(made, mesh, [Shard(0)]) is made
    with pytest.raises(zs.InvalidArgumentError, match="reshard"):
        shard_tensor(made, mesh, [Shard(1)])
    with pytest.raises(zs.InvalidArgumentError, match="data is a str"):
        shard_tensor("x", mesh, [Shard(0)])


@TWO
def ranks_that_disagree_about_a_tensor_are_both_named(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    with pytest.raises(
        zs.DisagreementError, match=r"rank 0 and rank 1.*the placements.*dim=0.*dim=1"
    ):
        shard_tensor(whole(2, 2), mesh, [Shard(rank)])
    with pytest.raises(zs.DisagreementError, match=r"the tensor.*\[2, 2\].*\[3, 2\]"):
        shard_tensor(whole(2 + rank, 2), mesh, [Shard(0)])


# ---- from one layout to another


@TWO
def invalid_arguments_of_reshard_are_refused(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    made = shard_tensor(whole(2, 2), mesh, [Shard(0)])
    with pytest.raises(zs.InvalidArgumentError, match="must be a DTensor, which shard_tensor"):
        reshard(whole(2, 2), mesh, [Shard(0)])  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="dimension 2"):
        reshard(made, mesh, [Shard(2)])
    with pytest.raises(zs.InvalidArgumentError, match="cannot be redistributed to Partial"):
        reshard(made, mesh, [Partial()])


#: Meshes of four ranks or fewer.
MESHES: list[Any] = [
    [0, 1, 2, 3],
    [3, 1, 0, 2],
    [[0, 1], [2, 3]],
    [[2, 0], [3, 1]],
    [[[0, 1]], [[2, 3]]],
    [0, 2],
    [1],
    [[3], [1], [0]],
]


def random_layout(
    source: random.Random, meshes: list[ProcessMesh], ndim: int, partial: bool
) -> tuple[ProcessMesh, list[Any]]:
    """A random mesh, and random placements on it."""
    mesh = source.choice(meshes)
    kinds = [Replicate(), *(Shard(dim) for dim in range(ndim)), *([Partial()] if partial else [])]
    return mesh, [source.choice(kinds) for _ in range(mesh.ndim)]


@FOUR
def any_layout_becomes_any_other(rank: int) -> None:
    """Compares boxes, values and gradients with torch."""
    source = random.Random(7)
    meshes = [ProcessMesh(array) for array in MESHES]
    checked = 0
    for _ in range(120):
        shape = tuple(source.choice([1, 2, 3, 5, 8]) for _ in range(source.choice([1, 2, 3])))
        value = whole(*shape)
        mesh, placements = random_layout(source, meshes, len(shape), partial=True)
        target, wanted = random_layout(source, meshes, len(shape), partial=False)
        given = distribute_tensor(value, mesh, placements).requires_grad_()
        made = reshard(given, target, wanted)
        assert (
            made.device_mesh == target and made.placements == tuple(wanted) and made.shape == shape
        )
        expected = distribute_tensor(value, target, wanted).to_local()
        torch.testing.assert_close(
            made.to_local(),
            expected,
            msg=lambda text: f"{shape} {mesh} {placements} {target} {wanted}: {text}",
        )
        box = layout_on(target, wanted).local_box(shape, rank)
        if box is not None and box.numel > 0:
            mine = value
            for dim, (first, size) in enumerate(zip(box.offset, box.size)):
                mine = mine.narrow(dim, first, size)
            assert torch.equal(mine, expected)
        if target.size() < 4 or any(isinstance(placement, Partial) for placement in placements):
            continue  # a rank outside of the target mesh computes no gradients
        weight = distribute_tensor(value + 1, target, wanted)
        (made * weight).to_local().sum().backward()
        if rank in mesh.process_ids:
            assert given.grad is not None
            torch.testing.assert_close(
                given.grad.to_local(), distribute_tensor(value + 1, mesh, placements).to_local()
            )
            checked += 1
    assert checked > 10


@FOUR
def a_redistribution_sends_only_what_a_rank_lacks(rank: int) -> None:
    row, square = ProcessMesh([0, 1, 2, 3]), ProcessMesh([[0, 1], [2, 3]])

    def moved(
        mesh: ProcessMesh, placements: list[Any], target: ProcessMesh, wanted: list[Any]
    ) -> int:
        moves = redistribution([8, 8], layout_on(mesh, placements), layout_on(target, wanted))
        return sum(box.numel for sender, receiver, box in moves if sender != receiver)

    assert moved(row, [Replicate()], square, [Shard(0), Shard(1)]) == 0
    assert moved(row, [Shard(0)], square, [Shard(0), Shard(0)]) == 0
    assert moved(row, [Shard(0)], square, [Shard(0), Replicate()]) == 4 * 16
    assert moved(square, [Shard(0), Shard(1)], row, [Replicate()]) == 4 * 48


# ---- modules


class MLP(nn.Module):
    """The network of Paddle's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, given: Tensor) -> Tensor:
        return self.fc2(self.fc1(given)) * self.scale


@TWO
def a_layer_is_sharded_by_a_function_and_the_rest_replicated(rank: int) -> None:
    mesh = ProcessMesh([[0, 1]], dim_names=["x", "y"])
    names = []

    def shard_fn(name: str, layer: Any, given: DeviceMesh) -> None:
        names.append((name, type(layer).__name__))
        assert given is mesh
        if name == "fc1":
            layer.weight = shard_tensor(layer.weight, given, [Replicate(), Shard(0)])

    dense, layer = MLP(), MLP()
    layer.load_state_dict(dense.state_dict())
    layer.fc2.bias.requires_grad_(False)
    assert shard_layer(layer, mesh, shard_fn) is layer
    assert names == [("", "MLP"), ("fc1", "Linear"), ("fc2", "Linear")]
    everything = [*layer.named_parameters(), *layer.named_buffers()]
    assert len(everything) == 5
    for name, tensor in everything:
        wanted = (Replicate(), Shard(0)) if name == "fc1.weight" else (Replicate(), Replicate())
        assert isinstance(tensor, DTensor) and tensor.placements == wanted, name
    assert layer.fc1.bias.requires_grad and not layer.fc2.bias.requires_grad
    value = torch.randn(4, 8)
    torch.testing.assert_close(
        layer(shard_tensor(value, mesh, [Replicate(), Replicate()])).full_tensor(), dense(value)
    )


@TWO
def without_a_function_everything_is_replicated_and_nothing_converted(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    torch.manual_seed(rank)
    layer = shard_layer(MLP(), mesh)
    assert all(tensor.placements == (Replicate(),) for tensor in layer.parameters())
    first = layer.fc1.weight.to_local().clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, layer.fc1.weight.to_local())
    given = shard_tensor(torch.ones(2, 8), mesh, [Shard(0)])
    assert isinstance(layer(given), DTensor)
    with pytest.raises(RuntimeError, match="mixed"):
        layer(torch.ones(2, 8))


@TWO
def inputs_and_outputs_are_converted_by_functions(rank: int) -> None:
    mesh, dense = ProcessMesh([0, 1]), MLP()
    seen: list[Any] = []

    def input_fn(inputs: Any, given: DeviceMesh) -> list[Tensor]:
        seen.append((len(inputs), given is mesh))
        return [shard_tensor(inputs[0], given, [Shard(0)])]

    def output_fn(outputs: Any, given: DeviceMesh) -> list[Tensor]:
        seen.append((isinstance(outputs, DTensor), given is mesh))
        return [outputs.full_tensor()]

    layer = MLP()
    layer.load_state_dict(dense.state_dict())
    shard_layer(layer, mesh, None, input_fn, output_fn)
    value = torch.randn(4, 8)
    (output,) = layer(value)
    assert not isinstance(output, DTensor) and seen == [(1, True), (True, True)]
    torch.testing.assert_close(output, dense(value))


@TWO
def tied_parameters_of_a_layer_stay_tied(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    for shard in (True, False):
        layer = MLP()
        layer.fc2.weight = layer.fc1.weight

        def shard_fn(name: str, inner: Any, given: DeviceMesh) -> None:
            if name == "fc1" and shard:
                inner.weight = shard_tensor(inner.weight, given, [Shard(0)])

        shard_layer(layer, mesh, shard_fn)
        assert layer.fc1.weight is layer.fc2.weight
        assert layer.fc1.weight.placements == ((Shard(0),) if shard else (Replicate(),))


@TWO
def a_layer_without_a_mesh_is_refused(rank: int) -> None:
    mesh = ProcessMesh([0, 1])
    for wrong in (None, [0, 1], "x", torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="process_mesh is .*must be a ProcessMesh"):
            shard_layer(MLP(), wrong)  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="layer is a str"):
        shard_layer("layer", mesh)  # type: ignore[arg-type]
    with pytest.raises(zs.InvalidArgumentError, match="shard_fn is 3"):
        shard_layer(MLP(), mesh, 3)  # type: ignore[arg-type]
    layer = shard_layer(MLP(), mesh)
    with pytest.raises(zs.InvalidArgumentError, match=r"'fc1.weight' is on the mesh \[0, 1\]"):
        shard_layer(layer, ProcessMesh([1, 0]))


@TWO
def ranks_with_different_shard_fns_are_both_named(rank: int) -> None:
    mesh = ProcessMesh([0, 1])

    def by_itself(name: str, layer: Any, given: DeviceMesh) -> None:
        if name == "fc1" and rank == 1:
            layer.weight = nn.Parameter(
                DTensor.from_local(layer.weight.detach(), given, [Replicate()], run_check=False)
            )

    with pytest.raises(zs.DisagreementError, match="rank 0 and rank 1.*result of shard_fn"):
        shard_layer(MLP(), mesh, by_itself)

    def together(name: str, layer: Any, given: DeviceMesh) -> None:
        if name == "fc1" and rank == 1:
            layer.weight = shard_tensor(layer.weight, given, [Shard(0)])

    with pytest.raises(
        zs.DisagreementError, match="rank 0.*shard_layer after shard_fn.*rank 1.*shard_tensor"
    ):
        shard_layer(MLP(), mesh, together)


# ---- batches


@TWO
def batches_of_the_first_rank_are_distributed(rank: int) -> None:
    mesh = ProcessMesh([[0, 1]], dim_names=["dp", "tp"])
    data = torch.utils.data.TensorDataset(whole(6, 2), whole(6))
    torch.manual_seed(rank)  # they shuffle differently
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    seen = []
    for dims, cut in ((None, [4, 2]), ("tp", [2, 1]), (1, [2, 1])):
        dist_loader = shard_dataloader(loader, meshes=[mesh], shard_dims=dims)
        assert len(dist_loader) == 2
        for size, (image, label) in zip(cut, dist_loader(), strict=True):
            assert (
                isinstance(image, DTensor)
                and image.shape[1:] == (2,)
                and image.to_local().shape == (size, 2)
            )
            assert isinstance(label, DTensor) and torch.equal(
                image.full_tensor()[:, 0], 2 * label.full_tensor()
            )
            seen += label.full_tensor().tolist()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, seen)
    assert gathered[0] == gathered[1] and sorted(seen[:6]) == list(range(6))


@TWO
def split_batches_are_local_tensors(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["dp"])
    loader = [{"a": torch.full((2, 3), float(rank)), "b": torch.ones(2), "name": "x"}]
    (batch,) = shard_dataloader(loader, mesh, "dp", is_dataset_splitted=True)
    assert batch["a"].shape == (4, 3) and batch["a"].full_tensor()[:, 0].tolist() == [0, 0, 1, 1]
    assert batch["name"] == "x"
    (batch,) = shard_dataloader(
        loader, [mesh, mesh], ["dp", None], input_keys=["b", "a"], is_dataset_splitted=True
    )
    assert (
        list(batch) == ["b", "a"]
        and batch["b"].placements == (Shard(0),)
        and batch["a"].placements == (Replicate(),)
    )


@TWO
def invalid_arguments_of_shard_dataloader_are_refused(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["dp"])
    for arguments, match in (
        (([], []), "meshes is empty"),
        (([], [0, 1]), "meshes is a int"),
        ((3, mesh), "must be iterable"),
        (([], mesh, "tp"), "no dimension 'tp'.*'dp'"),
        (([], [mesh], [None, None]), "shard_dims has 2 elements and meshes 1"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=match):
            shard_dataloader(*arguments)
    with pytest.raises(zs.InvalidArgumentError, match="meshes has 2 elements and a batch 3"):
        list(shard_dataloader([[torch.ones(2)] * 3], [mesh, mesh]))
    with pytest.raises(zs.InvalidArgumentError, match=r"\['b'\] of input_keys"):
        list(shard_dataloader([{"a": torch.ones(2)}], mesh, input_keys=["b"]))
    # As in Paddle, the keys do not affect batches that are lists.
    assert len(next(iter(shard_dataloader([[torch.ones(2)]], mesh, input_keys=["b"])))) == 1


test_on_two_ranks = TWO.test(__name__)
test_on_four_ranks = FOUR.test(__name__)
