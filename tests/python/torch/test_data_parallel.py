"""DataParallel on several ranks with an embedded cluster."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ranks
import zeroshard as zs
from zeroshard.torch import DataParallel, fused_allreduce_gradients

pytestmark = pytest.mark.filterwarnings("ignore:one process")


class Scale(nn.Module):
    """``weight * x``: the gradient of the sum is ``x``."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Two(nn.Module):
    """Two parameters. The forward arguments determine which of them is used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always * x + (self.sometimes * x if both else 0)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


# One process


def test_a_single_process_works_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="single process"):
        wrapped = DataParallel(Scale())
    wrapped(numbers(3.0)).sum().backward()
    assert wrapped.weight.grad == numbers(3.0)


def one_process_without_cluster(rank: int) -> bool:
    wrapped = DataParallel(Scale())
    wrapped(numbers(3.0)).sum().backward()
    fused_allreduce_gradients(wrapped.parameters())
    with contextlib.suppress(zs.NotInitialisedError):
        zs.status()
        return False
    return True


def test_a_single_process_needs_no_cluster() -> None:
    assert ranks.run(1, one_process_without_cluster, init=None) == [True]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(zs.InvalidArgumentError, match="no parameter"):
        DataParallel(nn.ReLU())
    with pytest.raises(zs.InvalidArgumentError, match="no parameter"):
        DataParallel(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("size", ["comm_buffer_size", "last_comm_buffer_size"])
def test_a_negative_size_is_refused(size: str) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=size):
        DataParallel(Scale(), **{size: -1})


def test_another_type_than_a_module_is_refused() -> None:
    with pytest.raises(zs.InvalidArgumentError, match="must be a torch.nn.Module"):
        DataParallel(lambda x: x)  # type: ignore[arg-type]


def test_strategy_is_accepted_and_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="strategy"):
        DataParallel(Scale(), object())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        DataParallel(Scale(), None)


# Buckets


def parameters(numels: list[int], dtypes: list[torch.dtype] | None = None) -> nn.Module:
    dtypes = dtypes or [torch.float32] * len(numels)
    return nn.ParameterList(
        nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in zip(numels, dtypes)
    )


def test_buckets_close_when_they_reach_their_size() -> None:
    wrapped = DataParallel(parameters([100_000, 100_000, 200_000, 1_000_000, 7_000_000, 10]))
    assert wrapped.buckets == [[0, 1, 2], [3, 4], [5]]


def test_a_bucket_has_one_dtype() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    assert DataParallel(parameters([4, 4, 4, 4], dtypes)).buckets == [[0, 2], [1, 3]]


def test_sizes_are_in_megabytes() -> None:
    quarter = (1 << 20) // 4
    wrapped = DataParallel(parameters([quarter] * 5), comm_buffer_size=2, last_comm_buffer_size=0.5)
    assert wrapped.buckets == [[0], [1, 2], [3, 4]]


class Chain(nn.Module):
    """Layers in sequence. Records the end of the backward pass."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda _: self.log.append("input"))
        for layer in self.layers:
            x = layer(x)
        return x


def order_of_sends(rank: int) -> list[Any]:
    log: list[Any] = []
    wrapped = DataParallel(Chain(log), comm_buffer_size=1e-4, last_comm_buffer_size=1e-6)
    assert wrapped.buckets == [[0], [1, 2], [3]]
    averager: Any = wrapped._reducer.averager
    send = averager.send
    averager.send = lambda parameters, indices: (
        log.append(list(indices)),
        send(parameters, indices),
    )
    wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return [entry for entry in log if entry]


def test_buckets_are_sent_in_reverse_order_during_backward() -> None:
    for log in ranks.run(2, order_of_sends):
        assert log[:2] == [[3], [1, 2]] and sorted(map(str, log[2:])) == ["[0]", "input"]


# Construction


