# promise: no-silent-difference
"""Models on the meta device get memory and the values of their constructor, module by module.

What a rank holds meanwhile is in ``test_memory.py``. Checkpoints are tested in
``frameworks/test_checkpoint.py``, where safetensors is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zeroshard as zs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from facts import Facts
from training import LEVELS
from zeroshard.torch import DataParallel, group_sharded_parallel, shard_optimizer

InitFn = Callable[[nn.Module], Any]


class Scaled(nn.Module):
    """A parameter beside a child that the constructor initialises a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.inner = nn.Linear(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.xavier_uniform_(self.inner.weight)


class Replacing(nn.Module):
    """Its ``reset_parameters`` replaces tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())


class Rotary(nn.Module):
    """A buffer that is not persistent, and that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", self.values(), persistent=False)

    @staticmethod
    def values() -> Tensor:
        return 1.0 / 100 ** (torch.arange(4) / 4)


def constructed() -> nn.ModuleDict:
    """Modules whose values are those of ``reset_parameters()``."""
    made: dict[str, nn.Module] = {
        "linear": nn.Linear(6, 5),
        "bilinear": nn.Bilinear(3, 4, 5),
        "conv": nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        "transposed": nn.ConvTranspose1d(4, 6, 3),
        "embedding": nn.Embedding(9, 4, padding_idx=2),
        "bag": nn.EmbeddingBag(9, 4),
        "layer norm": nn.LayerNorm(6),
        "rms norm": nn.RMSNorm(6),
        "group norm": nn.GroupNorm(2, 6),
        "batch norm": nn.BatchNorm2d(6),
        "instance norm": nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        "prelu": nn.PReLU(3),
        "lstm": nn.LSTM(4, 5, 2, bidirectional=True, proj_size=2),
        "gru": nn.GRU(4, 5),
        "cell": nn.RNNCell(4, 5),
        "attention": nn.MultiheadAttention(8, 2),
        "cross attention": nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
        "encoder layer": nn.TransformerEncoderLayer(8, 2, 12),
        "decoder layer": nn.TransformerDecoderLayer(8, 2, 12),
        "softmax": nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 8]),
        "nested": nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
        "bf16": nn.Linear(5, 5, dtype=torch.bfloat16),
        "scaled": Scaled(),
        "replacing": Replacing(),
    }
    return nn.ModuleDict(made)


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def wrap(model: nn.Module, level: str = "p_g_os", **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"segment_size": 0, **options}
    return group_sharded_parallel(model, optimizer, level, **options)[:2]


def assert_values(model: Any, expected: nn.Module) -> None:
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
        assert found[name].stride() == value.stride(), name
    buffers = dict(model.module.named_buffers())
    for name, value in expected.named_buffers():
        assert torch.equal(buffers[name], value), name


# ---- values


@pytest.mark.parametrize("level", LEVELS)
def test_values_and_random_state_are_those_of_the_constructor(
    cluster: zs.Session, level: str
) -> None:
    torch.manual_seed(3)
    expected = constructed()
    then = torch.get_rng_state()
    model = on_meta(constructed)
    before = list(model.parameters())
    torch.manual_seed(3)
    sharded, _ = wrap(model, level)
    assert torch.equal(torch.get_rng_state(), then)
    assert all(a is b for a, b in zip(before, sharded.parameters(), strict=True))
    assert_values(sharded, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_from_meta_trains_like_one_from_the_cpu(cluster: zs.Session, level: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(7, 6), nn.LSTM(6, 6, batch_first=True), nn.MultiheadAttention(6, 2)
        )

    def losses(model: nn.Module, **options: Any) -> list[float]:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=0)
        found = []
        for _ in range(3):
            embedded, recurrent, attention = model.module  # type: ignore[union-attr]
            x, _ = recurrent(embedded(torch.arange(6).view(2, 3)))
            loss = attention(x, x, x)[0].square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(1)
    assert losses(make()) == losses(on_meta(make))


