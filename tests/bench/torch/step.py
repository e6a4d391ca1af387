"""One rank of `zs-bench torch`: measures training steps of one system.

The model is a stack of linear layers without bias, or GPT-2 of Transformers. The former has little
computation per parameter, which makes the cost of sharding visible. Every rank has different
inputs. All systems that synchronise reach the same loss, which is reported. All systems use torch's
AdamW with the fused kernel.

On a GPU, FSDP2 and DeepSpeed keep their optimizer state, and at stage 3 their parameters, in host
memory, where zeroshard's servers are; DeepSpeed then uses its own AdamW. In bf16 all systems have
f32 optimizer state and master weights.
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

#: Runs one training step on the inputs, and returns the loss before the update.
Step = Callable[[Tensor], Tensor]

BATCH = 4
#: Tokens of one input of GPT-2.
SEQUENCE = 128
MAX_NORM = 1.0
LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.01
#: Number of steps that are not measured. During these steps memory is accessed for the first time,
#: and the order of the layers is recorded.
WARM_UP = 3


@dataclass(frozen=True)
class Options:
    """The command line, which `zs-bench` writes."""

    system: str
    level: str
    #: 0 for the default.
    segment_size: int
    model: str
    clip: str
    layers: int
    width: int
    steps: int
    #: The address of the servers. If it is empty, they run inside rank 0.
    address: str
    shards: int
    #: ``cpu`` or ``cuda``.
    device: str
    #: ``f32`` or ``bf16``.
    dtype: str
    #: The encodings of gradients and of parameters on zeroshard's wire.
    wire: str
    parameter_wire: str
    #: The file that the ranks use as a rendezvous.
    store: str
    #: The file for the result, which is one JSON object.
    output: str

    @property
    def is_bf16(self) -> bool:
        """Returns whether the model computes in bf16."""
        return self.dtype == "bf16"


@dataclass(frozen=True)
class Result:
    """The result of a rank."""

    params: int
    #: The tokens of this rank in a step; 0 if its inputs have none.
    tokens: int
    #: The mean time of a step in seconds.
    seconds: float
    #: The loss of the last step, averaged over the ranks.
    loss: float
    #: The peak of the resident memory during the measured steps.
    peak_bytes: int
    #: The peak of what torch has allocated on the GPU during the measured steps.
    gpu_peak_bytes: int


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of all systems."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def loss_of(model: Any, inputs: Tensor) -> Tensor:
    """The loss of either model."""
    loss: Tensor = (
        model(inputs).square().mean()
        if inputs.is_floating_point()
        else model(inputs, labels=inputs).loss
    )
    return loss


def stepper(model: Any, optimizer: Any, options: Options) -> Step:
    """The plain training step."""

    def step(inputs: Tensor) -> Tensor:
        loss = loss_of(model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        if options.clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        elif options.clip == "own":
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_bf16(model: Any, options: Options) -> Any:
    """The model, which computes in bf16 if asked to, and has f32 parameters."""
    autocast = torch.autocast(options.device, torch.bfloat16)
    return autocast(model) if options.is_bf16 else model


def local(model: nn.Module, options: Options) -> Step:
    """No synchronisation."""
    return stepper(in_bf16(model, options), adamw(model), options)


def ddp(model: nn.Module, options: Options) -> Step:
    """DistributedDataParallel."""
    optimizer = adamw(model)
    return stepper(in_bf16(DistributedDataParallel(model), options), optimizer, options)


def zero1(model: nn.Module, options: Options) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    return stepper(in_bf16(DistributedDataParallel(model), options), optimizer, options)


def fsdp2(model: nn.Module, options: Options) -> Step:
    """fully_shard, applied to each layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policies: dict[str, Any] = {"mesh": init_device_mesh(options.device, (dist.get_world_size(),))}
    if options.device == "cuda":
        policies["offload_policy"] = CPUOffloadPolicy()
    if options.is_bf16:
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    return stepper(model, adamw(model), options)


def deepspeed(model: nn.Module, options: Options) -> Step:
    """DeepSpeed. The last character of the system's name is the stage of ZeRO."""
    os.environ["DS_ACCELERATOR"] = options.device
    # DeepSpeed compiles extensions with ninja, which is in the folder of the interpreter.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    package: Any = import_module("deepspeed")
    package.init_distributed("gloo" if options.device == "cpu" else "nccl")
    stage = int(options.system[-1])
    zero: dict[str, Any] = {"stage": stage}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": options.is_bf16},
        "gradient_clipping": MAX_NORM if options.clip else 0.0,
    }
    optimizer: Any = adamw(model)
    if options.device == "cuda":
        host = {"device": "cpu", "pin_memory": True}
        zero["offload_optimizer"] = host
        if stage == 3:
            zero["offload_param"] = host
        optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
    engine: Any = package.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(inputs: Tensor) -> Tensor:
        loss = loss_of(engine, inputs)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zeroshard(model: nn.Module, options: Options) -> Step:
    """group_sharded_parallel, with the optimizer state on shard servers."""
    package: Any = import_module("zeroshard")
    wires = {"wire": options.wire, "parameter_wire": options.parameter_wire}
    package.init(options.address or None, shards=options.shards, **wires)
    segment = {"segment_size": options.segment_size} if options.segment_size else {}
    if options.is_bf16:
        model = model.bfloat16()
    wrapped, optimizer, _ = import_module("zeroshard.torch").group_sharded_parallel(
        model, adamw(model), options.level, **segment
    )
    return stepper(wrapped, optimizer, options)


