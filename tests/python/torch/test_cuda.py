"""Models on a GPU, whose parameters and gradients are copied through pinned host memory on streams
of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import assert_close
from zeroshard.torch import group_sharded_parallel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device here"
)

LEVELS = ["os", "os_g", "p_g_os"]
STEPS = 20


def train(
    level: str | None, passes: int = 1, group_size: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the state of a GPT with tied embeddings on the GPU. Without a level, in plain
    torch."""
    model = models.build("gpt").cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(
            model, optimizer, level, segment_size=64, group_size=group_size
        )
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            batch = models.batch("gpt", index * passes + part, 8)
            loss = model(*(tensor.cuda() for tensor in batch))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_losses_on_a_gpu_are_those_of_torch(level: str, passes: int, cluster: zs.Session) -> None:
    expected, expected_state = train(None, passes)
    losses, state = train(level, passes)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_close(state, expected_state)


def train_in_a_group(rank: int) -> list[list[float]]:
    with zs.init(shards=2):
        return [train(level, group_size=2)[0] for level in LEVELS]


def test_two_ranks_in_a_group_on_a_gpu_have_the_losses_of_one() -> None:
    expected, _ = train(None)
    for losses in [found for rank in ranks.run(2, train_in_a_group) for found in rank]:
        assert losses == pytest.approx(expected, rel=1e-4)


class Layers(nn.Module):
    """Layers of 64 MiB each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(count)))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result.square().mean()


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_a_gradient_is_freed_when_it_was_copied(level: str, cluster: zs.Session) -> None:
    count, layer = 24, 4096 * 4096 * 4
    model: nn.Module = Layers(count).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, accumulation_steps=1)
    inputs = torch.randn(256, 4096, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < before + layer
        # The gradients of three layers are sent while those of others are computed. At p_g_os there
        # are gathered parameters as well.
        assert torch.cuda.max_memory_allocated() < before + 10 * layer
        optimizer.step()


def test_backward_does_not_wait_for_copies(cluster: zs.Session) -> None:
    # So few that the host may be ahead of the device by their copies.
    model: nn.Module = Layers(2).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g", accumulation_steps=1)
    inputs = torch.randn(256, 4096, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(inputs)
        # The device is busy for seconds, and backward returns meanwhile.
        torch.cuda._sleep(4_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        loss.backward()
        assert not busy.query()
        optimizer.step()


def contexts_after_training_on_the_second_gpu(rank: int) -> list[bool]:
    torch.cuda.set_device(1)
    with zs.init(shards=1):
        for level in LEVELS:
            train(level)
    return [torch._C._cuda_hasPrimaryContext(device) for device in (0, 1)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs")
def test_threads_that_copy_use_no_other_gpu() -> None:
    assert ranks.run(1, contexts_after_training_on_the_second_gpu) == [[False, True]]
