"""One rank of `zs-bench torch`, which runs it: training steps of one system, timed.

The model is a stack of bias-free linear layers, so that there is little to compute for every
parameter and the cost of sharding shows. Every rank has inputs of its own, so that systems that
synchronise end at the same loss, which is reported. All of them are given torch's AdamW with its
fused kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

#: One training step on these inputs; returns the loss before it.
Step = Callable[[Tensor], Tensor]

BATCH = 4
LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.01
#: Steps that are not measured: memory is touched for the first time, the order of the layers is
#: learned.
WARM_UP = 3


@dataclass(frozen=True)
class Options:
    """What `zs-bench` asks of a rank."""

    system: str
    level: str
    segment_size: int
    layers: int
    width: int
    steps: int
    #: Where the servers are; empty: inside rank 0.
    address: str
    shards: int
    #: File through which the ranks find each other.
    store: str
    #: File for the result, one JSON object.
    output: str


@dataclass(frozen=True)
class Result:
    """What a rank found."""

    params: int
    #: Seconds of a step, the mean.
    seconds: float
    #: Mean loss over the ranks, after all steps.
    loss: float
    #: The most memory that was resident during the measured steps.
    peak_bytes: int


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all systems."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The plain training step."""

    def step(inputs: Tensor) -> Tensor:
        loss: Tensor = model(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def local(model: nn.Sequential, _: Options) -> Step:
    """No synchronisation at all."""
    return stepper(model, adamw(model))


def ddp(model: nn.Sequential, _: Options) -> Step:
    """DistributedDataParallel."""
    return stepper(DistributedDataParallel(model), adamw(model))


def zero1(model: nn.Sequential, _: Options) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    return stepper(DistributedDataParallel(model), optimizer)


def fsdp2(model: nn.Sequential, _: Options) -> Step:
    """fully_shard, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, adamw(model))


def deepspeed(model: nn.Sequential, options: Options) -> Step:
    """DeepSpeed, ZeRO at the stage that ends the system's name."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # It compiles extensions, with the ninja that is installed beside the interpreter.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    package: Any = import_module("deepspeed")
    package.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": int(options.system[-1])},
        "zero_allow_untested_optimizer": True,
    }
    engine: Any = package.initialize(model=model, optimizer=adamw(model), config=config)[0]

    def step(inputs: Tensor) -> Tensor:
        loss: Tensor = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zeroshard(model: nn.Sequential, options: Options) -> Step:
    """group_sharded_parallel, the state on shard servers."""
    package: Any = import_module("zeroshard")
    package.init(options.address or None, shards=options.shards)
    wrapped, optimizer, _ = import_module("zeroshard.torch").group_sharded_parallel(
        model, adamw(model), options.level, segment_size=options.segment_size
    )
    return stepper(wrapped, optimizer)


SYSTEMS: dict[str, Callable[[nn.Sequential, Options], Step]] = {
    "local": local,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "ds1": deepspeed,
    "ds3": deepspeed,
    "zeroshard": zeroshard,
}


def build(layers: int, width: int) -> nn.Sequential:
    """The model, the same on every rank; what passes through it keeps its variance."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model


def forget_peak() -> None:
    """Starts to look for the peak of the resident memory from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"peak memory is that of the whole run: {error}", file=sys.stderr)


def peak_bytes() -> int:
    """The most memory that was resident since it was last forgotten, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("Linux says VmHWM in /proc/self/status")


def measure(options: Options) -> Result:
    """Trains, and times it."""
    model = build(options.layers, options.width)
    params = sum(parameter.numel() for parameter in model.parameters())
    step = SYSTEMS[options.system](model, options)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(BATCH, options.width)
    for _ in range(WARM_UP):
        step(inputs)
    forget_peak()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        loss = step(inputs)
    dist.barrier()
    seconds = (time.perf_counter() - began) / options.steps
    peak = peak_bytes()
    dist.all_reduce(loss)
    return Result(params, seconds, loss.item() / dist.get_world_size(), peak)


def parse() -> Options:
    """The command line: every field of Options, as a flag."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    for text in ("level", "address", "store", "output"):
        parser.add_argument(f"--{text}", default="")
    for number in ("segment-size", "layers", "width", "steps", "shards"):
        parser.add_argument(f"--{number}", type=int, required=True)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Runs one rank, RANK of WORLD_SIZE."""
    options = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=rank, world_size=world
    )
    result = measure(options)
    Path(options.output).write_text(json.dumps(asdict(result)))
    # Nobody goes while another one still needs it.
    dist.barrier()
    if options.system == "zeroshard":
        import_module("zeroshard").shutdown()
    # All is said. Ended in order, torch's threads now and then abort the process ("terminate called
    # ...").
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
