"""The last gradient of a parameter that a script removes from its optimizer: ``zero_grad`` of the
optimizer no longer drops it, and further backward passes add to it. With ZeroShard it is torch's,
or reading it is an error if the values are on the servers no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ranks
import zeroshard as zs
from training import LEVELS
from zeroshard.torch import group_sharded_parallel

INPUTS = torch.linspace(-1, 1, 48).reshape(8, 6)
GONE = "gone"

#: Scripts, and whether the values are gone at ``os_g`` and ``p_g_os``, where a step frees them.
SCRIPTS = {
    "backward remove step read": False,
    "backward remove step zero_grad backward read": False,
    "backward read remove step read": False,
    "backward read remove zero_grad read": False,
    "backward read remove zero_grad backward read": False,
    "backward halve remove step read": False,
    "backward write remove zero_grad backward read": False,
    "backward step zero_grad backward remove step read": False,
    "backward step zero_grad remove backward step zero_grad backward read": False,
    "backward step remove set_to_none backward read": False,
    "backward step remove forward read": True,
    "backward step remove zero_grad read": True,
    "backward step remove zero_grad backward read": True,
    "backward step remove zero_grad backward step read": True,
}


def run(script: str, level: str | None, rank: int = 0, world: int = 1) -> list[Any]:
    """Returns what the script reads, and then the values of the model."""
    torch.manual_seed(3)
    raw = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6))
    model: Any = raw
    optimizer: Any = torch.optim.SGD(raw.parameters(), lr=0.1)
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(raw, optimizer, level, segment_size=32)
    weight, found = raw[0].weight, []
    for number, word in enumerate(script.split()):
        if word == "backward":
            model((INPUTS + number).chunk(world)[rank]).square().mean().backward()
        elif word == "forward":
            model(INPUTS)
        elif word == "read":
            try:
                found.append(None if weight.grad is None else weight.grad.tolist())
            except zs.InvalidArgumentError as error:
                assert "before you remove a parameter from the optimizer" in str(error)
                found.append(GONE)
        elif word == "halve":
            weight.grad.mul_(0.5)
        elif word == "write":
            weight.grad.add_(1.0)
        elif word == "remove":
            optimizer.param_groups[0]["params"].pop(0)
        elif word == "set_to_none":
            weight.grad = None
        else:
            getattr(optimizer, word)()
    return [*found, {name: value.tolist() for name, value in model.state_dict().items()}]


def assert_as_torch(found: list[Any], script: str, level: str) -> None:
    expected = run(script, None)
    if SCRIPTS[script] and level != "os":
        assert GONE in found
        expected = [GONE if value == GONE else own for own, value in zip(expected, found)]
    assert len(found) == len(expected)
    for value, own in zip(found, expected):
        if value != GONE:
            assert (value is None) == (own is None)
            torch.testing.assert_close(tensors(value), tensors(own))


def tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: torch.tensor(each) for name, each in value.items()}
    return None if value is None else torch.tensor(value)


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_a_removed_parameter_is_that_of_torch_or_an_error(
    level: str, cluster: zs.Session
) -> None:
    for script in SCRIPTS:
        assert_as_torch(run(script, level), script, level)


def on_a_rank(rank: int) -> dict[str, list[Any]]:
    return {
        f"{level} {script}": run(script, level, rank, 2)
        for level in ("os", "p_g_os")
        for script in SCRIPTS
    }


def test_on_two_ranks_it_is_the_mean(pair: ranks.Team, processes: dict[str, str]) -> None:
    for found in pair.run(on_a_rank, env=processes):
        for name, values in found.items():
            level, script = name.split(maxsplit=1)
            assert_as_torch(values, script, level)
