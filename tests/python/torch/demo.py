"""The network of Paddle's DistModel documentation, batches for it, and the results of plain
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.torch import DistModel, ProcessMesh, Shard, Strategy, shard_tensor, to_static

#: By the stage of sharding.
LEVELS = {1: "os", 2: "os_g", 3: "p_g_os"}


class DemoNet(nn.Module):
    """Two Linears. With a mesh, their weights are sharded and their biases are not."""

    def __init__(self, mesh: ProcessMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear_0, self.linear_1, self.relu = nn.Linear(16, 16), nn.Linear(16, 8), nn.ReLU()
        if mesh is not None:
            # torch's weights are outputs by inputs, the page's are inputs by outputs.
            self.linear_0.weight = shard_tensor(
                self.linear_0.weight, mesh, [Shard(0)], stop_gradient=False
            )
            self.linear_1.weight = shard_tensor(
                self.linear_1.weight, mesh, [Shard(1)], stop_gradient=False
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(self.relu(self.linear_0(x)))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, 16, generator=generator), torch.rand(4, 8, generator=generator)


def strategy(stage: int) -> Strategy:
    """A strategy with the given sharding stage."""
    return Strategy({"sharding": {"enable": True, "stage": stage}})


def dense_losses(
    steps: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> list[float]:
    """The losses of plain torch."""
    model, losses = DemoNet(), []
    stepper = optimizer(model.parameters(), lr=0.1)
    for step in range(steps):
        images, labels = batch(step)
        loss = nn.functional.mse_loss(model(images), labels)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def made(mesh: ProcessMesh | None = None, stage: int = 1, **other: Any) -> DistModel:
    """A DistModel with a loss and an optimizer."""
    layer = DemoNet(mesh)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    return to_static(layer, None, nn.MSELoss(), optimizer, strategy(stage), **other)


def snapshot(model: DistModel) -> tuple[dict[str, Tensor], int]:
    """The parameters and the version on the servers."""
    assert model.optimizer is not None
    state = {name: value.clone() for name, value in model.state_dict("param").items()}
    return state, model.optimizer.sharding.job.version


def plain(state: dict[str, Tensor]) -> nn.Module:
    """A plain torch model with the given state."""
    model = DemoNet()
    model.load_state_dict(
        {name: value for name, value in state.items() if not name.startswith("norm")}
    )
    return model