def test_hooks_and_attributes_of_a_parameter_stay(cluster: zs.Session) -> None:
    model = on_meta(lambda: nn.Linear(3, 3, bias=False))
    called = []
    model.weight.register_hook(lambda gradient: called.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    model.weight.note = "kept"
    sharded, _ = wrap(model)
    sharded(torch.ones(1, 3)).sum().backward()
    assert called == ["hook", "accumulated"]
    assert model.weight.note == "kept"


def test_the_device_context_of_the_caller_has_no_effect(cluster: zs.Session) -> None:
    with torch.device("meta"):
        model, optimizer = wrap(nn.Linear(3, 3))
        model(torch.ones(1, 3, device="cpu")).sum().backward()
        optimizer.step()
    before = on_meta(lambda: nn.Linear(3, 3)).to_empty(device="cpu")
    before.load_state_dict(model.state_dict())
    assert before.weight.isfinite().all()


def test_param_init_fn_initialises_what_has_no_reset_parameters(cluster: zs.Session) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.frequencies = Rotary.values()
        elif isinstance(module, nn.Linear):
            module.to_empty(device="cpu", recurse=False)
            module.weight.data = values
            module.bias = nn.Parameter(torch.full((8,), 2.0))
        else:
            module.weight.data.fill_(3)  # type: ignore[operator, union-attr]

    values = torch.rand(8, 8)
    kept = values.clone()
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), Rotary(), nn.LayerNorm(8, bias=False)))
    sharded, _ = wrap(model, param_init_fn=initialise)
    found = sharded.state_dict()
    assert torch.equal(found["0.weight"], kept) and torch.equal(values, kept)
    assert found["0.bias"].tolist() == [2.0] * 8
    assert found["2.weight"].tolist() == [3.0] * 8
    assert torch.equal(model[1].frequencies, Rotary.values())


def test_tied_parameters_have_the_values_of_the_first_module(cluster: zs.Session) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    model = on_meta(Tied)
    sharded, _ = wrap(model, param_init_fn=lambda module: nn.init.ones_(module.weight))
    assert sharded.state_dict()["head.weight"].eq(1).all()
    assert model.head.weight is model.embed.weight


# ---- errors


