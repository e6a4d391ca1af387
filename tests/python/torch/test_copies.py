"""Asynchronous copies. CPU tensors stand for those of a device whose copies run as late as
possible: when something waits for them, with the values that the source has then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, Outcome, Training, optimizer_of, train
from zeroshard.errors import InternalError
from zeroshard.torch import _copies, group_sharded_parallel

TRAININGS = {
    "mlp": Training(steps=6, max_norm=0.5, options={"buffer_max_size": 700}),
    "gpt": Training("gpt", steps=4),
    "unused parameters": Training("unused", steps=6, options={"buffer_max_size": 0}),
    "accumulated, scaled": Training(micro=2, max_norm=0.05, scaled=True, steps=6),
}


class Late:
    """Copies between CPU tensors that are as late as possible."""

    def __init__(self) -> None:
        self.to_come: list[_ToHost] = []
        #: Held while a copy is done, and while the holders of a tensor are counted.
        self.lock = threading.Lock()
        #: The number of copies to tensors that were started when their values had been pulled.
        self.started = 0
        #: The number of calls of :meth:`precede`.
        self.waits = 0

    def to_host(self, source: Tensor) -> _ToHost:
        copy = _ToHost(source, self.lock)
        self.to_come.append(copy)
        return copy

    def to_device(self, target: Tensor) -> _ToDevice:
        return _ToDevice(self, target)

    def precede(self, device: torch.device) -> None:
        self.waits += 1
        for copy in self.to_come:
            copy.wait()
        self.to_come.clear()


def host_like(tensor: Tensor) -> Tensor:
    host = _copies.host_copy(tensor, pinned=False)
    return host.fill_(float("nan")) if host.is_floating_point() else host.zero_()


class _ToHost:
    def __init__(self, source: Tensor, lock: threading.Lock) -> None:
        self.source: Tensor | None = source
        self._lock = lock
        self.host = host_like(source)

    def wait(self) -> None:
        with self._lock:
            if self.source is not None:
                self.host.copy_(self.source)
            self.source = None


class _ToDevice:
    def __init__(self, copies: Late, target: Tensor) -> None:
        self._copies = copies
        self._target = target
        self.host = host_like(target)
        with torch.no_grad():
            target.copy_(self.host)

    def start(self) -> None:
        assert not self.host.isnan().any(), "the values have been pulled"
        self._copies.started += 1

    def finish(self) -> None:
        with torch.no_grad():
            self._target.copy_(self.host)


@contextlib.contextmanager
def late_copies() -> Iterator[Late]:
    """Copies of CPU tensors are late."""
    copies, references = Late(), _copies._references

    def without_copies(tensor: Tensor) -> tuple[int, int, int]:
        """A real device does not count as a holder of what it copies, as :class:`_ToHost` does."""
        memory = tensor.untyped_storage().data_ptr()
        with copies.lock:
            of_tensor, of_memory, of_object = references(tensor)
            sources = [copy.source for copy in copies.to_come if copy.source is not None]
        of_tensor -= 1 + sum(source is tensor for source in sources)
        of_memory -= sum(source.untyped_storage().data_ptr() == memory for source in sources)
        return of_tensor, of_memory, of_object

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_copies.COPIES, "cpu", copies)
        patch.setattr(_copies, "_references", without_copies)
        yield copies


@pytest.fixture
def late() -> Iterator[Late]:
    with late_copies() as copies:
        yield copies


def results(outcome: Outcome) -> tuple[list[float], list[float], str]:
    return outcome.losses, outcome.norms, outcome.hash


@pytest.mark.parametrize("name", TRAININGS)
def test_late_copies_change_no_bit(name: str, cluster: zs.Session) -> None:
    for level in LEVELS:
        expected = results(train(TRAININGS[name], level))
        with late_copies() as copies:
            assert results(train(TRAININGS[name], level)) == expected, level
            assert copies.waits == 0, "nobody holds a gradient"


def train_in_a_group(rank: int, world: int) -> list[tuple[list[float], list[float], str]]:
    training = Training("gpt", steps=4, options={"group_size": world, "buffer_max_size": 700})
    with zs.init(shards=2):
        outcomes = [train(training, level, rank, world) for level in LEVELS]
        with late_copies() as copies:
            outcomes += [train(training, level, rank, world) for level in LEVELS]
            assert copies.waits == 0, "nobody holds a gradient"
    return [results(outcome) for outcome in outcomes]


def test_late_copies_change_no_bit_in_a_group() -> None:
    for found in ranks.run(2, train_in_a_group, 2):
        assert all(one == found[0] for one in found)


def test_parameters_are_copied_as_soon_as_they_have_been_pulled(
    late: Late, cluster: zs.Session
) -> None:
    train(TRAININGS["gpt"], "p_g_os")
    assert late.started > 0


def build(level: str, hook: object = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, with a hook of the program on its parameters."""
    training = Training()
    model = models.build(training.model)
    for parameter in model.parameters():
        if hook is not None:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[arg-type]
    optimizer = optimizer_of(training, model)
    wrapped = group_sharded_parallel(
        model, optimizer, level, segment_size=SEGMENT, accumulation_steps=1
    )
    return wrapped[0], wrapped[1]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, held: list[Tensor]) -> list[float]:
    """Trains, and after each backward pass writes to the gradients that the program holds."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*models.batch("mlp", step, 8))
        loss.backward()
        for gradient in held:
            gradient.zero_()
        held.clear()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_gradients_that_the_program_holds_are_copied_before_it_changes_them(
    level: str, late: Late, cluster: zs.Session
) -> None:
    expected = steps(*build(level), [])
    assert late.waits == 0, "nobody holds a gradient"
    held: list[Tensor] = []

    def hold(parameter: Tensor) -> None:
        assert parameter.grad is not None
        held.append(parameter.grad.view(-1) if len(held) % 2 else parameter.grad)

    assert steps(*build(level, hold), held) == expected
    assert late.waits > 0


def test_the_memory_of_a_gradient_and_a_distributed_gradient_may_be_held(late: Late) -> None:
    def is_held(gradient: Tensor) -> bool:
        return _copies.is_held(gradient)

    gradient = torch.ones(3)
    assert not is_held(gradient)
    memory = gradient.untyped_storage()
    assert is_held(gradient)
    del memory
    assert not is_held(gradient)
    assert is_held(nn.Parameter(gradient))


def test_a_copy_that_fails_is_an_error_of_the_step(
    late: Late, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build("os_g")
    wait = _ToHost.wait

    def fail(copy: _ToHost) -> None:
        # The task that pushes gradients calls it in another thread.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        wait(copy)

    monkeypatch.setattr(_ToHost, "wait", fail)
    with pytest.raises(InternalError, match="illegal memory access"):
        steps(model, optimizer, [])
