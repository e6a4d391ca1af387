# promise: no-silent-difference
"""Compiled modules of a model whose parameters live on the servers (level p_g_os)."""

from __future__ import annotations

import copy
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ranks
import zeroshard as zs
from environment import IS_LONG
from training import SEGMENT, assert_same
from zeroshard.torch import group_sharded_parallel
from zeroshard.torch._unshard import unshard

WAYS = ("module", "in place", "module after", "in place after", "whole")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs + self.b(torch.relu(self.a(inputs))))


class Checkpointed(Block):
    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Writes(Block):
    """Writes to a parameter in its forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.9)
        return super().forward(inputs)


class Breaks(Block):
    """Has a graph break."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.a(inputs))
        torch._dynamo.graph_break()
        return self.norm(inputs + self.b(hidden))


class Fails(Block):
    """Refuses a batch of three."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if inputs.shape[0] == 3:
            raise ValueError("a batch of three")
        return outputs


class Outer(nn.Module):
    """Has a compiled module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.inner.compile(backend="aot_eager")
        self.last = nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.inner(inputs))


def build(block: Callable[[], nn.Module] = Block) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), block(), block(), nn.Linear(16, 4))


def wrap(model: nn.Module, level: str = "p_g_os") -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT)[:2]


def compile_in(model: Any, way: str, **options: Any) -> None:
    """Compiles the model, or both of its blocks."""
    if way.startswith("whole"):
        model.compile(**options)
        return
    for index in (1, 2):
        if way.startswith("module"):
            model[index] = torch.compile(model[index], **options)
        else:
            model[index].compile(**options)


