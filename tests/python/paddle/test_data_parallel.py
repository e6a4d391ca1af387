"""DataParallel on several ranks with an embedded cluster."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import zeroshard as zs
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import recompute
from zeroshard.paddle import DataParallel, fused_allreduce_gradients

import ranks

pytestmark = pytest.mark.filterwarnings("ignore:one process")

ONES = nn.initializer.Constant(1.0)


class Scale(nn.Layer):
    """``weight * x``: the gradient of the sum is ``x``."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = self.create_parameter([size], default_initializer=ONES)

    def forward(self, x: Any) -> Any:
        return self.weight.astype(x.dtype) * x


class Two(nn.Layer):
    """Two parameters. The forward arguments determine which of them is used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = self.create_parameter([1], default_initializer=ONES)
        self.sometimes = self.create_parameter([1], default_initializer=ONES)

    def forward(self, x: Any, both: bool) -> Any:
        return self.always * x + (self.sometimes * x if both else 0)


class Many(nn.Layer):
    """Parameters with the given numbers of elements."""

    def __init__(self, numels: list[int], dtypes: list[str] | None = None) -> None:
        super().__init__()
        dtypes = dtypes or ["float32"] * len(numels)
        for number, (numel, dtype) in enumerate(zip(numels, dtypes)):
            self.add_parameter(
                f"p{number}", self.create_parameter([numel], dtype=dtype, default_initializer=ONES)
            )


def numbers(*values: float) -> Any:
    return paddle.to_tensor(list(values), dtype="float32")


def value(tensor: Any) -> float | None:
    return None if tensor is None else float(tensor.sum())


# One process


def test_a_single_process_works_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="single process"):
        wrapped = DataParallel(Scale())
    wrapped(numbers(3.0)).sum().backward()
    assert value(wrapped.weight.grad) == 3.0
    assert isinstance(wrapped, paddle.DataParallel)


def one_process_without_cluster(rank: int) -> bool:
    wrapped = DataParallel(Scale())
    wrapped(numbers(3.0)).sum().backward()
    fused_allreduce_gradients(wrapped.parameters(), None)
    with contextlib.suppress(zs.NotInitialisedError):
        zs.status()
        return False
    return True


def test_a_single_process_needs_no_cluster() -> None:
    assert ranks.run(1, one_process_without_cluster, init=False) == [True]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    frozen = Scale()
    frozen.weight.stop_gradient = True
    for layer in (nn.ReLU(), frozen):
        with pytest.raises(zs.InvalidArgumentError, match="no parameter"):
            DataParallel(layer)


@pytest.mark.parametrize("size", ["comm_buffer_size", "last_comm_buffer_size"])
def test_a_negative_size_is_refused(size: str) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=size):
        DataParallel(Scale(), **{size: -1})


def test_another_type_than_a_layer_is_refused() -> None:
    with pytest.raises(zs.InvalidArgumentError, match="must be a paddle.nn.Layer"):
        DataParallel(lambda x: x)


def test_strategy_is_accepted_and_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="strategy"):
        DataParallel(Scale(), object())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        DataParallel(Scale(), None)


# Buckets


def test_buckets_close_when_they_reach_their_size() -> None:
    wrapped = DataParallel(Many([100_000, 100_000, 200_000, 1_000_000, 7_000_000, 10]))
    assert wrapped.buckets == [[0, 1, 2], [3, 4], [5]]


def test_a_bucket_has_one_dtype() -> None:
    dtypes = ["float32", "bfloat16", "float32", "bfloat16"]
    assert DataParallel(Many([4, 4, 4, 4], dtypes)).buckets == [[0, 2], [1, 3]]


def order_of_sends(rank: int) -> list[Any]:
    log: list[Any] = []
    model = nn.Sequential(*[nn.Linear(4, 4, bias_attr=False) for _ in range(4)])
    wrapped = DataParallel(model, comm_buffer_size=1e-4, last_comm_buffer_size=1e-6)
    assert wrapped.buckets == [[0], [1, 2], [3]]
    averager: Any = wrapped._reducer.averager
    send = averager.send
    averager.send = lambda parameters, indices: (
        log.append(list(indices)),
        send(parameters, indices),
    )
    inputs = paddle.ones([2, 4])
    inputs.stop_gradient = False
    inputs.register_hook(lambda _: log.append("input"))
    wrapped(inputs).sum().backward()
    return [entry for entry in log if entry]


def test_buckets_are_sent_in_reverse_order_during_backward() -> None:
    for log in ranks.run(2, order_of_sends):
        assert log[:2] == [[3], [1, 2]] and sorted(map(str, log[2:])) == ["[0]", "input"]


# Construction


class Mixed(nn.Layer):
    """Parameters and buffers of different dtypes and shapes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        own = nn.initializer.Constant(number / 3)
        self.plain = self.create_parameter([3, 5], default_initializer=own)
        self.bf16 = self.create_parameter([7], dtype="bfloat16", default_initializer=own)
        self.scalar = self.create_parameter([], default_initializer=own)
        self.tied = self.plain
        self.frozen = self.create_parameter([3], dtype="float64", default_initializer=own)
        self.frozen.stop_gradient = True
        self.norm = nn.BatchNorm1D(3)
        self.norm._mean.set_value(paddle.full([3], number / 5))
        self.register_buffer("flags", paddle.to_tensor([number > 1, False, True]))
        self.register_buffer("counts", paddle.to_tensor([number, 2]))
        self.register_buffer("hidden", paddle.full([2], number / 7), persistable=False)

    def forward(self) -> Any:
        return self.plain.sum()


