# promise: consistent-reads
"""Programs follow a job, and receive what each step has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import models
import ranks
import zeroshard as zs
from servers import servers
from training import assert_same
from zeroshard.torch import follow, group_sharded_parallel


def step(model: nn.Module, optimizer: Any, number: int, kind: str = "cnn") -> None:
    model(*models.batch(kind, number, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def rounded(model: nn.Module) -> nn.Module:
    """Rounds the parameters but not the buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def scattered(model: nn.Module) -> nn.Module:
    """Stores the parameters by columns, so that they are not contiguous."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
            assert not parameter.is_contiguous() or 1 in parameter.shape
    return model


def follow_while_training(rank: int, address: str) -> None:
    with zs.init(address, name="followed"):
        torch.manual_seed(1)
        bare = models.cnn()
        optimizer: Any = torch.optim.AdamW(bare.parameters(), lr=0.01)
        model, optimizer, _ = group_sharded_parallel(bare, optimizer, "os_g", sync_buffers=True)
        plain, small, apart = models.cnn(), rounded(models.cnn()), scattered(models.cnn())
        with (
            follow("followed", address=address) as versions,
            follow("followed", dtype=torch.bfloat16) as halves,
            follow("followed", address=address) as scatters,
        ):
            seen = []
            for version, half, other in zip(versions, halves, scatters, strict=True):
                for received, reader in ((version, plain), (half, small), (other, apart)):
                    received.apply(reader)
                    assert received.number == version.number
                    expected = state_of(model)
                    if reader is small:
                        parameters = dict(model.named_parameters())
                        expected = {
                            name: value.bfloat16() if name in parameters else value
                            for name, value in expected.items()
                        }
                    assert_same(reader.state_dict(), expected)
                    fraction = received.changed_fraction
                    assert fraction is not None and 0 < fraction <= 1
                    assert received.bytes > 0
                seen.append((version.number, version.copied))
                if version.number == 6:
                    break
                if version.number == 3:
                    for reader in (plain, apart):
                        with torch.no_grad():
                            next(reader.parameters()).flatten()[0] += 1.0
                            next(reader.parameters()).add_(0.5)
                step(model, optimizer, version.number)
                if version.number == 1:
                    step(model, optimizer, version.number + 1)
            assert [number for number, _ in seen] == [0, 1, 3, 4, 5, 6]
            assert seen[0][1] == "joined" and seen[1][1] is None
            assert halves.copies == {"joined": 1}
            assert versions.copies == scatters.copies == {"joined": 1, "differed": 1}


def test_a_model_has_every_version_bit_for_bit() -> None:
    with servers(2) as address:
        ranks.run(1, follow_while_training, address, init=None)


def half() -> nn.Module:
    """The part of a rank among two in :func:`models.mlp` with tensor parallelism."""
    return models.Classifier(
        nn.Linear(models.FEATURES, 16),
        nn.ReLU(),
        nn.Linear(16, 24),
        nn.Tanh(),
        nn.Linear(24, models.CLASSES),
    )


def boxes_of(part: int) -> dict[str, list[tuple[int, int]]]:
    """The first index and the number of indices of that part along each dimension."""
    own = (16 * part, 16)
    return {
        "layers.0.weight": [own, (0, models.FEATURES)],
        "layers.0.bias": [own],
        "layers.2.weight": [(0, 24), own],
    }


def distributed(model: nn.Module) -> nn.Module:
    """Turns the weight of the first layer into a DTensor, which has the same local elements."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh("cpu", [0])
    layer: Any = model.get_submodule("layers.0")
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Shard(0)]))
    return model


def local_state(model: nn.Module) -> dict[str, Tensor]:
    state = state_of(model)
    return {name: of.to_local() if isinstance(of, DTensor) else of for name, of in state.items()}


