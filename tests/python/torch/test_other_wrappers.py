# promise: no-silent-difference
"""Wrappers of other libraries that a script has left around the model, or in it, are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
import zeroshard as zs
from training import LEVELS, assert_close
from zeroshard.torch import DataParallel, group_sharded_parallel

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu")
    ),
    "FSDPModule": lambda model: fully_shard(model, mesh=_mesh()),
    "DataParallel": lambda model: on_two_devices(model),
}


def on_two_devices(model: nn.Module) -> nn.Module:
    """As ``nn.DataParallel`` of a process that sees two devices."""
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0, 1]
    return wrapped


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def shard(model: nn.Module, level: str) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return group_sharded_parallel(model, optimizer, level, segment_size=16)[0]


def error_of(call: Callable[[], Any]) -> str:
    """The message of the refusal."""
    try:
        call()
    except zs.InvalidArgumentError as error:
        return str(error)
    return "not refused"


def refusals(rank: int) -> dict[str, str]:
    """The message for each wrapper, around the model, in it, and around the wrapped model."""
    found = {}
    ways = {level: lambda model, level=level: shard(model, level) for level in LEVELS}
    ways["DataParallel"] = DataParallel
    for name, other in WRAPPERS.items():
        for way, wrap in ways.items():
            found[f"{way} of {name}"] = error_of(lambda: wrap(other(net())))
            part = net()
            part[0] = other(part[0])
            found[f"{way} of a part in {name}"] = error_of(lambda: wrap(part))
            if name == "DataParallel":
                continue  # has no effect without devices
            inner = wrap(net())
            found[f"{name} of {way}"] = error_of(lambda: other(inner)(torch.ones(2, 8)))
    found["DataParallel in os"] = error_of(lambda: shard(DataParallel(net()), "os"))
    found["os in DataParallel"] = error_of(lambda: DataParallel(shard(net(), "os")))
    return found


def test_a_wrapper_that_exchanges_gradients_itself_is_named_and_refused() -> None:
    [found] = ranks.run(1, refusals)
    assert len(found) == 3 * 4 * 3 + 4 * 2 + 2
    unnamed = {
        case: message
        for case, message in found.items()
        if not any(name in message for name in ("DataParallel", "FSDP", "GroupSharded"))
    }
    assert unnamed == {}


def test_torchs_data_parallel_of_one_device_has_no_effect(cluster: zs.Session) -> None:
    def train(level: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = net()
        model[0] = nn.DataParallel(model[0])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if level is not None:
            model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=16)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = train(None)
    for level in LEVELS:
        assert_close(train(level), expected)
