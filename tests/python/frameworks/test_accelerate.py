# promise: no-silent-difference
"""Programs that use Accelerate do with ZeroShard what they do without it, on two ranks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

import models
import ranks
import zeroshard as zs
import zeroshard.torch
from environment import LONG
from training import LEVELS, SEGMENT, assert_close
from zeroshard import InvalidArgumentError
from zeroshard.integrations.accelerate import Accelerator
from zeroshard.torch import GroupSharded

STEPS = 4


def accelerator_of(system: str, **options: Any) -> Any:
    """``"ddp"``: Accelerate alone."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {"cpu": True, **options}
    if system == "ddp":
        return accelerate.Accelerator(**options)
    return Accelerator(level=system, sharding_options={"segment_size": SEGMENT}, **options)


def data(model: str, batches: int) -> TensorDataset:
    return TensorDataset(*models.batch(model, 0, 8 * batches))


Clip = Callable[[Any, Any], Any]


class Program:
    """A training program as Accelerate's documentation writes it."""

    def __init__(
        self,
        system: str,
        model: str = "mlp",
        micro: int = 1,
        clip: Clip | None = None,
        **options: Any,
    ) -> None:
        self.accelerator = accelerator_of(system, gradient_accumulation_steps=micro, **options)
        torch.manual_seed(1)
        network = models.build(model)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        # One batch more than whole steps: the last step of an epoch has fewer backward passes.
        loader = DataLoader(data(model, 2 * (STEPS * micro + micro // 2)), 8)
        self.clip = clip
        self.optimizer, self.model, self.loader, self.scheduler = self.accelerator.prepare(
            optimizer, network, loader, scheduler
        )
        self.seen: list[float] = []

    def epoch(self) -> None:
        """Losses, norms and learning rates are added to ``seen``."""
        accelerator = self.accelerator
        self.model.train()
        for inputs, targets in self.loader:
            with accelerator.accumulate(self.model):
                loss = self.model(inputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.clip is not None:
                    norm = self.clip(accelerator, self.model.parameters())
                    self.seen += [] if norm is None else [float(norm)]
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.seen.append(accelerator.reduce(loss.detach(), "mean").item())
            self.seen.append(self.scheduler.get_last_lr()[0])

    def evaluate(self) -> float:
        self.model.eval()
        losses = []
        with torch.inference_mode():
            for inputs, targets in self.loader:
                loss = self.model(inputs, targets).expand(len(inputs))
                losses.append(self.accelerator.gather_for_metrics(loss))
        return torch.cat(losses).mean().item()

    def state(self) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in self.accelerator.get_state_dict(self.model).items()
        }


def by_norm(accelerator: Any, parameters: Any) -> Any:
    return accelerator.clip_grad_norm_(parameters, 0.05)


def by_value(accelerator: Any, parameters: Any) -> Any:
    accelerator.clip_grad_value_(parameters, 0.003)


PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch norm": {"model": "cnn"},
    "clip by norm": {"clip": by_norm},
    "clip by value": {"clip": by_value},
    "accumulation and clip": {"micro": 3, "clip": by_norm},
    "bf16": {"mixed_precision": "bf16", "clip": by_norm},
}
SYSTEMS = ("ddp", *LEVELS)


def train(rank: int, name: str, system: str) -> tuple[list[float], dict[str, Tensor]]:
    program = Program(system, **PROGRAMS[name])
    for _ in range(2):
        program.epoch()
        # DistributedDataParallel broadcasts buffers before a forward, ZeroShard after a step.
        program.seen.append(program.evaluate())
    return program.seen, program.state()


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    return {name: {system: train(rank, name, system) for system in SYSTEMS} for name in PROGRAMS}


def resume(rank: int, system: str, folder: str) -> tuple[list[float], list[float], bool]:
    """What a program sees after a checkpoint: in the process that has written it, and in one that
    loads it. Whether the saved model, loaded into plain torch, is the trained one."""
    first = Program(system, "mlp", 2, by_norm)
    first.epoch()
    first.accelerator.save_state(f"{folder}/{system}")
    first.accelerator.save_model(first.model, f"{folder}/{system}/model")
    first.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/{system}/model/model.safetensors")
    plain = models.build("mlp")
    plain.load_state_dict(saved)
    inputs = models.batch("mlp", 3, 8)
    first.model.eval()
    same = torch.equal(plain(*inputs), first.model(*inputs).detach())
    first.seen.clear()
    torch.manual_seed(5)
    first.epoch()
    second = Program(system, "mlp", 2, by_norm)
    second.accelerator.load_state(f"{folder}/{system}")
    torch.manual_seed(5)
    second.epoch()
    return first.seen, second.seen, same


def resume_all(rank: int, folder: str) -> dict[str, Any]:
    return {system: resume(rank, system, folder) for system in SYSTEMS}


def uneven(system: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the batches of this rank, and the final state. Rank 0 has a batch more."""
    config = DataLoaderConfiguration(even_batches=system != "ddp")
    accelerator = accelerator_of(system, dataloader_config=config)
    network, loader = models.build("mlp"), DataLoader(data("mlp", 5), 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    seen = []
    with (
        Join([model])
        if system == "ddp"
        else accelerator.join_uneven_inputs([model], even_batches=False)
    ):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = model(inputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            seen.append(loss.item())
    if system != "ddp":
        with accelerator.join_uneven_inputs([model]):
            assert len(list(loader)) == 3
    return seen, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def uneven_all() -> dict[str, Any]:
    return {system: uneven(system) for system in SYSTEMS}


def work(rank: int, folder: str) -> tuple[Any, Any, Any]:
    return train_all(rank), resume_all(rank, folder), uneven_all()


@pytest.fixture(scope="module")
def trained(
    processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Any, Any, Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return ranks.run(2, work, folder, env=processes, init="env", timeout=LONG)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_see_what_they_see_with_data_parallel_ranks(name: str, trained: Any) -> None:
    tolerance = 1e-3 if name == "bf16" else 1e-5
    for found, _, _ in trained:
        expected, state = found[name]["ddp"]
        for level in LEVELS:
            seen, our_state = found[name][level]
            assert seen == pytest.approx(expected, rel=tolerance), level
            assert_close(our_state, state, rtol=tolerance * 10, atol=tolerance)


def test_a_program_that_loads_a_checkpoint_continues_as_the_one_that_wrote_it(trained: Any) -> None:
    for _, found, _ in trained:
        expected, *_ = found["ddp"]
        for system, (first, second, same) in found.items():
            assert first == pytest.approx(expected, rel=1e-5), system
            # The bits of DistributedDataParallel itself vary from run to run.
            assert second == (pytest.approx(first, rel=1e-6) if system == "ddp" else first), system
            assert same, system


def test_ranks_may_have_different_numbers_of_batches(trained: Any) -> None:
    for rank, (_, _, found) in enumerate(trained):
        expected, state = found["ddp"]
        assert len(expected) == 3 - rank
        for level in LEVELS:
            seen, our_state = found[level]
            assert seen == pytest.approx(expected, rel=1e-5), level
            # Without the last step, in which only rank 0 had a batch, rank 1 would differ.
            assert_close(our_state, state, rtol=1e-5, atol=1e-6)


# ---- one process


def test_the_model_and_the_optimizer_are_those_of_the_program(cluster: zs.Session) -> None:
    accelerator = accelerator_of("p_g_os")
    network = models.build("mlp")
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, prepared = accelerator.prepare(network, optimizer)
    assert isinstance(model, GroupSharded)
    assert accelerator.unwrap_model(model) is network
    assert accelerator.prepare(model, prepared) == (model, prepared)
    assert prepared.param_groups[0]["params"] == list(network.parameters())


def test_two_models_have_an_optimizer_each(cluster: zs.Session) -> None:
    accelerator = accelerator_of("os_g")
    first, second, frozen = (models.build("mlp") for _ in range(3))
    frozen.requires_grad_(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (second, first)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]
    prepared = accelerator.prepare(first, frozen, second, *optimizers, *schedulers)
    assert [type(each) for each in prepared[:3]] == [GroupSharded, type(frozen), GroupSharded]
    for model, optimizer, scheduler in zip(prepared[2::-2], prepared[3:5], prepared[5:]):
        before = copy.deepcopy(model.state_dict())
        accelerator.backward(model(*models.batch("mlp", 0, 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
            scheduler.step()
        assert any(not torch.equal(before[name], p) for name, p in model.state_dict().items())
        assert scheduler.optimizers == [optimizer]
        assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_a_step_that_overflows_does_not_move_the_schedule(cluster: zs.Session) -> None:
    accelerator = accelerator_of("os_g")
    # Accelerate makes a scaler for GPUs only.
    accelerator.scaler = zeroshard.torch.GradScaler.sharing(torch.amp.GradScaler("cpu"))
    network = models.build("mlp")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(
        network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    for factor, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        accelerator.backward(model(*models.batch("mlp", 0, 8)) * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
    assert scheduler.get_last_lr() == [pytest.approx(0.001)]


def test_gradients_of_several_forwards_are_synchronised_in_the_last_backward(
    cluster: zs.Session,
) -> None:
    accelerator = accelerator_of("os_g")
    network = models.build("mlp")
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    with accelerator.no_sync(model):
        first, second = (model(*models.batch("mlp", step, 8)) for step in range(2))
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    assert type(model.layers[0].weight.grad) is not Tensor
    plain = models.build("mlp")
    sum(plain(*models.batch("mlp", step, 8)) for step in range(2)).backward()
    torch.testing.assert_close(model.layers[0].weight.grad.clone(), plain.layers[0].weight.grad)


def prepare_apart(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(model)


def prepare_the_optimizer(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(optimizer)


def prepare_two_optimizers(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (prepare_apart, "prepared without its optimizer"),
        (prepare_the_optimizer, "parameters of 0 of the models"),
        (prepare_two_optimizers, "a model has one optimizer"),
    ],
)
def test_a_model_is_prepared_with_its_optimizer(
    call: Callable[..., None], message: str, cluster: zs.Session
) -> None:
    model = models.build("mlp")
    with pytest.raises(InvalidArgumentError, match=message):
        call(accelerator_of("os"), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_settings_that_contradict_sharding_are_errors() -> None:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(InvalidArgumentError, match="comm_hook is 'fp16'"):
        accelerator_of("os", kwargs_handlers=[hook])