class Plain(nn.Module):
    """A parameter and no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Forgetful(nn.Module):
    """Its ``reset_parameters`` forgets a part of a parameter, or a buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        if buffer:
            self.register_buffer("table", torch.arange(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[: 4 if hasattr(self, "table") else 3].fill_(1)


class Root(nn.Module):
    """Its initialisation by :data:`reach` writes to a tensor of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.child = nn.Linear(4, 4)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def written_later() -> nn.Module:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.mul_(2)
    return model


def reach(module: nn.Module) -> None:
    if isinstance(module, Root):
        nn.init.ones_(module.scale)
        module.child.weight.data.zero_()  # it was sent to the servers
    else:
        module.reset_parameters()  # type: ignore[operator]


def empty_all(module: nn.Module) -> None:
    if isinstance(module, Root):
        module.to_empty(device="cpu")
        nn.init.ones_(module.scale)
    else:
        module.reset_parameters()  # type: ignore[operator]


def empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


ERRORS: dict[str, tuple[Callable[[], nn.Module], InitFn | None, str]] = {
    "no reset_parameters": (
        lambda: nn.Sequential(nn.Linear(2, 2), Plain()),
        None,
        r"'1.gain' of module '1' \(Plain\).*no reset_parameters.*param_init_fn",
    ),
    "a buffer of the constructor": (lambda: nn.Sequential(nn.Linear(2, 2), Rotary()), None,
                                    r"'1.frequencies' of module '1' \(Rotary\)"),
    "a buffer is forgotten": (lambda: Forgetful(buffer=True), None, "not set all.*'table'"),
    "a part is forgotten": (lambda: Forgetful(buffer=False), None, "not set all.*'weight'"),
    "a copied layer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2, enable_nested_tensor=False
        ),
        None,
        "'layers.0.self_attn.out_proj.weight' was not initialised by reset_parameters.. alone.*0 "
        "times, and.*1 times",
    ),
    "initialised from outside": (
        lambda: nn.Transformer(4, 2, 1, 1, 4), None, "not initialised by reset_parameters.. alone"
    ),
    "written to": (written_later, None, "2 times, and by reset_parameters.. 1 times"),
    "tied": (tied, None, "'0.weight' and '1.weight' are tied"),
    "another module's": (Root, reach, r"module '' uses a tensor of shape \[4, 4\].*no memory"),
    "all at once": (Root, empty_all, "recurse=False|not set all elements of 'child.weight'"),
    "empty memory": (lambda: nn.Linear(2, 2), empty, "not set all elements of 'weight'"),
    "nothing": (lambda: nn.Linear(2, 2), lambda module: None, "not set all elements of 'weight'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_values_that_are_not_determined_are_an_error_that_changes_nothing(
    cluster: zs.Session, case: str
) -> None:
    make, initialise, message = ERRORS[case]
    model = on_meta(make)
    for level in ("p_g_os",) if initialise is reach else LEVELS:
        # The model is unchanged: the second call has the same error.
        with pytest.raises(zs.InvalidArgumentError, match=message):
            wrap(model, level, param_init_fn=initialise)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_model_stays_as_it_is_if_its_initialisation_fails(cluster: zs.Session) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())

    def replace_and_fail(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.ones(2, 4))
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        group_sharded_parallel(model, optimizer, "os", param_init_fn=replace_and_fail)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(parameter.is_meta for parameter in before)
    group_sharded_parallel(model, optimizer, "os")


def test_values_that_are_never_computed_are_an_error(cluster: zs.Session) -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    with pytest.raises(zs.InvalidArgumentError, match="'weight' is on the meta device.*to_empty"):
        DataParallel(model)
    with pytest.raises(zs.InvalidArgumentError, match="shard_optimizer without model="):
        shard_optimizer(torch.optim.SGD(model.parameters()))
    parameters = [nn.Parameter(torch.ones(2)), model.weight]
    optimizer = torch.optim.SGD(parameters)
    with pytest.raises(zs.InvalidArgumentError, match="parameter 1 of group 0"):
        group_sharded_parallel(nn.ParameterList(parameters[:1]), optimizer, "os")


def test_a_checkpoint_without_safetensors_is_an_error(
    cluster: zs.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ImportError, match="pip install safetensors"):
        wrap(on_meta(lambda: nn.Linear(2, 2)), checkpoint=tmp_path)


# ---- two ranks

TWO = Facts(2)


@TWO
def all_ranks_have_the_values_of_rank_0(rank: int) -> None:
    for level in LEVELS:
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
        torch.manual_seed(rank)
        model, optimizer = wrap(
            on_meta(lambda: nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))),
            level,
            segment_size=50,
        )
        assert_values(model, expected)
        model(torch.rand(4, 20)).square().sum().backward()
        optimizer.step()


@TWO
def a_rank_without_values_takes_those_of_rank_0(rank: int) -> None:
    for level in LEVELS:
        make = lambda: nn.Sequential(nn.Linear(20, 20), Plain())
        torch.manual_seed(4)
        expected = make()
        model = expected if rank == 0 else on_meta(make)
        before = {name: value.clone() for name, value in expected.state_dict().items()}
        sharded, _ = wrap(model, level, segment_size=50, param_init_fn=empty)
        found = sharded.state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())


@TWO
def an_error_on_rank_0_is_an_error_on_all_ranks(rank: int) -> None:
    def initialise(module: nn.Module) -> None:
        if rank > 0:
            module.reset_parameters()  # type: ignore[operator]

    expected, message = zs.InvalidArgumentError, "not set all elements of 'weight'"
    if rank > 0:
        expected, message = zs.JobFailedError, f"rank 0 has failed.*InvalidArgument.*{message}"
    with pytest.raises(expected, match=message):
        wrap(on_meta(lambda: nn.Linear(20, 20)), param_init_fn=initialise)


@TWO
def a_distributed_parameter_on_meta_is_an_error(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4)
    whole = torch.empty(4, 4, device="meta")
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, src_data_rank=None))
    with pytest.raises(zs.InvalidArgumentError, match="'weight' is a DTensor"):
        wrap(model)


test_on_two_ranks = TWO.test(__name__)
