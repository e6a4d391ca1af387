# promise: no-silent-difference
"""Programs that write to parameters by hand, in ways that torch does not count: every write has the
effect that it has without ZeroShard."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import GroupSharded, group_sharded_parallel

STEPS = 4


def build(system: str, model: nn.Module | None = None) -> tuple[Any, Any]:
    """A model and its optimizer: ``"plain"``, ``"ddp"`` or at a level."""
    model = model or models.build("mlp")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.01)
    if system == "ddp":
        return DistributedDataParallel(model), optimizer
    if system in LEVELS:
        return group_sharded_parallel(model, optimizer, system, segment_size=SEGMENT)[:2]
    return model, optimizer


def module_of(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel | GroupSharded) else model


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module_of(model).state_dict().items()}


def summoned(model: Any) -> contextlib.AbstractContextManager[Any]:
    return (
        model.summon_full_params() if isinstance(model, GroupSharded) else contextlib.nullcontext()
    )


# ---- what programs write, before the step of each training step and after it


def clamp(model: Any, step: int) -> None:
    """As the critic of a WGAN."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def copy_once(model: Any, step: int) -> None:
    if step == 1:
        for parameter in model.parameters():
            parameter.data.copy_(torch.full_like(parameter, 0.05))


def assign(model: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def assign_what_is_changed_later(model: Any, step: int) -> None:
    with summoned(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
            parameter.data.add_(0.01)


def initialise(model: Any, step: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            module.bias.data.fill_(0.01)

    if step == 1:
        torch.manual_seed(7)
        model.apply(init)


def initialise_summoned(model: Any, step: int) -> None:
    with summoned(model):
        initialise(model, step)


def write_through_numpy(model: Any, step: int) -> None:
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 0.9


def write_to_views(model: Any, step: int) -> None:
    weight = module_of(model).layers[0].weight
    weight.data.view(-1)[3] = 0.5
    weight.detach()[0].mul_(0.5)


def swap_two_elements(model: Any, step: int) -> None:
    weight = module_of(model).layers[0].weight.data
    weight[0, 0], weight[1, 1] = weight[1, 1].item(), weight[0, 0].item()


def decay(model: Any, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def evaluate_with_an_average(model: Any, step: int) -> None:
    """The parameters are replaced by others for an evaluation, and restored."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with torch.no_grad():
        model(*models.batch("mlp", step, 8))
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(value)


def swap_with_an_average(model: Any, step: int) -> None:
    """As a class that keeps an exponential moving average: only ``data`` is assigned."""
    before = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        model(*models.batch("mlp", step, 8))
    for name, parameter in model.named_parameters():
        parameter.data = before[name]


def exchange_data(model: Any, step: int) -> None:
    with summoned(model):
        layer = module_of(model).layers[0].weight
        other = torch.full_like(layer, 0.03) if step else layer.data.clone()
        layer.data, other = other, layer.data
        if step == 2:
            layer.data = other


def evaluate_in_inference_mode(model: Any, step: int) -> None:
    with torch.inference_mode():
        model(*models.batch("mlp", step, 8))
        for parameter in model.parameters():
            parameter.norm()


WRITES: dict[str, Callable[[Any, int], None]] = {
    each.__name__: each
    for each in (
        clamp,
        copy_once,
        assign,
        assign_what_is_changed_later,
        initialise,
        initialise_summoned,
        write_through_numpy,
        write_to_views,
        swap_two_elements,
        decay,
        evaluate_with_an_average,
        swap_with_an_average,
        exchange_data,
        evaluate_in_inference_mode,
    )
}


def train(
    system: str, write: Callable[[Any, int], None], when: str, rank: int = 0, world: int = 1
) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, state and the hash of the servers' state. ``when``: ``"before"`` or ``"after"`` the
    optimizer's step."""
    model, optimizer = build(system)
    losses = []
    name = model.sharding.job.job.name if system in LEVELS else ""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*models.share(models.batch("mlp", step, 8), rank, world))
        loss.backward()
        losses.append(loss.item())
        if when == "before":
            write(model, step)
        optimizer.step()
        if when == "after":
            write(model, step)
    state = state_of(model)
    if system not in LEVELS:
        return losses, state, ""
    assert model.sharding.job.job.name == name, "a write does not create a job"
    optimizer.zero_grad()
    model(*models.share(models.batch("mlp", STEPS, 8), rank, world)).backward()
    optimizer.step()  # sends the last write
    return losses, state, model.sharding.job.state_hash()


def check(write: str, when: str, plain: str, rank: int = 0, world: int = 1) -> None:
    losses, state, _ = train(plain, WRITES[write], when, rank, world)
    hashes = set()
    for level in LEVELS:
        ours, our_state, state_hash = train(level, WRITES[write], when, rank, world)
        torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
        assert_close(our_state, state, rtol=1e-5, atol=1e-6)
        hashes.add(state_hash)
    assert len(hashes) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_parameters_have_the_effect_of_plain_torch(
    write: str, when: str, cluster: zs.Session
) -> None:
    check(write, when, "plain")


def write_on_two_ranks(rank: int) -> None:
    for write in WRITES:
        check(write, "after", "ddp", rank, 2)
    check("clamp", "before", "ddp", rank, 2)


def test_writes_on_two_ranks_have_the_effect_of_data_parallelism(pair: ranks.Team) -> None:
    pair.run(write_on_two_ranks)


class Clipped(nn.Module):
    """A model whose forward writes to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.build("mlp").layers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.layers[0].weight.data.clamp_(-0.1, 0.1)
        self.layers[2].bias.data[:2] = 0.0
        return nn.functional.cross_entropy(self.layers(inputs), targets)


class Momentum(nn.Module):
    """A model with a frozen copy of its layer that follows it, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.build("mlp").layers
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(
                self.teacher.parameters(), self.layers.parameters(), strict=True
            ):
                ours.data = ours.data * 0.9 + theirs.data * 0.1
        logits = self.layers(inputs)
        distance = (logits - self.teacher(inputs)).square().mean()
        return nn.functional.cross_entropy(logits, targets) + distance


@pytest.mark.parametrize("make", [Clipped, Momentum])
@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_may_write_to_parameters(
    level: str, make: Callable[[], nn.Module], cluster: zs.Session
) -> None:
    def train(system: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model, optimizer = build(system, make())
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(*models.batch("mlp", step, 8))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    (losses, plain), (ours, model) = train("plain"), train(level)
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
    assert_close(state_of(model), state_of(plain), rtol=1e-5, atol=1e-6)
    # The servers have the frozen parameters, too.
    whole = model.sharding.reads.whole(dict(model.module.named_parameters()))
    assert_close(whole, dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


def write_differently(rank: int) -> None:
    for level in LEVELS:
        model, optimizer = build(level)
        model(*models.share(models.batch("mlp", 0, 8), rank, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.module.layers[2].weight.data.fill_(0.01 * (rank + 1))
        model(*models.share(models.batch("mlp", 1, 8), rank, 2)).backward()
        message = "rank 0.*rank 1|rank 1.*rank 0"
        with pytest.raises(zs.DisagreementError, match=message) as error:
            optimizer.step()
        assert 'values that the program has written to tensor "layers.2.weight"' in str(error.value)
        # The step can be repeated after the ranks have written the same.
        optimizer.zero_grad()
        model.module.layers[2].weight.data.fill_(0.02)
        model(*models.share(models.batch("mlp", 1, 8), rank, 2)).backward()
        optimizer.step()


def test_ranks_that_write_different_values_are_both_named(pair: ranks.Team) -> None:
    pair.run(write_differently)


def load_on_one_rank(rank: int) -> list[dict[str, Tensor]]:
    states = []
    for level in LEVELS:
        model, optimizer = build(level)
        state = {name: torch.full_like(t, 0.01 + rank) for name, t in state_of(model).items()}
        model.load_state_dict(state)
        states.append(state_of(model))
        model(*models.share(models.batch("mlp", 1, 8), rank, 2)).backward()
        optimizer.step()
    return states


def test_all_ranks_load_the_state_of_rank_0(pair: ranks.Team) -> None:
    first, second = pair.run(load_on_one_rank)
    for ours, theirs in zip(first, second, strict=True):
        assert float(ours["layers.0.weight"][0, 0]) == pytest.approx(0.01)
        assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_keeps_its_shape_and_dtype(level: str, cluster: zs.Session) -> None:
    model, optimizer = build(level)
    weight, bias = model.module.layers[0].weight, model.module.layers[0].bias
    model(*models.batch("mlp", 0, 8)).backward()
    bias.data = torch.zeros(3)
    with pytest.raises(zs.InvalidArgumentError, match=r"'layers.0.bias' was changed.*shape \[3\]"):
        optimizer.step()
    bias.data = torch.zeros(32, dtype=torch.bfloat16)
    with pytest.raises(zs.InvalidArgumentError, match=r"torch.float32 .*to torch.bfloat16"):
        optimizer.step()
    bias.data = torch.zeros(32)
    optimizer.step()
    if level == "p_g_os":
        with pytest.raises(zs.InvalidArgumentError, match="it must be torch.float32 of shape"):
            weight.data = torch.zeros(3)


def train_and_unfreeze(system: str) -> dict[str, Tensor]:
    model, optimizer = build(system)
    layer = module_of(model).layers[2].requires_grad_(False)
    for step in range(6):
        optimizer.zero_grad()
        model(*models.batch("mlp", step, 8)).backward()
        optimizer.step()
        if step == 1:
            layer.weight.data.fill_(0.1)
            layer.bias.data.fill_(0.1)
        for _ in range(4):
            layer.weight.data = layer.weight.data * 0.9
        if step == 2:
            layer.requires_grad_(True)
    return state_of(model)


@pytest.mark.parametrize("level", LEVELS)
def test_values_that_were_written_to_a_frozen_parameter_count_when_it_trains(
    level: str, cluster: zs.Session
) -> None:
    assert_close(train_and_unfreeze(level), train_and_unfreeze("plain"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_loading_optimizer_state_before_the_step_keeps_the_gradients_or_raises(
    level: str, cluster: zs.Session
) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model, optimizer = build(system)
        for step in range(3):
            optimizer.zero_grad()
            model(*models.batch("mlp", step, 8)).backward()
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        return state_of(model)

    if level == "os":
        assert_close(train(level), train("plain"), rtol=1e-5, atol=1e-6)
        return
    with pytest.raises(zs.InvalidArgumentError, match="changed between backward and step 2, after"):
        train(level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_that_is_unfrozen_before_the_step_has_no_gradient_in_it(
    level: str, cluster: zs.Session
) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model, optimizer = build(system)
        layer = module_of(model).layers[2].requires_grad_(False)
        for step in range(4):
            optimizer.zero_grad()
            model(*models.batch("mlp", step, 8)).backward()
            if step == 2:
                layer.requires_grad_(True)
            optimizer.step()
        return state_of(model)

    assert_close(train(level), train("plain"), rtol=1e-5, atol=1e-6)


def write_before_other_changes(rank: int) -> None:
    for level in LEVELS:
        model, optimizer = build(level)
        model(*models.share(models.batch("mlp", 0, 8), rank, 2)).backward()
        optimizer.step()
        if rank == 1:
            with torch.no_grad():
                model.module.layers[0].weight.mul_(0.5)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(zs.DisagreementError, match="rank 0 and rank 1 .*'layers.0.weight'"):
            model(*models.share(models.batch("mlp", 1, 8), rank, 2))


def test_differences_between_ranks_that_change_their_models_are_errors(pair: ranks.Team) -> None:
    pair.run(write_before_other_changes)
