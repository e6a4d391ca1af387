# promise: no-silent-difference
"""A model whose parameters live on the servers (level p_g_os), and its wrapper at every level, as a
user sees them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close, assert_same, worst
from zeroshard.torch import group_sharded_parallel


def wrap(
    model: nn.Module, level: str = "p_g_os", lr: float = 0.05, **options: Any
) -> tuple[Any, Any]:
    """The model with SGD at a level."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return group_sharded_parallel(model, optimizer, level, **{"segment_size": SEGMENT, **options})[
        :2
    ]


def held(parameter: Tensor) -> int:
    """The bytes of a tensor's memory. 0 for a freed parameter, whose elements share one."""
    nbytes = parameter.untyped_storage().nbytes()
    return nbytes if nbytes >= parameter.numel() * parameter.element_size() else 0


def step(model: Any, optimizer: Any, index: int = 0, name: str = "mlp") -> float:
    """Makes a step. Returns its loss."""
    optimizer.zero_grad()
    loss = model(*models.batch(name, index, 8))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("trained", [False, True])
def test_only_parameters_larger_than_a_segment_live_on_the_servers(
    trained: bool, cluster: zs.Session
) -> None:
    model, optimizer = wrap(
        models.Classifier(
            nn.Linear(20, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 10)
        ),
        sync_comm=True,
    )
    if trained:
        step(model, optimizer)
    numels = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
    empty = {name for name, parameter in model.module.named_parameters() if held(parameter) == 0}
    # 8 x 8 = 64 elements is a segment, and stays; a parameter keeps its shape wherever its elements
    # are.
    assert empty == {name for name, numel in numels.items() if numel > SEGMENT}
    assert (
        numels["layers.1.weight"] == SEGMENT
        and "layers.1.weight" not in empty
        and "layers.2.weight" in empty
    )


@pytest.mark.parametrize("how", ["class name", "layer id"])
def test_excluded_layers_stay_whole(how: str, cluster: zs.Session) -> None:
    inner = models.mlp()
    exclude = ["Linear"] if how == "class name" else [id(inner.layers[2])]
    model, optimizer = wrap(inner, exclude_layer=exclude, sync_comm=True)
    step(model, optimizer)
    empty = {name for name, parameter in model.module.named_parameters() if held(parameter) == 0}
    assert empty == (set() if how == "class name" else {"layers.0.weight", "layers.4.weight"})


@pytest.mark.parametrize("level", ["os", "os_g"])
def test_parameters_stay_at_the_other_levels(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.mlp(), level)
    step(model, optimizer)
    assert all(held(parameter) for parameter in model.parameters())
    assert model.level == level


