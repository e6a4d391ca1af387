"""Shared memory with servers on the same host, and gRPC, give the same results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel


def trained(level: str, transport: str, address: str) -> tuple[str, list[torch.Tensor]]:
    """The hash and the parameters after three steps."""
    # An earlier test may have left a session open.
    zs.shutdown()
    with zs.init(address, transport=transport):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 400))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=1000)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 400), step + 1.0)).square().mean().backward()
            optimizer.step()
        values = [value.clone() for value in model.state_dict().values()]
        return optimizer.state_hash(), values


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_every_transport_has_the_same_results(level: str, processes: dict[str, str]) -> None:
    address = processes["ZEROSHARD_ADDRESS"]
    expected, values = trained(level, "grpc", address)
    for transport in ("shm", "auto"):
        found, again = trained(level, transport, address)
        assert found == expected
        assert all(torch.equal(one, other) for one, other in zip(values, again, strict=True))


def test_an_unknown_transport_is_an_error_that_lists_the_others(
    monkeypatch: pytest.MonkeyPatch, processes: dict[str, str]
) -> None:
    zs.shutdown()
    address = processes["ZEROSHARD_ADDRESS"]
    with pytest.raises(zs.InvalidArgumentError, match="auto, grpc or shm"):
        zs.init(address, transport="tcp")
    monkeypatch.setenv("ZEROSHARD_TRANSPORT", "rdma")
    with pytest.raises(zs.InvalidArgumentError, match="auto, grpc or shm"):
        zs.init(address)