def constructed(rank: int) -> bool:
    wrapped, reference = DataParallel(Mixed(rank + 1)), Mixed(1)
    assert wrapped.tied is wrapped.plain
    wrapped().backward()
    ours = [*wrapped._layers.named_parameters(), *wrapped._layers.named_buffers()]
    theirs = [*reference.named_parameters(), *reference.named_buffers()]
    return [name for name, _ in ours] == [name for name, _ in theirs] and all(
        mine.dtype == other.dtype and np.array_equal(mine.numpy(), other.numpy())
        for (_, mine), (_, other) in zip(ours, theirs)
    )


@pytest.mark.parametrize("init", [True, False], ids=["parallel environment", "launched"])
def test_construction_broadcasts_parameters_and_buffers_of_rank_0(init: bool) -> None:
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


def mean_gradient(rank: int) -> float | None:
    wrapped = DataParallel(Scale())
    for step in range(3):
        wrapped.clear_gradients()
        wrapped(numbers([1.0, 4.0][rank] + step)).sum().backward()
        assert value(wrapped.weight.grad) == 2.5 + step
    return value(wrapped.weight.grad)


def test_gradients_are_the_mean_over_the_ranks(pair: ranks.Team) -> None:
    assert pair.run(mean_gradient) == [4.5, 4.5]


def gradients_like(rank: int, kind: str) -> tuple[Any, Any]:
    """The gradients of a model whose gradients have that form, and the mean of both ranks' local
    gradients."""
    paddle.seed(1)
    if kind == "sparse":
        model: Any = nn.Embedding(5, 3, sparse=True)
        data = paddle.to_tensor([[0, 1, 1], [1, 2, 4]])
    else:
        model, data = Scale(3).to(dtype=kind), paddle.randn([2, 3])
    local = []
    for part in range(2):
        model(data[part : part + 1]).square().sum().backward()
        gradient = model.weight.grad
        if gradient.is_selected_rows():
            dense = np.zeros(model.weight.shape, np.float32)
            np.add.at(dense, list(gradient.rows()), gradient.numpy())
            local.append(dense)
        else:
            local.append(gradient.astype("float32").numpy())
        model.weight.clear_gradient(False)
    wrapped = DataParallel(model)
    wrapped(data[rank : rank + 1]).square().sum().backward()
    gradient = wrapped.weight.grad
    assert gradient.dtype == wrapped.weight.dtype
    mean = (
        paddle.to_tensor((local[0] + local[1]) / 2).astype(gradient.dtype).astype("float32").numpy()
    )
    # A sparse one has all rows now.
    return gradient.numpy() if kind == "sparse" else gradient.astype("float32").numpy(), mean


@pytest.mark.parametrize("kind", ["sparse", "bfloat16"])
def test_gradients_of_any_layout_and_dtype_are_averaged(kind: str, pair: ranks.Team) -> None:
    for gradient, mean in pair.run(gradients_like, kind):
        np.testing.assert_allclose(gradient, mean, rtol=1e-6)


def gradients_of_a_group(rank: int) -> float | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    wrapped = DataParallel(Scale(), group=group)
    wrapped(numbers(10.0 * (rank + 1))).sum().backward()
    return value(wrapped.weight.grad)


def test_a_group_averages_among_itself() -> None:
    assert ranks.run(3, gradients_of_a_group) == [20.0, None, 20.0]


# no_sync


def without_sync(rank: int) -> list[float | None]:
    """Runs forward and backward inside or outside of no_sync."""
    wrapped = DataParallel(Scale())
    found = []
    for forward_inside in (True, False):
        for backward_inside in (True, False):
            wrapped.weight.clear_gradient(False)
            with wrapped.no_sync() if forward_inside else contextlib.nullcontext():
                loss = wrapped(numbers(rank + 1.0)).sum()
            with wrapped.no_sync() if backward_inside else contextlib.nullcontext():
                loss.backward()
            found.append(value(wrapped.weight.grad))
    return found


def test_no_sync_applies_to_the_forward(pair: ranks.Team) -> None:
    assert pair.run(without_sync) == [[1.0, 1.0, 1.5, 1.5], [2.0, 2.0, 1.5, 1.5]]


def accumulated(rank: int) -> float | None:
    wrapped = DataParallel(Scale())
    with wrapped.no_sync():
        wrapped(numbers(1.0 + rank)).sum().backward()
        assert value(wrapped.weight.grad) == 1.0 + rank
    wrapped(numbers(10.0 * (1 + rank))).sum().backward()
    return value(wrapped.weight.grad)