class Mixed(nn.Module):
    """Parameters and buffers of different dtypes and shapes."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.full((3, 5), value / 3))
        self.bf16 = nn.Parameter(torch.full((7,), value / 3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(value / 3))
        self.tied = self.plain
        self.turned = nn.Parameter(torch.full((2, 6), value / 3).t())
        self.frozen = nn.Parameter(
            torch.full((3,), value / 3, dtype=torch.float64), requires_grad=False
        )
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(3)
        self.norm.num_batches_tracked += value
        self.register_buffer("flags", torch.tensor([value > 1, False, True]))
        self.register_buffer("nan", torch.full((2,), float("nan")))
        self.register_buffer("hidden", torch.full((2,), value / 7), persistent=False)

    def forward(self) -> Tensor:
        return self.plain.sum()


def constructed(rank: int) -> bool:
    with zs.init():
        return _constructed(rank)


def _constructed(rank: int) -> bool:
    wrapped, reference = DataParallel(Mixed(rank + 1)), Mixed(1)
    assert wrapped.tied is wrapped.plain
    # Rank 0 hosts the cluster: it must not end before the others have begun.
    wrapped().backward()
    pairs = zip(wrapped.module.named_parameters(), reference.named_parameters(), strict=True)
    buffers = zip(wrapped.module.named_buffers(), reference.named_buffers(), strict=True)
    return all(
        ours.dtype == theirs.dtype
        and ours.stride() == theirs.stride()
        and ours.equal(theirs)
        or "nan" in name
        for (name, ours), (_, theirs) in [*pairs, *buffers]
    )


@pytest.mark.parametrize("init", ["gloo", "env"])
def test_construction_broadcasts_parameters_and_buffers_of_rank_0(init: str) -> None:
    assert ranks.run(2, constructed, init=init) == [True, True]


def different_models(rank: int) -> str:
    zs.init(timeout=3)
    try:
        DataParallel(Scale(2 + rank))
    except zs.Error as error:
        return type(error).__name__
    return "none"


def test_different_models_are_refused(pair: ranks.Team) -> None:
    assert pair.run(different_models) == ["DisagreementError"] * 2


# Gradients


def mean_gradient(rank: int) -> float:
    with zs.init():
        return _mean_gradient(rank)


def _mean_gradient(rank: int) -> float:
    wrapped = DataParallel(Scale())
    for step in range(3):
        wrapped.zero_grad()
        wrapped(numbers([1.0, 4.0][rank] + step)).sum().backward()
        assert wrapped.weight.grad == numbers(2.5 + step)
    return wrapped.weight.grad.item()


@pytest.mark.parametrize("init", ["gloo", "env"])
def test_gradients_are_the_mean_over_the_ranks(init: str) -> None:
    assert ranks.run(2, mean_gradient, init=init) == [4.5, 4.5]


def gradients_like(rank: int, kind: str) -> tuple[Tensor, Tensor]:
    """The gradients of a model whose gradients have that form, and the mean of both ranks' local
    gradients."""
    torch.manual_seed(1)
    if kind == "sparse":
        model: nn.Module = nn.Embedding(5, 3, sparse=True)
        data = torch.tensor([[0, 1, 1], [1, 2, 4]])
    elif kind == "channels last":
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        data = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    else:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
        model, data = nn.Linear(3, 2).to(dtype), torch.randn(2, 3).to(dtype)
    local = []
    for part in range(2):
        model.zero_grad()
        model(data[part : part + 1]).square().sum().backward()
        local.append(model.weight.grad.to_dense().float())
    model.zero_grad()
    wrapped = DataParallel(model)
    wrapped(data[rank : rank + 1]).square().sum().backward()
    gradient = wrapped.weight.grad
    assert gradient.dtype == wrapped.weight.dtype and gradient.stride() == wrapped.weight.stride()
    return gradient, ((local[0] + local[1]) / 2).to(gradient.dtype)


@pytest.mark.parametrize("kind", ["sparse", "channels last", "bf16", "f16"])
def test_gradients_of_any_layout_and_dtype_are_averaged(kind: str, pair: ranks.Team) -> None:
    for gradient, mean in pair.run(gradients_like, kind):
        torch.testing.assert_close(gradient, mean, rtol=1e-6, atol=0)


def gradients_of_a_group(rank: int) -> float | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    wrapped = DataParallel(Scale(), group=group)
    wrapped(numbers(10.0 * (rank + 1))).sum().backward()
    return wrapped.weight.grad.item()


def test_a_group_averages_among_itself() -> None:
    assert ranks.run(3, gradients_of_a_group) == [20.0, None, 20.0]


# no_sync


def without_sync(rank: int, forward_inside: bool, backward_inside: bool) -> float:
    wrapped = DataParallel(Scale())
    with wrapped.no_sync() if forward_inside else contextlib.nullcontext():
        loss = wrapped(numbers(rank + 1.0)).sum()
    with wrapped.no_sync() if backward_inside else contextlib.nullcontext():
        loss.backward()
    return wrapped.weight.grad.item()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_no_sync_applies_to_the_forward(backward_inside: bool, pair: ranks.Team) -> None:
    assert pair.run(without_sync, True, backward_inside) == [1.0, 2.0]
    assert pair.run(without_sync, False, backward_inside) == [1.5, 1.5]


def accumulated(rank: int) -> float:
    wrapped = DataParallel(Scale())
    with wrapped.no_sync():
        wrapped(numbers(1.0 + rank)).sum().backward()
        assert wrapped.weight.grad == numbers(1.0 + rank)
    wrapped(numbers(10.0 * (1 + rank))).sum().backward()
    return wrapped.weight.grad.item()


def test_accumulated_gradients_are_part_of_the_next_averaging(pair: ranks.Team) -> None:
    assert pair.run(accumulated) == [16.5, 16.5]


def accumulated_and_unused(rank: int) -> float:
    wrapped = DataParallel(Two())
    with wrapped.no_sync():
        wrapped(numbers(2.0 + rank), True).sum().backward()
    wrapped(numbers(1.0), False).sum().backward()
    return wrapped.sometimes.grad.item()


def test_gradients_accumulated_under_no_sync_are_averaged_if_unused_later(pair: ranks.Team) -> None:
    assert pair.run(accumulated_and_unused) == [2.5, 2.5]


# Unused parameters


def unused(rank: int, find: bool, used_on: tuple[int, ...]) -> float | None | str:
    wrapped = DataParallel(Two(), find_unused_parameters=find)
    for _ in range(2):
        wrapped.zero_grad()
        try:
            wrapped(numbers(1.0), rank in used_on).sum().backward()
        except zs.UnusedParameterError as error:
            result: float | None | str = str(error)
            continue
        assert wrapped.always.grad == numbers(1.0)
        gradient = wrapped.sometimes.grad
        result = None if gradient is None else gradient.item()
    return result


def test_a_parameter_used_on_another_rank_gets_the_average(pair: ranks.Team) -> None:
    assert pair.run(unused, True, (0,)) == [0.5, 0.5]
    assert pair.run(unused, True, (1,)) == [0.5, 0.5]


@pytest.mark.parametrize("find", [True, False])
def test_a_parameter_unused_on_all_ranks_has_no_gradient(find: bool, pair: ranks.Team) -> None:
    assert pair.run(unused, find, ()) == [None, None]


@pytest.mark.parametrize("used_on", [0, 1])
def test_a_parameter_unused_on_one_rank_is_an_error_on_every_rank_by_default(
    used_on: int, pair: ranks.Team
) -> None:
    for message in pair.run(unused, False, (used_on,)):
        assert "'sometimes'" in message and f"rank {1 - used_on}" in message


@pytest.mark.parametrize("find", [True, False])
def test_a_parameter_used_everywhere_gets_the_average(find: bool, pair: ranks.Team) -> None:
    assert pair.run(unused, find, (0, 1)) == [1.0, 1.0]


# One backward pass, in unusual ways


class Shared(nn.Module):
    """A layer in two reentrant checkpoints, whose backward passes run inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, twice: bool) -> Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True) if twice else x


