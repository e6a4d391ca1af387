"""shard_layer, shard_tensor and reshard with Paddle's distributed tensors on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn

import ranks


class MLP(nn.Layer):
    """Two matrices. The second one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 6)
        self.fc2 = nn.Linear(6, 8)
        self.again = nn.Layer()
        self.again.weight = self.fc2.weight
        self.norm = nn.BatchNorm1D(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.fc2(nn.functional.relu(self.fc1(x)))) + self.again.weight.sum()


def cut(name: str, layer: Any, mesh: Any) -> None:
    """Shards the first matrix by outputs and the second by inputs."""
    from zeroshard.paddle import Shard, shard_tensor

    if name in ("fc1", "fc2"):
        layer.weight = shard_tensor(layer.weight, mesh, [Shard(1 if name == "fc1" else 0)])


def whole(tensor: Any) -> np.ndarray:
    from zeroshard.paddle._dtensor import whole as of

    values: np.ndarray = of(tensor).numpy()
    return values


def layers(rank: int) -> Any:
    from zeroshard.paddle import ProcessMesh, shard_layer

    mesh = ProcessMesh([0, 1], dim_names=["x"])
    called: list[str] = []
    layer = MLP()
    before = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())

    def shard_fn(name: str, inner: Any, given: Any) -> None:
        assert given is mesh
        called.append(name)
        cut(name, inner, mesh)

    made = shard_layer(layer, mesh, shard_fn)
    assert made is layer
    assert layer.again.weight is layer.fc2.weight
    assert (
        any(layer.fc1.bias is parameter for parameter in optimizer._parameter_list)
        and layer.fc1.bias.is_dist()
    )
    placed = {name: str(tensor.placements) for name, tensor in layer.state_dict().items()}
    return (
        called,
        placed,
        before,
        {name: whole(tensor) for name, tensor in layer.state_dict().items()},
    )


def test_shard_fn_sees_every_sublayer_and_remaining_parameters_are_replicated_from_rank_0(
    pair: ranks.Team,
) -> None:
    first, second = pair.run(layers)
    for called, placed, _, after in (first, second):
        assert called == ["", "fc1", "fc2", "again", "norm"]
        assert placed["fc1.weight"] == "[Shard(dim=1)]" and placed["fc2.weight"] == "[Shard(dim=0)]"
        assert set(placed.values()) - {"[Shard(dim=1)]", "[Shard(dim=0)]"} == {"[Replicate()]"}
        for name, values in first[2].items():
            np.testing.assert_array_equal(after[name], values, err_msg=name)


def on_a_2d_mesh(rank: int) -> Any:
    from zeroshard.paddle import ProcessMesh, Shard, shard_layer, shard_tensor

    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])

    def shard_fn(name: str, inner: Any, given: Any) -> None:
        from zeroshard.paddle import Replicate

        if name == "0":
            inner.weight = shard_tensor(inner.weight, given, [Replicate(), Shard(-1)])

    layer = shard_layer(nn.Sequential(nn.Linear(4, 6)), mesh, shard_fn)
    return (
        str(layer[0].weight.placements),
        str(layer[0].bias.placements),
        layer[0].weight._local_shape,
    )


def test_parameters_have_one_placement_per_mesh_dimension() -> None:
    for found in ranks.run(4, on_a_2d_mesh):
        assert found == ("[Replicate(), Shard(dim=1)]", "[Replicate(), Replicate()]", [4, 3])


def hooks(rank: int) -> Any:
    from zeroshard.paddle import ProcessMesh, Replicate, Shard, reshard, shard_layer, shard_tensor

    mesh = ProcessMesh([0, 1], dim_names=["x"])
    seen = []

    def input_fn(inputs: Any, given: Any) -> list[Any]:
        assert given is mesh
        seen.append([value.is_dist() for value in inputs])
        return [shard_tensor(inputs[0], given, [Shard(0)])]

    def output_fn(outputs: Any, given: Any) -> list[Any]:
        seen.append(str(outputs.placements))
        return [reshard(outputs, given, [Replicate()])._local_value()]

    layer = shard_layer(nn.Linear(4, 4), mesh, None, input_fn, output_fn)
    (output,) = layer(paddle.ones([6, 4]))
    return seen, output.is_dist(), output.numpy()


def test_input_and_output_functions_are_called_around_the_forward(pair: ranks.Team) -> None:
    first, second = pair.run(hooks)
    assert first[0] == second[0] == [[False], "[Shard(dim=0)]"]
    assert not first[1] and first[2].shape == (6, 4)
    np.testing.assert_array_equal(first[2], second[2])


def bad(rank: int) -> list[str]:
    from zeroshard.paddle import ProcessMesh, Replicate, Shard, reshard, shard_layer, shard_tensor

    mesh = ProcessMesh([0, 1], dim_names=["x"])
    layer, tensor = nn.Linear(2, 2), paddle.ones([4, 4])
    other: Any = [
        lambda: shard_layer(layer, None),
        lambda: shard_layer(layer, "x"),
        lambda: shard_layer(tensor, mesh),
        lambda: shard_layer(layer, mesh, "shard_fn"),
        lambda: shard_layer(layer, ProcessMesh([0, 1, 2], dim_names=["x"])),
        lambda: shard_tensor(tensor, mesh, [Shard(2)]),
        lambda: shard_tensor(tensor, mesh, [Shard(0), Replicate()]),
        lambda: shard_tensor(tensor, mesh, ["x"]),
        lambda: reshard(tensor, mesh, [Replicate()]),
        lambda: shard_tensor(tensor[: 2 + 2 * rank], mesh, [Shard(0)]),
        lambda: shard_tensor(tensor, mesh, [Shard(rank)]),
    ]
    said = []
    for call in other:
        with pytest.raises((ValueError, zs.DisagreementError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_invalid_arguments_raise_errors_that_name_valid_ones(pair: ranks.Team) -> None:
    words = [
        "process_mesh is None; it must be a ProcessMesh",
        "process_mesh is a str; it must be a ProcessMesh",
        "it must be a paddle.nn.Layer",
        "shard_fn is 'shard_fn'; it must be a function",
        "they must be in 0 to 1",
        "cannot be sharded on dimension 2; it has 2 dimensions",
        "one placement of the tensor per mesh dimension (1), got 2",
        "a list of Shard(dim), Replicate() or Partial()",
        "which shard_tensor creates",
        "disagree about the tensor",
        "disagree about the placements",
    ]
    for said in pair.run(bad):
        for message, word in zip(said, words, strict=True):
            assert word in message


def resharded(rank: int) -> list[Any]:
    from zeroshard.paddle import Partial, ProcessMesh, Replicate, Shard, reshard, shard_tensor

    mesh = ProcessMesh([0, 1], dim_names=["x"])
    found = []
    values = paddle.arange(20, dtype="float32").reshape([5, 4])
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            tensor = shard_tensor(values.clone(), mesh, [source])
            found.append(
                (
                    reshard(tensor, mesh, [target])._local_shape,
                    whole(reshard(tensor, mesh, [target])),
                )
            )
    partial = shard_tensor(values.clone(), mesh, [Partial()])
    found.append(([], whole(reshard(partial, mesh, [Shard(0)]))))
    return found


def test_a_tensor_keeps_its_values_through_every_change_of_placement(pair: ranks.Team) -> None:
    expected = np.arange(20, dtype=np.float32).reshape(5, 4)
    for rank, found in enumerate(pair.run(resharded)):
        for number, (shape, values) in enumerate(found):
            np.testing.assert_array_equal(values, expected)
            if number < 9:
                assert shape == [[3 - rank, 4], [5, 2], [5, 4]][number % 3]