def follow_boxes(rank: int, address: str) -> None:
    with zs.init(address, name="parts"):
        bare = models.mlp()
        # The last parameter is not in the model, so no reader needs it.
        parameters = [*bare.parameters(), nn.Parameter(torch.zeros(3))]
        optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
        model, optimizer, _ = group_sharded_parallel(bare, optimizer, "os_g")
        parts = [half(), scattered(half()), rounded(half()), distributed(half())]
        dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
        followers = [
            follow("parts", boxes=boxes_of(number % 2), dtype=dtype)
            for number, dtype in enumerate(dtypes)
        ]
        for number in range(6):
            whole = state_of(model)
            for part, (reader, versions) in enumerate(zip(parts, followers, strict=True)):
                version = next(versions)
                if number == 3:
                    with torch.no_grad():
                        reader.get_parameter("layers.2.weight").add_(0.5)
                version.apply(reader)
                assert version.number == number
                assert version.copied == {0: "joined", 3: "differed"}.get(number)
                expected = dict(whole)
                for name, ranges in boxes_of(part % 2).items():
                    for dim, (offset, size) in enumerate(ranges):
                        expected[name] = expected[name].narrow(dim, offset, size)
                expected = {name: of.to(dtypes[part]) for name, of in expected.items()}
                assert_same(local_state(reader), expected)
            step(model, optimizer, number, "mlp")


def test_a_part_of_a_model_has_its_boxes_of_every_version() -> None:
    with servers(2) as address:
        ranks.run(1, follow_boxes, address, init=None)


def follow_invalid_boxes(rank: int, address: str) -> None:
    with zs.init(address, name="boxes"):
        bare = models.mlp()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        group_sharded_parallel(bare, optimizer, "os")
        weight = "layers.0.weight"
        for boxes, match in (
            ({"nothing": [(0, 1)]}, "nothing"),
            ({weight: [(0, 16)]}, r"shape, \[32, 20\]"),
            ({weight: [(17, 16), (0, 20)]}, r"shape, \[32, 20\]"),
            ({weight: [(-1, 16), (0, 20)]}, "the first index and the number of indices"),
            ({weight: [0, 16]}, "the first index and the number of indices"),
        ):
            with pytest.raises(zs.InvalidArgumentError, match=match):
                follow("boxes", boxes=boxes)  # type: ignore[arg-type]
        with pytest.raises(zs.InvalidArgumentError, match="does not follow"):
            follow("boxes", boxes=boxes_of(0), tensors=[weight])
        with pytest.raises(zs.InvalidArgumentError, match="mirror"):
            follow("boxes", boxes=boxes_of(0), mirror="127.0.0.1:1")
        with follow("boxes", boxes=boxes_of(0)) as versions:
            with pytest.raises(zs.InvalidArgumentError, match=r"receives \[16, 20\]"):
                next(versions).apply(models.mlp())


def test_boxes_that_do_not_fit_are_refused() -> None:
    with servers(1) as address:
        ranks.run(1, follow_invalid_boxes, address, init=None)


def follow_in_error(rank: int, address: str) -> None:
    with zs.init(address, name="errors"):
        bare = models.mlp()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        model, optimizer, _ = group_sharded_parallel(bare, optimizer, "os")
        with pytest.raises(zs.InvalidArgumentError, match="float64"):
            follow("errors", dtype=torch.float64)
        with pytest.raises(zs.InvalidArgumentError, match="0 jobs"):
            follow("nothing")
        with pytest.raises(zs.InvalidArgumentError, match="nothing"):
            follow("errors", tensors=["nothing"])
        with follow("errors", seconds=0.5) as versions:
            version = next(versions)
            before = state_of(other := models.mlp().to(torch.bfloat16))
            with pytest.raises(zs.InvalidArgumentError, match="dtype=torch.bfloat16"):
                version.apply(other)
            with pytest.raises(zs.InvalidArgumentError, match=r"no tensors.*layers"):
                version.apply(nn.Linear(2, 2))
            assert_same(other.state_dict(), before)
            version.apply(fresh := models.mlp())
            assert_same(fresh.state_dict(), state_of(model))
            with pytest.raises(zs.TimeoutError, match="errors"):
                next(versions)
        with pytest.raises(zs.InvalidArgumentError, match="closed"):
            next(versions)


def test_what_cannot_be_followed_or_applied_is_refused() -> None:
    with servers(1) as address:
        ranks.run(1, follow_in_error, address, init=None)