def ready_twice(rank: int) -> tuple[str, float]:
    wrapped = DataParallel(Shared())
    with pytest.raises(zs.InvalidArgumentError) as error:
        wrapped(torch.ones(1, 2), True).sum().backward()
    # The next step is none the worse for it.
    wrapped.zero_grad()
    wrapped(torch.ones(1, 2), False).sum().backward()
    return str(error.value), wrapped.layer.bias.grad[0].item()


def test_a_parameter_ready_twice_in_one_backward_is_an_error(pair: ranks.Team) -> None:
    for message, gradient in pair.run(ready_twice):
        assert "'layer." in message and "twice" in message
        assert gradient == 1.0


def several_passes(rank: int) -> tuple[float, float]:
    wrapped = DataParallel(Scale())
    (wrapped(numbers(1.0 + rank)) + wrapped(numbers(10.0 + rank))).sum().backward()
    one_loss = wrapped.weight.grad.item()
    wrapped.zero_grad()
    losses = [wrapped(numbers(1.0 + rank)).sum(), wrapped(numbers(10.0 + rank)).sum()]
    for loss in losses:
        loss.backward()
    return one_loss, wrapped.weight.grad.item()


def test_several_forward_passes_may_come_before_backward(pair: ranks.Team) -> None:
    assert pair.run(several_passes) == [(12.0, 12.0)] * 2


