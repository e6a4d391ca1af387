"""Models with parameters of every kind that scripts have: slices of larger memory, and frozen bases
in dtypes that nobody trains, as in QLoRA."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from training import LEVELS, assert_close, assert_same
from zeroshard.torch import group_sharded_parallel

#: Of a frozen base.
DTYPES = ("int8", "uint8", "bool", "int64", "float64", "float8_e4m3fn", "float8_e5m2", "bfloat16")


class Strided(nn.Module):
    """Parameters that are not contiguous: dense ones in another order, and slices with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(8, 12).t())
        self.columns = nn.Parameter(torch.randn(12, 10)[:, ::2])
        whole = torch.randn(5, 20)
        self.left = nn.Parameter(whole[:, :8])
        self.right = nn.Parameter(whole[:, 8:])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(self.image(inputs).relu().mean((2, 3)), self.transposed) @ self.columns
        return (hidden @ self.left).sum() + (hidden @ self.right).square().mean()


class Quantised(nn.Module):
    """A frozen base in some dtype, with a trained low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, dtype: str) -> None:
        super().__init__()
        base = (torch.randn(outputs, inputs) * 20).to(getattr(torch, dtype))
        self.base = nn.Parameter(base, requires_grad=False)
        self.scale = nn.Parameter(torch.full((outputs, 1), 0.05), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.1)
        self.up = nn.Parameter(torch.randn(outputs, 2) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        adapted = F.linear(F.linear(inputs, self.down), self.up)
        return F.linear(inputs, self.base.float() * self.scale) + adapted


def quantised() -> nn.Module:
    """A layer in each dtype."""
    return nn.Sequential(*(Quantised(6, 6, dtype) for dtype in DTYPES))


def train(make: Callable[[], nn.Module], inputs: Tensor, level: str | None) -> dict[str, Tensor]:
    """Trains with AdamW and clipping, saves and loads, and trains on. Returns the losses, norms and
    parameters."""
    torch.manual_seed(7)
    model: Any = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.01)
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=4)
    found: dict[str, Tensor] = {}
    for step in range(4):
        optimizer.zero_grad()
        loss = model(inputs + step).square().mean()
        loss.backward()
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
        if step == 1:
            saved = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), saved)
            saved.seek(0)
            parameters, state = torch.load(saved)
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
    state = model.state_dict().items()
    return found | {f"{name} in {value.dtype}": value.detach().double() for name, value in state}


def check(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    """Compares the levels with torch, and bit by bit with each other."""
    plain = train(make, inputs, None)
    first, *others = (train(make, inputs, level) for level in LEVELS)
    assert_close(first, plain, rtol=1e-4)
    for other in others:
        assert_same(other, first)


def test_slices_of_larger_memory_train_as_in_torch(cluster: zs.Session) -> None:
    inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    check(Strided, inputs.to(memory_format=torch.channels_last))


def test_frozen_bases_of_every_dtype_train_as_in_torch(cluster: zs.Session) -> None:
    check(quantised, torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
