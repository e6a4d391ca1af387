"""The optimizers that torch does not have, compared with the golden vectors of the kernels."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zeroshard.torch import Lion, optim

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
KINDS: dict[str, Any] = {
    name: kind for kind, name in optim.NAMES.items() if kind.__name__ in optim.__all__
}


spec = importlib.util.spec_from_file_location("golden_inputs", GOLDEN / "inputs.py")
assert spec is not None and spec.loader is not None
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)
index = json.loads((GOLDEN / "cases.json").read_text())
CASES = [
    (number, case)
    for number, case in enumerate(index["cases"])
    if case["optimizer"]["name"] in KINDS
]


def make(hyperparameters: dict[str, Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    options = dict(hyperparameters)
    kind = KINDS[options.pop("name")]
    betas = kind([torch.zeros(1)]).defaults["betas"]
    options["betas"] = options.pop("beta1", betas[0]), options.pop("beta2", betas[1])
    return kind(parameters, **options)


@pytest.mark.parametrize("number, case", CASES, ids=[case["case"] for _, case in CASES])
def test_fifty_steps_give_the_golden_vectors(number: int, case: dict[str, Any]) -> None:
    vectors = np.fromfile(GOLDEN / "vectors.f32", "<f4").reshape(
        len(index["cases"]), len(index["recorded"]), -1
    )
    parameters = [
        torch.from_numpy(golden.values(t, 0, size).copy()) for t, size in enumerate(index["sizes"])
    ]
    optimizer = make(case["optimizer"], parameters)
    group = optimizer.param_groups[0]
    lr = group["lr"]
    for step in range(1, index["steps"] + 1):
        group["lr"] = lr * index["lr_factors"][(step - 1) % len(index["lr_factors"])]
        for t, parameter in enumerate(parameters):
            parameter.grad = torch.from_numpy(golden.values(t, step, len(parameter)).copy())
        optimizer.step()
        if step in index["recorded"]:
            expected = vectors[number, index["recorded"].index(step)]
            found = np.concatenate([parameter.numpy() for parameter in parameters])
            # As the servers' own test measures it.
            error = np.abs(found.astype(np.float64) - expected) / np.maximum(np.abs(expected), 1.0)
            assert error.max() <= index["tolerances"][case["optimizer"]["name"]]


@pytest.mark.parametrize("kind", KINDS.values())
def test_state_survives_a_state_dict(kind: Any) -> None:
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    ours, theirs = kind(model.parameters()), kind(other.parameters())
    data = torch.randn(4, 3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(model, ours)
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for trained, optimizer in ((model, ours), (other, theirs)):
        step(trained, optimizer)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_parameter_without_gradient_is_not_changed(kind: Any) -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    optimizer = kind([used, unused], weight_decay=0.5)
    optimizer.step()
    assert not used.equal(torch.ones(2)) and unused.equal(torch.ones(2))
    assert list(optimizer.state) == [used]


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_closure_computes_the_loss(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert kind([parameter]).step(closure) == 2.0
    assert not parameter.equal(torch.ones(2))


@pytest.mark.parametrize("kind", KINDS.values())
def test_hyperparameters_out_of_range_are_refused(kind: Any) -> None:
    wrong: list[dict[str, Any]] = [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"weight_decay": -1.0},
        {"betas": (1.0, 0.9)},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            kind([torch.zeros(1)], **options)


def test_a_learning_rate_may_be_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    Lion([parameter], lr=torch.tensor(0.5)).step()
    assert parameter.item() == 0.5
