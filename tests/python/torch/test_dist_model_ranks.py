"""``DistModel`` on several ranks with server processes: plain models and models on meshes, compared
with a dense process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from demo import LEVELS, DemoNet, batch, dense_losses, made, plain, snapshot, strategy
from facts import Facts
from zeroshard.torch import (
    ProcessMesh,
    Replicate,
    Shard,
    shard_dataloader,
    shard_layer,
    shard_tensor,
    to_static,
)
from zeroshard.torch.parallel import PairwiseParallel, SequenceParallel, parallelize_module

TWO, FOUR = Facts(2), Facts(4)


def share(tensors: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    """This rank's half of a batch."""
    return tuple(tensor.chunk(2)[rank] for tensor in tensors)


@TWO
def plain_models_train_on_the_ranks_own_batches(rank: int) -> None:
    for stage in LEVELS:
        model = made(stage=stage)
        losses = [model(*share(batch(step), rank)).item() for step in range(5)]
        assert losses == pytest.approx(dense_losses(5), rel=1e-4)
        program = model.dist_main_program()
        assert (program.rank, program.world) == (rank, 2) and program.find("collective")[
            0
        ].group == (0, 1)
        assert model.serial_main_program().world == 1
        assert len(model.dist_startup_program().find("push")) == (4 if rank == 0 else 0)


@TWO
def plain_models_take_batches_from_a_mesh(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["dp"])
    loader = shard_dataloader([batch(step) for step in range(5)], [mesh], shard_dims="dp")
    model = made(stage=2)
    assert [model(*data).item() for data in loader()] == pytest.approx(dense_losses(5), rel=1e-4)
    model.predict()
    images = batch()[0]
    expected = plain(model.state_dict("param"))(images)
    torch.testing.assert_close(model(shard_tensor(images, mesh, [Shard(0)]))["out0"], expected)
    torch.testing.assert_close(model(shard_tensor(images, mesh, [Replicate()]))["out0"], expected)
    model.train()
    with pytest.raises(zs.InvalidArgumentError, match="divisible by the 2 ranks"):
        model(
            shard_tensor(images[:3], mesh, [Shard(0)]),
            shard_tensor(images[:3, :8], mesh, [Shard(0)]),
        )


