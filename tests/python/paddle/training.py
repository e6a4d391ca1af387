"""Trains the same model with plain Paddle and with ZeroShard, and records the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import models

LEVELS = ("os", "os_g", "p_g_os")
#: Small enough that the models' matrices live on the servers, and large enough that their biases do
#: not.
SEGMENT = 64

SCHEDULES: dict[str, Callable[[float], Any]] = {
    "step": lambda lr: paddle.optimizer.lr.StepDecay(lr, 5, gamma=0.5),
    "cosine": lambda lr: paddle.optimizer.lr.CosineAnnealingDecay(lr, 20),
    "warmup": lambda lr: paddle.optimizer.lr.LinearWarmup(lr, 10, 0.0, lr),
}


@dataclass(frozen=True)
class Training:
    """The model, optimizer and options of a training."""

    model: str = "mlp"
    optimizer: str = "AdamW"
    lr: float = 2e-3
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 30
    batch: int = 8
    #: Clip by this norm.
    max_norm: float | None = None
    clip: Callable[[float], Any] = nn.ClipGradByGlobalNorm
    #: Parameters whose name ends so do not take part in it.
    unclipped: str | None = None
    #: So many backward passes make a step.
    micro: int = 1
    #: How we learn of it: "learned", "no_sync" or "accumulation_steps".
    announced: str = "learned"
    schedule: str | None = None
    #: With a GradScaler.
    scaled: bool = False
    #: Two parameter groups, the second with a tenth of the learning rate and no weight decay.
    groups: bool = False
    #: For group_sharded_parallel.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The results of a training."""

    losses: list[float]
    state: dict[str, np.ndarray]
    hash: str = ""


def optimizer_of(training: Training, model: Any) -> Any:
    """The Paddle optimizer of a training."""
    parameters: Any = model.parameters()
    if training.groups:
        matrices = [p for p in parameters if p.ndim > 1]
        rest = [p for p in parameters if p.ndim <= 1]
        parameters = [
            {"params": matrices},
            {"params": rest, "learning_rate": 0.1, "weight_decay": 0.0},
        ]
    lr = SCHEDULES[training.schedule](training.lr) if training.schedule else training.lr
    clip = None if training.max_norm is None else training.clip(training.max_norm)
    make = getattr(paddle.optimizer, training.optimizer)
    return make(lr, parameters=parameters, grad_clip=clip, **training.settings)


def momentum(model: Any, groups: bool = False) -> Any:
    """An optimizer with weight decay and clipping, of a list of parameters or of a group."""
    parameters: Any = model.parameters()
    return paddle.optimizer.Momentum(
        0.05,
        parameters=[{"params": parameters}] if groups else parameters,
        weight_decay=1e-3,
        grad_clip=nn.ClipGradByGlobalNorm(0.5),
        multi_precision=True,
    )


def train(training: Training, system: str, rank: int = 0, world: int = 1) -> Outcome:
    """Trains with ``system``: ``"plain"`` or a level. The losses are means over the ranks."""
    from zeroshard.paddle import GradScaler, group_sharded_parallel

    model = models.build(training.model)
    if training.unclipped is not None:
        for name, parameter in model.named_parameters():
            parameter.need_clip = not name.endswith(training.unclipped)
    optimizer = optimizer_of(training, model)
    scaler: Any = GradScaler(init_loss_scaling=256.0) if training.scaled else GradScaler(False)
    bare, wrapped = model, model
    if system in LEVELS:
        options = {"segment_size": SEGMENT, **training.options}
        if training.announced == "accumulation_steps":
            options["accumulation_steps"] = training.micro
        wrapped, optimizer, scaler = group_sharded_parallel(
            model, optimizer, system, scaler=scaler, **options
        )
    losses = []
    for step in range(training.steps):
        if hasattr(bare, "before_step"):
            bare.before_step(step)
        whole = models.batch(training.model, step, training.batch * training.micro)
        losses.append(
            _step(training, wrapped, optimizer, scaler, models.broadcast(whole, rank, world))
        )
        if training.schedule:
            optimizer._learning_rate.step()
    if system != "plain" and world > 1:
        mean = paddle.to_tensor(losses, dtype="float64")
        dist.all_reduce(mean)
        losses = [float(loss) / world for loss in mean]
    state = {name: tensor.numpy() for name, tensor in wrapped.state_dict().items()}
    return Outcome(losses, state, optimizer.state_hash() if system in LEVELS else "")


def _step(
    training: Training, model: Any, optimizer: Any, scaler: Any, data: tuple[Any, Any]
) -> float:
    """Makes one step. Returns the loss on this rank."""
    total = 0.0
    for part in range(training.micro):
        quiet = (
            part + 1 < training.micro
            and training.announced == "no_sync"
            and hasattr(model, "no_sync")
        )
        with model.no_sync() if quiet else contextlib.nullcontext():
            loss = model(*models.broadcast(data, part, training.micro)) / training.micro
            scaler.scale(loss).backward()
        total += float(loss)
    scaler.step(optimizer)
    scaler.update()
    # A parameter that is not used is not stepped, as with us.
    optimizer.clear_grad(set_to_zero=False)
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
    ours: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    rtol: float = 1e-3,
    atol: float = 1e-5,
) -> None:
    """Asserts that two state dicts have the same names in the same order and nearly equal
    values."""
    assert list(ours) == list(reference)
    for name, values in ours.items():
        np.testing.assert_allclose(values, reference[name], rtol=rtol, atol=atol, err_msg=name)


def assert_same(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
    """Asserts that two state dicts have the same bits."""
    assert list(ours) == list(reference)
    differing = [
        name for name, values in ours.items() if not np.array_equal(values, reference[name])
    ]
    assert not differing, f"not the same bits: {differing}"