def step(model: Any, optimizer: Any, index: int, rank: int = 0) -> list[float]:
    """Makes a step. Returns its loss, and the loss after it."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * index + rank))
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return [loss.item(), model(inputs).square().mean().item()]


def train(model: Any, optimizer: Any, rank: int = 0) -> tuple[list[list[float]], str]:
    """Makes four steps, of which only the first compiles."""
    losses = [step(model, optimizer, 0, rank)]
    with torch.compiler.set_stance("fail_on_recompile"):
        losses += [step(model, optimizer, index, rank) for index in range(1, 4)]
    return losses, optimizer.state_hash()


def assert_freed(model: Any) -> None:
    """Asserts that all parameters on the servers are freed and are gathered when they are used."""
    units = model.sharding.gatherer.units
    model.sharding.gatherer.settle()
    assert units and not model.sharding.gatherer._forwards
    assert all(unit.users == 0 for unit in units)
    kinds = {type(parameter).__name__ for unit in units for parameter in unit.parameters.values()}
    assert kinds == {"GatheredParameter"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forgets compiled code, since all models share that of their classes."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[float]], str]:
    """The losses and the state without compilation."""
    return train(*wrap(build()))


@pytest.mark.parametrize("way", WAYS)
def test_compiled_module_gives_the_same_bits_in_one_graph(
    way: str, cluster: zs.Session, expected: tuple[list[list[float]], str]
) -> None:
    model = build()
    options = {"backend": "aot_eager", "fullgraph": True}
    if not way.endswith("after"):
        compile_in(model, way, **options)
    model, optimizer = wrap(model)
    if way.endswith("after"):
        compile_in(model.module, way, **options)
    assert train(model, optimizer) == expected
    assert_freed(model)
    # Both blocks share a graph with and one without gradients.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("block", [Checkpointed, Writes, Breaks, Outer])
def test_compiled_block_gives_the_same_bits(block: Any, cluster: zs.Session) -> None:
    plain = wrap(build(block))
    with torch.compiler.set_stance("force_eager"):
        wanted = [step(*plain, index) for index in range(3)]
    model = build(block)
    compile_in(model, "in place", backend="aot_eager")
    model, optimizer = wrap(model)
    assert [step(model, optimizer, index) for index in range(3)] == wanted
    assert optimizer.state_hash() == plain[1].state_hash()
    assert_freed(model)


def has_compiler() -> bool:
    """Returns whether inductor can compile extension modules of Python in C++."""
    return (
        shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
    )


@pytest.mark.skipif(
    not IS_LONG, reason="inductor compiles in tests/run long, for more than a minute"
)
@pytest.mark.skipif(not has_compiler(), reason="inductor needs g++ and the headers of Python")
def test_inductor_gives_the_losses_of_plain_torch(cluster: zs.Session) -> None:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    wanted = [step(plain, optimizer, index) for index in range(3)]
    model = build()
    compile_in(model, "in place", fullgraph=True)
    model, optimizer = wrap(model)
    losses = [step(model, optimizer, index) for index in range(3)]
    torch.testing.assert_close(losses, wanted, rtol=0.0, atol=1e-6)


def test_parameters_are_freed_between_forward_and_backward(cluster: zs.Session) -> None:
    model = build()
    compile_in(model, "in place", backend="aot_eager")
    model, optimizer = wrap(model)
    loss = model(torch.ones(2, 8)).sum()
    memory = model.sharding.gatherer.memory
    model.sharding.gatherer.settle()
    held = [unit for unit in model.sharding.gatherer.units if unit.allocated]
    # The prefetched parameters of the next pass are at most those of one block.
    assert sum(unit.nbytes for unit in held) <= 2 * 16 * 32 * 4
    # The graph keeps no block of memory: the pool has taken all of them back.
    assert memory._pool._kept_bytes > 0
    loss.backward()
    assert all(p.grad is not None for p in model.module.parameters())


def test_modules_inside_a_compiled_one_can_be_called_directly(cluster: zs.Session) -> None:
    model = build()
    compile_in(model, "in place", backend="aot_eager")
    model = wrap(model)[0]
    plain = copy.deepcopy(model)
    for each in (model.module, plain):
        block, hidden = each[2], each[1](each[0](torch.ones(2, 8)))
        each[3](hidden + block.b(block.a(block.norm.weight * hidden))).sum().backward()
    for ours, others in zip(model.module.parameters(), plain.parameters()):
        if others.grad is not None:
            torch.testing.assert_close(ours.grad.clone(), others.grad)


@pytest.mark.parametrize("way", WAYS[:2])
def test_an_unsharded_model_is_compiled_as_before(way: str, cluster: zs.Session) -> None:
    model = build()
    compile_in(model, way, backend="aot_eager")
    before = [module._compiled_call_impl for module in model.modules()]
    plain = unshard(wrap(model)[0])
    assert [module._compiled_call_impl for module in plain.modules()] == before
    assert torch.equal(wrap(plain)[0](torch.ones(2, 8)), build()(torch.ones(2, 8)))


def test_an_error_in_a_compiled_module_leaves_it_usable(cluster: zs.Session) -> None:
    model = build(Fails)
    compile_in(model, "in place", backend="aot_eager")
    model, optimizer = wrap(model)
    with pytest.raises(ValueError, match="three"):
        model.module[1](torch.ones(3, 16))
    assert_freed(model)
    step(model, optimizer, 0)


@pytest.mark.parametrize("what", ["model", "function", "module outside the model"])
def test_what_is_not_compiled_warns_and_gives_the_same_bits(
    what: str, cluster: zs.Session, expected: tuple[list[list[float]], str]
) -> None:
    model, optimizer = wrap(build())
    inner = model.module
    if what == "module outside the model":
        block = torch.compile(inner[1], backend="aot_eager")
        called: Any = lambda inputs: inner[3](inner[2](block(inner[0](inputs))))
    else:
        function = model if what == "model" else lambda inputs: inner(inputs)
        called = torch.compile(function, backend="aot_eager")
    with pytest.warns(UserWarning, match="use module.compile"):
        losses = [step(called, optimizer, index) for index in range(4)]
    assert losses == expected[0]
    assert optimizer.state_hash() == expected[1]


def test_copies_of_a_compiled_model_are_plain(cluster: zs.Session) -> None:
    for way in ("module", "in place"):
        model = build()
        compile_in(model, way, backend="aot_eager")
        model = wrap(model)[0]
        copied = copy.deepcopy(model)
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        assert_same(copied.state_dict(), model.state_dict())
        inputs = torch.ones(2, 8)
        assert torch.equal(copied(inputs), model(inputs))


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_a_module_can_be_compiled_while_gradients_are_on_the_servers(
    level: str, cluster: zs.Session
) -> None:
    model, optimizer = wrap(build(), level)
    step(model, optimizer, 0)
    wanted = model(torch.ones(2, 8))
    compile_in(model.module, "in place", backend="aot_eager")
    assert all(p.grad is not None for p in model.module.parameters())
    assert torch.equal(model(torch.ones(2, 8)), wanted)


def compiled_or_not(rank: int) -> list[tuple[list[list[float]], str]]:
    """The results of a model without and with compiled blocks."""
    results = []
    for compiled in (False, True):
        model = build()
        if compiled:
            compile_in(model, "in place", backend="aot_eager", fullgraph=True)
        results.append(train(*wrap(model), rank))
    return results


def test_two_ranks_with_compiled_modules_give_the_same_bits(processes: dict[str, str]) -> None:
    for plain, compiled in ranks.run(2, compiled_or_not, env=processes):
        assert plain == compiled