@TWO
def a_sharded_model_is_evaluated_and_predicts_as_the_dense_one(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    dense, (images, labels) = DemoNet(), batch()
    for data in (
        batch(),
        next(shard_dataloader([batch()], mesh)()),
        next(shard_dataloader([batch()], mesh, "x")()),
    ):
        model = to_static(DemoNet(mesh), None, nn.MSELoss())
        torch.testing.assert_close(model(*data), nn.functional.mse_loss(dense(images), labels))
        model.predict()
        torch.testing.assert_close(model(data[0])["out0"], dense(images))
        assert all(
            torch.equal(value, dense.state_dict()[name])
            for name, value in model.state_dict().items()
        )
    program = model.dist_main_program()
    boxes = {variable.name: str(variable.box) for variable in program.variables}
    assert (
        boxes["linear_0.weight"] == f"[{8 * rank}:{8 * rank + 8}, 0:16]"
        and boxes["linear_1.bias"] == "[0:8]"
    )
    state = {name: value + 1 for name, value in dense.state_dict().items()}
    model.set_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@TWO
def a_model_of_styles_is_evaluated_as_the_dense_one(rank: int) -> None:
    mesh, dense, (images, labels) = ProcessMesh([0, 1], ["x"]), DemoNet(), batch()
    model = to_static(parallelize_module(DemoNet(), mesh, PairwiseParallel()), None, nn.MSELoss())
    torch.testing.assert_close(model(images, labels), nn.functional.mse_loss(dense(images), labels))
    assert model.dist_main_program().find("collective")[0].subject == "all_reduce"


@TWO
def a_layer_with_an_input_fn_receives_unchanged_inputs(rank: int) -> None:
    mesh, dense, (images, labels) = ProcessMesh([0, 1], ["x"]), DemoNet(), batch()
    layer = shard_layer(
        DemoNet(),
        mesh,
        None,
        lambda inputs, given: [shard_tensor(inputs[0], given, [Shard(0)])],
        lambda outputs, given: outputs.full_tensor(),
    )
    model = to_static(layer, None, nn.MSELoss())
    torch.testing.assert_close(model(images, labels), nn.functional.mse_loss(dense(images), labels))


@TWO
def a_model_on_two_meshes_is_refused(rank: int) -> None:
    layer = DemoNet(ProcessMesh([0, 1]))
    layer.linear_0.bias = shard_tensor(layer.linear_0.bias, ProcessMesh([1, 0]), [Replicate()])
    with pytest.raises(zs.InvalidArgumentError, match="must be on one mesh"):
        to_static(layer)


# ---- several ranks, trained on a mesh


@TWO
def a_sharded_model_trains_as_the_dense_one(rank: int) -> None:
    """The program of Paddle's documentation, at every stage."""
    mesh, reference = ProcessMesh([0, 1], ["x"]), dense_losses(5)
    loader = shard_dataloader([batch(step) for step in range(5)], meshes=[mesh])
    for stage in LEVELS:
        layer = DemoNet(mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        model = to_static(layer, loader, nn.MSELoss(), optimizer, strategy(stage))
        model.train()
        assert [model(*data).item() for data in loader()] == pytest.approx(reference, rel=1e-4)
        before, version = snapshot(model)
        dense = plain(before)
        model.eval()
        losses = [model(*data).item() for data in loader()]
        assert losses == pytest.approx(
            [nn.functional.mse_loss(dense(x), y).item() for x, y in map(batch, range(5))]
        )
        model.predict()
        torch.testing.assert_close(model(batch()[0])["out0"], dense(batch()[0]))
        after, version_after = snapshot(model)
        assert version == version_after == 5 and all(
            torch.equal(after[name], before[name]) for name in before
        )


@TWO
def a_program_on_a_mesh_has_the_boxes_of_its_rank(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    for stage in LEVELS:
        program = made(mesh, stage).dist_main_program()
        # Half of both matrices and, since biases are replicated, the first rank's biases.
        half, biases = 4 * (16 * 16 + 16 * 8) // 2, 4 * (16 + 8)
        assert program.bytes("push") == half + (biases if rank == 0 else 0)
        assert program.bytes("pull") == half + biases
        serial = made(mesh, stage).serial_main_program()
        assert serial.bytes("push") == 2 * half + biases and not serial.find("collective")


@TWO
def programs_list_collectives(rank: int) -> None:
    """Programs include announced collectives immediately, and recorded ones with their bytes after
    a call."""
    mesh = ProcessMesh([0, 1], ["x"])

    def together(program: Any) -> list[tuple[str, int | None]]:
        assert all(operation.group == (0, 1) for operation in program.find("collective"))
        return [(operation.subject, operation.nbytes) for operation in program.find("collective")]

    for style in (PairwiseParallel(), SequenceParallel()):
        layer = parallelize_module(DemoNet(), mesh, style)
        model = to_static(
            layer, None, nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1), strategy(2)
        )
        pair = isinstance(style, PairwiseParallel) and not isinstance(style, SequenceParallel)
        announced, mean = together(model.dist_main_program("predict")), ("all_reduce", 4)
        assert announced == (
            [("all_reduce", None)] if pair else [("all_gather", None), ("reduce_scatter", None)]
        )
        data = batch() if pair else share(batch(), rank)
        model(*data)
        # What goes into the first module needs no gradient: there is less to do than the style
        # announced.
        images, outputs = 4 * 16 * 4, 4 * 8 * 4
        assert together(model.dist_main_program()) == (
            [("all_reduce", outputs), mean]
            if pair
            else [
                ("all_gather", images // 2),
                ("reduce_scatter", outputs),
                mean,
                ("all_gather", outputs // 2),
            ]
        )
        assert together(model.dist_main_program("predict")) == announced

    from torch.distributed.tensor.debug import CommDebugMode

    for stage in LEVELS:
        model = made(mesh, stage)
        assert not together(model.dist_main_program())
        with CommDebugMode() as counted:
            model(*batch())
        told = together(model.dist_main_program())
        assert len(told) == counted.get_total_counts() >= 2 and all(nbytes for _, nbytes in told)


@TWO
def state_can_be_loaded_with_and_without_a_mesh(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    first = made(mesh, 2)
    for step in range(3):
        first(*batch(step))
    state = copy.deepcopy(first.state_dict())
    assert not any(
        type(value) is not Tensor for value in state.values() if isinstance(value, Tensor)
    )
    losses = [first(*batch(step)).item() for step in range(3, 6)]
    second = made(None, 1)
    second.set_state_dict(state)
    # Every rank has the whole batch: the mean of the ranks' gradients is that of one.
    assert [second(*batch(step)).item() for step in range(3, 6)] == pytest.approx(losses, rel=1e-5)
    third = made(mesh, 3)
    third.set_state_dict(state)
    assert [third(*batch(step)).item() for step in range(3, 6)] == losses


@TWO
def a_model_of_styles_trains_as_the_dense_one(rank: int) -> None:
    mesh = ProcessMesh([0, 1], ["x"])
    for stage in LEVELS:
        layer = parallelize_module(DemoNet(), mesh, PairwiseParallel())
        model = to_static(
            layer,
            None,
            nn.MSELoss(),
            torch.optim.AdamW(layer.parameters(), lr=0.1),
            strategy(stage),
        )
        assert [model(*batch(step)).item() for step in range(5)] == pytest.approx(
            dense_losses(5), rel=1e-4
        )


@FOUR
def batches_and_matrices_are_sharded_on_one_mesh(rank: int) -> None:
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    loader = shard_dataloader([batch(step) for step in range(5)], [mesh], shard_dims="dp")
    for stage in LEVELS:
        layer = DemoNet()

        def shard_fn(name: str, inner: Any, given: Any) -> None:
            cut = {"linear_0": Shard(0), "linear_1": Shard(1)}.get(name)
            if cut is not None:
                inner.weight = shard_tensor(inner.weight, given, [Replicate(), cut])

        shard_layer(layer, mesh, shard_fn)
        model = to_static(
            layer,
            loader,
            nn.MSELoss(),
            torch.optim.AdamW(layer.parameters(), lr=0.1),
            strategy(stage),
        )
        assert [model(*data).item() for data in loader()] == pytest.approx(
            dense_losses(5), rel=1e-4
        )
        model.predict()
        torch.testing.assert_close(
            model(next(loader())[0])["out0"], plain(model.state_dict("param"))(batch()[0])
        )


@FOUR
def replicas_on_slices_of_a_mesh_train_together(rank: int) -> None:
    """Each replica has its own part of the batch. With styles (plain tensors between modules) and
    with DTensors."""
    mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    for stage in LEVELS:
        for layer in (
            parallelize_module(DemoNet(), mesh["tp"], PairwiseParallel()),
            DemoNet(mesh["tp"]),
        ):
            model = to_static(
                layer,
                None,
                nn.MSELoss(),
                torch.optim.AdamW(layer.parameters(), lr=0.1),
                strategy(stage),
            )
            losses = [model(*share(batch(step), rank // 2)).item() for step in range(5)]
            assert losses == pytest.approx(dense_losses(5), rel=1e-4)
            startup = model.dist_startup_program()
            assert len(startup.find("push")) == {0: 4, 1: 2 + model._by_styles, 2: 0, 3: 0}[rank]


test_on_two_ranks = TWO.test(__name__, servers=True)
test_on_four_ranks = FOUR.test(__name__, servers=True)