@pytest.mark.parametrize("level", LEVELS)
def test_the_wrapper_has_the_attributes_of_the_model(level: str, cluster: zs.Session) -> None:
    inner = models.GPT()
    names = [name for name, _ in inner.named_parameters()]
    reference = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    model, optimizer = wrap(inner, level)
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    assert model.module is inner and model.checkpointing is None and model.blocks is inner.blocks
    assert_same(model.state_dict(), reference)
    assert [name for name, _ in inner.named_parameters()] == names
    assert inner.head.weight is inner.tokens.weight
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.no_such_thing
    state = model.state_dict()
    step(model, optimizer, name="gpt")
    if level == "p_g_os":
        # What was fetched for it stays as it was.
        assert torch.equal(state["head.weight"], reference["head.weight"])
    assert not torch.equal(model.state_dict()["head.weight"], reference["head.weight"])
    assert torch.equal(model.state_dict()["head.weight"], model.state_dict()["tokens.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_load_state_dict_is_followed_by_training(level: str, cluster: zs.Session) -> None:
    torch.manual_seed(1)
    other = models.mlp()
    model, optimizer = wrap(models.build("mlp"), level)
    step(model, optimizer)
    keys = model.load_state_dict(other.state_dict())
    assert not keys.missing_keys and not keys.unexpected_keys
    assert_same(model.state_dict(), other.state_dict())
    plain_optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    losses = [step(model, optimizer, index) for index in range(3)]
    assert worst(losses, [step(other, plain_optimizer, index) for index in range(3)]) <= 1e-5
    with pytest.raises((RuntimeError, zs.Error), match="layers.0.bias"):
        model.load_state_dict(
            {name: t for name, t in other.state_dict().items() if name != "layers.0.bias"}
        )
    assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_between_steps(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("cnn"), level)
    plain = models.build("cnn")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for index in range(4):
        for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            step(each, each_optimizer, index, "cnn")
            each.eval()
        assert not model.module.training
        data = models.batch("cnn", index + 1, 8)
        with torch.no_grad():
            assert worst([float(model(*data))], [float(plain(*data))]) <= 1e-5
        with torch.inference_mode():
            assert worst([float(model(*data))], [float(plain(*data))]) <= 1e-5
        model.train(), plain.train()


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_between_forward_and_backward(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level)
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for index in range(3):
        data, more = models.batch("mlp", index, 8), models.batch("mlp", index + 1, 8)
        results = []
        for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            each_optimizer.zero_grad()
            loss = each(*data)
            with torch.no_grad():
                results.append(float(each(*more)))
            loss.backward()
            each_optimizer.step()
        assert worst(results[:1], results[1:]) <= 1e-5
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_summoned_parameters_are_whole_and_may_be_changed(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level, sync_comm=True)
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for index in range(4):
        assert worst([step(model, optimizer, index)], [step(plain, plain_optimizer, index)]) <= 1e-5
        with model.summon_full_params(), torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(ours, theirs)
                if index == 1:
                    ours.mul_(0.5), theirs.mul_(0.5)
    assert_close(model.state_dict(), plain.state_dict())
    assert level != "p_g_os" or held(model.module.layers[0].weight) == 0


@pytest.mark.parametrize("summoned", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_outside_forward(level: str, summoned: bool, cluster: zs.Session) -> None:
    """A penalty on the weights."""
    model, optimizer = wrap(models.build("mlp"), level)
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for index in range(3):
        data = models.batch("mlp", index, 8)
        losses = []
        for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            each_optimizer.zero_grad()
            with (
                each.summon_full_params()
                if summoned and each is model
                else contextlib.nullcontext()
            ):
                loss = each(*data) + 0.1 * sum(p.square().sum() for p in each.parameters())
                loss.backward()
            each_optimizer.step()
            losses.append(float(loss))
        assert worst(losses[:1], losses[1:]) <= 1e-5
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_inputs_and_of_parts(level: str, cluster: zs.Session) -> None:
    """A sharded model can be part of a larger computation, and its parts can be called alone."""
    model, optimizer = wrap(models.build("mlp"), level)
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    inputs, targets = models.batch("mlp", 0, 8)
    results = []
    for each, inner, each_optimizer in (
        (model, model.module, optimizer),
        (plain, plain, plain_optimizer),
    ):
        leaf = inputs.clone().requires_grad_()
        each_optimizer.zero_grad()
        F.cross_entropy(inner.logits(leaf * 2), targets).backward()
        each_optimizer.step()
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1])
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_step_without_a_gradient_changes_nothing(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level)
    before = model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    optimizer.step()
    assert_same(model.state_dict(), before)


def prefetch_late(model: Any) -> None:
    """Prefetches the last unit at the version that the last step has replaced."""
    job, unit = model.sharding.job, model.sharding.gatherer.units[-1]
    unit.free()
    job.version -= 1
    unit.start()
    job.version += 1


def test_a_prefetch_that_a_step_overtakes_is_dropped(cluster: zs.Session) -> None:
    model, optimizer = wrap(models.mlp())
    expected = copy.deepcopy(model.module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.05)
    for index in range(3):
        assert step(model, optimizer, index) == step(expected, plain, index)
        prefetch_late(model)
        model.sharding.gatherer.new_version()


def test_a_parameter_is_not_used_after_its_fetch_has_failed(cluster: zs.Session) -> None:
    model, optimizer = wrap(models.mlp())
    step(model, optimizer)
    expected = model.state_dict()
    prefetch_late(model)
    with pytest.raises(zs.VersionGoneError, match="version 0 of job"):
        model.module.layers[4].weight.sum()
    assert torch.equal(model.module.layers[4].weight, expected["layers.4.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_model_trains(level: str, cluster: zs.Session) -> None:
    plain = models.build("mlp")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    expected = [step(plain, plain_optimizer, index) for index in range(4)]
    model, optimizer = wrap(models.build("mlp"), level)
    # Without a compiler of C++: what can go wrong goes wrong where the program is taken apart.
    compiled = torch.compile(model, backend="eager")
    assert worst([step(compiled, optimizer, index) for index in range(4)], expected) <= 1e-5


def test_buffers_follow_rank_0(pair: ranks.Team, processes: dict[str, str]) -> None:
    for level in LEVELS:
        first, second = pair.run(running_means, level, True, env=processes)
        assert_same(first, second)
        first, second = pair.run(running_means, level, False, env=processes)
        assert not torch.equal(first["layers.1.running_mean"], second["layers.1.running_mean"])


def running_means(rank: int, level: str, sync_buffers: bool) -> dict[str, Tensor]:
    """Buffers after three steps."""
    model, optimizer = wrap(models.build("cnn"), level, sync_buffers=sync_buffers)
    for index in range(3):
        optimizer.zero_grad()
        model(*models.share(models.batch("cnn", index, 8), rank, 2)).backward()
        optimizer.step()
    return {name: buffer.clone() for name, buffer in model.module.named_buffers()}


def different_tensors(rank: int) -> None:
    """A model that has a bias on rank 0 only."""
    model = nn.Linear(4, 2, bias=rank == 0)
    wanted = "rank 0 and rank 1 disagree about.*'bias'.*rank 0 has no mesh, rank 1 has none"
    with pytest.raises(zs.DisagreementError, match=wanted):
        group_sharded_parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "os")


def test_ranks_with_different_models_are_both_named(pair: ranks.Team) -> None:
    pair.run(different_tensors)


def test_parameters_begin_as_those_of_rank_0(pair: ranks.Team, processes: dict[str, str]) -> None:
    first, second = pair.run(differently_begun, env=processes)
    for ours, others in zip(first, second):
        assert_same(ours, others)
    assert_same(first[0], first[1])


def differently_begun(rank: int) -> list[dict[str, Tensor]]:
    """The state dicts of a model whose initial parameters differ between the ranks."""
    states = []
    for level in ("os", "p_g_os"):
        torch.manual_seed(rank)
        states.append(wrap(models.mlp(), level)[0].state_dict())
    return states


def test_parameter_used_by_one_rank_counts_zero_from_the_other(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    for first, second in zip(*pair.run(used_on_rank_0, env=processes)):
        assert_same(first, second)
        # SGD with a learning rate of 1: rank 0's gradient is 1, halved by the mean.
        assert torch.equal(first["extra"], torch.full((200,), -0.5))


class Sometimes(nn.Module):
    """A model that uses a parameter on rank 0 only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(200))
        self.always = nn.Parameter(torch.zeros(200))
        self.rank = rank

    def forward(self) -> Tensor:
        return self.always.sum() if self.rank else self.always.sum() + self.extra.sum()


def used_on_rank_0(rank: int) -> list[dict[str, Tensor]]:
    """The state dicts after a step in which a parameter is used on one rank only."""
    states = []
    for level in LEVELS:
        model, optimizer = wrap(Sometimes(rank), level, lr=1.0)
        model().backward()
        optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def test_more_passes_than_announced_is_an_error(cluster: zs.Session) -> None:
    for level in ("os_g", "p_g_os"):
        model, optimizer = wrap(models.build("mlp"), level, accumulation_steps=1)
        model(*models.batch("mlp", 0, 8)).backward()
        with pytest.raises(zs.Error, match="accumulation_steps|no_sync"):
            model(*models.batch("mlp", 1, 8)).backward()
            optimizer.step()
