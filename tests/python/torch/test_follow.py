# promise: consistent-reads
"""Programs follow a job, and receive what each step has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from servers import servers
from training import assert_same
from zeroshard.torch import follow, group_sharded_parallel


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(*models.batch("cnn", number, 8)).backward()
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