def failed_backward(rank: int) -> float:
    wrapped = DataParallel(nn.Sequential(Scale(), Scale()), last_comm_buffer_size=0)

    def fail(gradient: Tensor) -> None:
        raise KeyError("by the user")

    hidden = wrapped.module[0](numbers(1.0 + rank))
    hidden.register_hook(fail)
    with pytest.raises(KeyError):
        # Through the wrapper, so that it is synchronised, with a failure between both parameters.
        handle = wrapped.module[0].register_forward_hook(lambda *_: hidden)
        wrapped(numbers(0.0)).sum().backward()
    handle.remove()
    wrapped.zero_grad()
    wrapped(numbers(1.0 + rank)).sum().backward()
    return wrapped.module[1].weight.grad.item()


def test_a_failed_backward_pass_does_not_affect_the_next_one(pair: ranks.Team) -> None:
    assert pair.run(failed_backward) == [1.5, 1.5]


def thawed(rank: int) -> tuple[list[float | None], int]:
    wrapped = DataParallel(Two())
    wrapped.sometimes.requires_grad_(False)
    gradients: list[float | None] = []
    for step in range(3):
        wrapped.zero_grad()
        wrapped.sometimes.requires_grad_(step == 1)
        wrapped(numbers(1.0 + rank), True).sum().backward()
        gradients.append(None if wrapped.sometimes.grad is None else wrapped.sometimes.grad.item())
        assert wrapped.always.grad == numbers(1.5)
    return gradients, len(wrapped._reducer._retired)


def test_a_parameter_that_is_frozen_or_unfrozen_later_is_noticed(pair: ranks.Team) -> None:
    assert pair.run(thawed) == [([None, 1.5, None], 0)] * 2


def all_frozen_for_a_while(rank: int) -> tuple[float, int]:
    wrapped = DataParallel(Scale())
    for step in range(3):
        wrapped.zero_grad()
        wrapped.requires_grad_(step != 1)
        loss = wrapped(numbers(1.0 + rank).requires_grad_()).sum()
        loss.backward()
        assert (wrapped.weight.grad is None) == (step == 1)
    return wrapped.weight.grad.item(), len(zs.status().jobs)


def test_a_temporarily_frozen_module_keeps_its_job(pair: ranks.Team) -> None:
    assert pair.run(all_frozen_for_a_while) == [(1.5, 1)] * 2


def compiled(rank: int, inside: bool) -> float:
    model = Scale()
    if inside:
        wrapped: Any = DataParallel(torch.compile(model, backend="aot_eager"))
    else:
        wrapped = torch.compile(DataParallel(model), backend="aot_eager")
    wrapped(numbers(1.0 + rank)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_module_is_synchronised(inside: bool) -> None:
    assert ranks.run(2, compiled, inside) == [1.5, 1.5]
