"""Trains the same model with plain torch, with torch's data parallelism and with ZeroShard, and
records the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models

LEVELS = ("os", "os_g", "p_g_os")
#: The system that trains as a level, with the model and the optimizer sharded in place.
IN_PLACE = {"os": "stage 1", "os_g": "stage 2", "p_g_os": "stage 3"}
#: Small enough that the models' matrices live on the servers, and large enough that their biases do
#: not.
SEGMENT = 64

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, gamma=0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda step: min(1.0, (step + 1) / 10)
    ),
    # Moves beta1 or the momentum too.
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=40),
}


@dataclass(frozen=True)
class Training:
    """The model, optimizer and options of a training."""

    model: str = "mlp"
    optimizer: str = "AdamW"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 2e-3})
    steps: int = 30
    batch: int = 8
    #: Clip by this global norm.
    max_norm: float | None = None
    #: So many backward passes make a step.
    micro: int = 1
    #: How we learn of it: "learned", "no_sync" or "accumulation_steps".
    announced: str = "learned"
    schedule: str | None = None
    #: With a GradScaler.
    scaled: bool = False
    autocast: bool = False
    #: Two parameter groups, the second with a tenth of the learning rate and no weight decay.
    groups: bool = False
    #: For group_sharded_parallel.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The results of a training."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    hash: str = ""


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a training."""
    import zeroshard.torch

    name = training.optimizer
    make = getattr(torch.optim, name, None) or getattr(zeroshard.torch, name)
    parameters: Any = list(model.parameters())
    if training.groups:
        lr = training.settings["lr"]
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() <= 1]
        parameters = [{"params": matrices}, {"params": rest, "lr": lr / 10, "weight_decay": 0.0}]
    return make(parameters, **training.settings)


def train(training: Training, system: str, rank: int = 0, world: int = 1) -> Outcome:
    """Trains with ``system``: ``"plain"``, ``"ddp"``, a level, or a stage in place. The losses are
    means over the ranks."""
    from zeroshard.torch import group_sharded_parallel, shard

    model = models.build(training.model)
    optimizer = optimizer_of(training, model)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=training.scaled)
    bare, wrapped = model, model
    if system == "ddp":
        wrapped = DistributedDataParallel(model)
    elif system != "plain":
        options: dict[str, Any] = {"segment_size": SEGMENT, **training.options}
        if training.announced == "accumulation_steps":
            options["accumulation_steps"] = training.micro
        if system in LEVELS:
            wrapped, optimizer, scaler = group_sharded_parallel(
                model, optimizer, system, scaler=scaler, **options
            )
        else:
            shard(model, optimizer, int(system.removeprefix("stage ")), scaler=scaler, **options)
    schedule = SCHEDULES[training.schedule](optimizer) if training.schedule else None
    losses, norms = [], []
    for step in range(training.steps):
        if hasattr(bare, "before_step"):
            bare.before_step(step)
        whole = models.batch(training.model, step, training.batch * training.micro)
        losses.append(
            _step(training, wrapped, optimizer, scaler, models.share(whole, rank, world), norms)
        )
        if schedule:
            schedule.step()
    if system != "plain" and world > 1:
        mean = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(mean)
        losses = (mean / world).tolist()
    state = {
        name: tensor.clone()
        for name, tensor in (bare if system == "ddp" else wrapped).state_dict().items()
    }
    is_plain = system in ("plain", "ddp")
    return Outcome(losses, norms, state, "" if is_plain else optimizer.state_hash())


def _step(
    training: Training,
    model: Any,
    optimizer: Any,
    scaler: Any,
    data: tuple[Tensor, Tensor],
    norms: list[float],
) -> float:
    """Makes one step. Returns the loss on this rank."""
    total = 0.0
    optimizer.zero_grad()
    for part in range(training.micro):
        early = part + 1 < training.micro
        quiet = early and (
            training.announced == "no_sync" or isinstance(model, DistributedDataParallel)
        )
        quiet = quiet and hasattr(model, "no_sync")
        with model.no_sync() if quiet else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast):
                loss = model(*models.share(data, part, training.micro)) / training.micro
            scaler.scale(loss).backward()
        total += loss.item()
    if training.max_norm is not None:
        scaler.unscale_(optimizer)
        clip = getattr(optimizer, "clip_grad_norm_", None)
        norm = (
            clip(training.max_norm)
            if clip
            else nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        )
        norms.append(float(norm))
    scaler.step(optimizer)
    scaler.update()
    return total


def train_all(
    rank: int, world: int, training: Training, systems: tuple[str, ...]
) -> dict[str, Outcome]:
    """Trains with each system, in the process of one rank."""
    return {system: train(training, system, rank, world) for system in systems}


def worst(ours: list[float], reference: list[float]) -> float:
    """The largest relative difference between two sequences of losses."""
    assert len(ours) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference))


def assert_close(
    ours: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    rtol: float = 1e-3,
    atol: float = 1e-5,
) -> None:
    """Asserts that two state dicts have the same names in the same order and nearly equal
    values."""
    assert list(ours) == list(reference)
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, reference[name], rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}"
        )


def assert_same(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Asserts that two state dicts have the same bits."""
    assert list(ours) == list(reference)
    differing = [name for name, tensor in ours.items() if not torch.equal(tensor, reference[name])]
    assert not differing, f"not the same bits: {differing}"