SYSTEMS: dict[str, Callable[[nn.Module, Options], Step]] = {
    "local": local,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "ds1": deepspeed,
    "ds2": deepspeed,
    "ds3": deepspeed,
    "zeroshard": zeroshard,
}


def linear(layers: int, width: int) -> nn.Module:
    """Linear layers that preserve the variance of the input."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model


def gpt2(layers: int, width: int) -> nn.Module:
    """GPT-2 without dropout."""
    package: Any = import_module("transformers")
    config = package.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(1, width // 64),
        n_positions=SEQUENCE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = package.GPT2LMHeadModel(config)
    return model


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"linear": linear, "gpt2": gpt2}


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of either model."""
    return list(model if isinstance(model, nn.Sequential) else model.transformer.h)


def inputs_of(options: Options) -> Tensor:
    """The inputs of this rank."""
    torch.manual_seed(1 + dist.get_rank())
    if options.model == "gpt2":
        return torch.randint(50257, (BATCH, SEQUENCE)).to(options.device)
    inputs = torch.randn(BATCH, options.width).to(options.device)
    # FSDP2, DeepSpeed and autocast convert what they compute with; zeroshard does not.
    is_plain = options.is_bf16 and options.system == "zeroshard"
    return inputs.bfloat16() if is_plain else inputs


def reset_peak() -> None:
    """Resets the peak of the resident memory."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"cannot reset the peak memory, which covers the whole run: {error}", file=sys.stderr)


def peak_bytes() -> int:
    """The peak of the resident memory since it was last reset, in bytes. Of memory that this
    process shares with others, as far as it has it now, its part counts (as in PSS): segments, and
    the files of libraries."""
    kilobytes = {}
    for file in ("status", "smaps_rollup"):
        for line in (Path("/proc/self") / file).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                kilobytes[name] = int(rest.split()[0])
    parts = {"RssShmem": "Pss_Shmem", "RssFile": "Pss_File"}
    shared = sum(kilobytes[all_of] - kilobytes[part] for all_of, part in parts.items())
    return (kilobytes["VmHWM"] - shared) * 1024


def measure(options: Options) -> Result:
    """Runs and measures the training steps."""
    torch.manual_seed(0)
    is_on_gpu = options.device == "cuda"
    with torch.device(options.device):
        model = MODELS[options.model](options.layers, options.width)
    params = sum(parameter.numel() for parameter in model.parameters())
    step = SYSTEMS[options.system](model, options)
    inputs = inputs_of(options)
    for _ in range(WARM_UP):
        step(inputs)
    synchronize: Callable[[], object] = torch.cuda.synchronize if is_on_gpu else bool
    synchronize()
    reset_peak()
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        loss = step(inputs)
    synchronize()
    dist.barrier()
    seconds = (time.perf_counter() - began) / options.steps
    peak, gpu_peak = peak_bytes(), torch.cuda.max_memory_allocated() if is_on_gpu else 0
    loss = loss.float().cpu()
    dist.all_reduce(loss)
    tokens = 0 if inputs.is_floating_point() else inputs.numel()
    return Result(params, tokens, seconds, loss.item() / dist.get_world_size(), peak, gpu_peak)


def parse() -> Options:
    """Parses the command line, which has a flag for every field of Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    for text in ("level", "clip", "address", "wire", "parameter-wire", "store", "output"):
        parser.add_argument(f"--{text}", default="")
    for number in ("segment-size", "layers", "width", "steps", "shards"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", choices=("f32", "bf16"), required=True)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Runs one rank: RANK of WORLD_SIZE."""
    options = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cpu":
        torch.set_num_threads(1)
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{options.store}", rank=rank, world_size=world
    )
    result = measure(options)
    Path(options.output).write_text(json.dumps(asdict(result)))
    # No rank ends while another rank still needs it.
    dist.barrier()
    if options.system == "zeroshard":
        import_module("zeroshard").shutdown()
    # During a normal exit, torch's threads occasionally abort the process ("terminate called ...").
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