def test_accumulated_gradients_are_part_of_the_next_averaging(pair: ranks.Team) -> None:
    assert pair.run(accumulated) == [16.5, 16.5]


class Tanh(paddle.autograd.PyLayer):
    """An operator with a custom backward."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        y = paddle.tanh(x)
        context.save_for_backward(y)
        return y

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (y,) = context.saved_tensor()
        return gradient * (1 - paddle.square(y))


def fused(rank: int) -> tuple[list[list[float]], int]:
    paddle.seed(4)
    fleet.init(is_collective=True)
    model: Any = DataParallel(nn.Linear(2, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for step in range(3):
        x = numbers(1.0 + rank, -2.0 * step)
        x.stop_gradient = False
        with model.no_sync():
            model(Tanh.apply(x)).mean().backward()
        # Without and with the groups of fleet.
        hcg = fleet.get_hybrid_communicate_group() if step == 2 else None
        fused_allreduce_gradients(list(model.parameters()), hcg)
        optimizer.step()
        optimizer.clear_grad()
    jobs = [job for job in zs.status().jobs if "fused" in job.name]
    return model.weight.numpy().tolist(), len(jobs)


def test_fused_allreduce_gradients_keeps_ranks_equal_with_one_job() -> None:
    first, second = ranks.run(2, fused)
    assert first == second and first[1] == 1


# Unused parameters


def unused(rank: int, find: bool) -> list[Any]:
    """The gradients of parameters used on rank 0, on rank 1, on no rank and on both; or the
    error."""
    wrapped = DataParallel(Two(), find_unused_parameters=find)
    found: list[Any] = []
    for used_on in ((0,), (1,), (), (0, 1)):
        for parameter in wrapped.parameters():
            parameter.clear_gradient(False)
        try:
            wrapped(numbers(1.0), rank in used_on).sum().backward()
        except zs.UnusedParameterError as error:
            found.append(str(error))
            continue
        assert value(wrapped.always.grad) == 1.0
        found.append(value(wrapped.sometimes.grad))
    return found


def test_a_parameter_used_on_some_ranks_gets_the_average_with_find_unused_parameters(
    pair: ranks.Team,
) -> None:
    assert pair.run(unused, True) == [[0.5, 0.5, None, 1.0]] * 2


def test_a_parameter_unused_on_one_rank_is_an_error_on_every_rank_by_default(
    pair: ranks.Team,
) -> None:
    for first, second, *others in pair.run(unused, False):
        assert "'sometimes'" in first and "rank 1" in first
        assert "'sometimes'" in second and "rank 0" in second
        assert others == [None, 1.0]


# One backward pass, in unusual ways


class Shared(nn.Layer):
    """A layer in two recomputed blocks, whose backward passes run inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any, twice: bool) -> Any:
        x = recompute(self.layer, self.first(x))
        return recompute(self.layer, x) if twice else x


def ready_twice(rank: int) -> tuple[str, float]:
    wrapped = DataParallel(Shared())
    with pytest.raises(zs.InvalidArgumentError) as error:
        wrapped(paddle.ones([1, 2]), True).sum().backward()
    # The next step is none the worse for it.
    for parameter in wrapped.parameters():
        parameter.clear_gradient(False)
    wrapped(paddle.ones([1, 2]), False).sum().backward()
    return str(error.value), float(wrapped.layer.bias.grad[0])


def test_a_parameter_ready_twice_in_one_backward_is_an_error(pair: ranks.Team) -> None:
    for message, gradient in pair.run(ready_twice):
        assert "'layer." in message and "twice" in message
        assert gradient == 1.0


def frozen_and_unfrozen(rank: int) -> list[float | None]:
    wrapped = DataParallel(Two())
    found = []
    for step in range(3):
        for parameter in wrapped.parameters():
            parameter.clear_gradient(False)
        wrapped.sometimes.stop_gradient = step != 1
        wrapped(numbers(1.0 + rank), True).sum().backward()
        found.append(value(wrapped.sometimes.grad))
        assert value(wrapped.always.grad) == 1.5
    return found


def test_a_parameter_that_is_frozen_or_unfrozen_later_is_noticed(pair: ranks.Team) -> None:
    assert pair.run(frozen_and_unfrozen) == [[None, 1.5, None]] * 2


# State


def test_state_dict_has_the_keys_of_the_layer() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1D(3))
    wrapped = DataParallel(layer)
    assert list(wrapped.state_dict()) == list(layer.state_dict())
    state = {name: paddle.full_like(tensor, 0.5) for name, tensor in wrapped.state_dict().items()}
    wrapped.set_state_dict(state)
    assert all((tensor.numpy() == 0.5).all() for tensor in layer.state_dict().values())
    wrapped.set_state_dict({layer[0].weight.name: paddle.zeros([2, 3])}, use_structured_name=False)
    assert not layer[0].weight.numpy().any()
