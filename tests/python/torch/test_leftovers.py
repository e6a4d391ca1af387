"""What scripts keep from plain torch, FSDP and DeepSpeed, or from a session that has ended: it
works, or the error says what to do instead."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from training import LEVELS
from zeroshard.torch import DataParallel, group_sharded_parallel, load_weights

INPUTS = torch.linspace(-1, 1, 48).reshape(8, 6)


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6))


def wrap(level: str, model: nn.Module | None = None) -> tuple[Any, Any, torch.optim.Optimizer]:
    """The wrapped model, its optimizer, and the optimizer that it was made from."""
    model = sequential() if model is None else model
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    return *group_sharded_parallel(model, given, level, segment_size=32)[:2], given


def step(model: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(INPUTS).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("level", LEVELS)
def test_the_original_optimizer_does_not_step(level: str, cluster: zs.Session) -> None:
    model, optimizer, given = wrap(level)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1)
    step(model, optimizer)
    scheduler.step()
    model(INPUTS).sum().backward()
    with pytest.raises(zs.InvalidArgumentError, match="that group_sharded_parallel has returned"):
        given.step()
    step(model, optimizer)


@pytest.mark.parametrize("level", [*LEVELS, "DataParallel"])
def test_a_wrapped_container_has_the_operators_of_its_class(
    level: str, cluster: zs.Session
) -> None:
    def wrapped(module: nn.Module) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DataParallel has no effect in one process
            return DataParallel(module) if level == "DataParallel" else wrap(level, module)[0]

    raw = sequential()
    model = wrapped(raw)
    assert len(model) == 3 and list(model) == list(raw) and model[-1] is raw[2]
    assert isinstance(model[:2], nn.Sequential) and raw[0] in model
    model[1] = nn.ReLU()
    assert isinstance(raw[1], nn.ReLU)
    named = wrapped(nn.ModuleDict({"a": nn.Linear(6, 6)}))
    assert "a" in named and "b" not in named and list(named) == ["a"]
    plain = wrapped(nn.Linear(6, 6))
    assert plain and not hasattr(plain, "__len__")
    with pytest.raises(TypeError, match="no len"):
        len(plain)
    if level == "DataParallel":

        class Built(DataParallel):
            def __init__(self, settings: dict[str, int], size: int) -> None:
                super().__init__(nn.Linear(size, **settings) if settings else sequential())

        with pytest.warns(UserWarning, match="single process"):
            assert Built({"out_features": 6}, 6)
            with pytest.raises(TypeError, match="no len"):
                len(Built({"out_features": 6}, 6))  # type: ignore[arg-type]
            assert isinstance(Built({}, 6), Built) and len(Built({}, 6)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["os", "DataParallel"])
def test_calls_of_fsdp_and_deepspeed_are_errors_that_name_the_replacement(
    level: str, cluster: zs.Session
) -> None:
    if level == "DataParallel":
        with pytest.warns(UserWarning, match="single process"):
            model: Any = DataParallel(sequential())
    else:
        model = wrap(level)[0]
    for name, replacement in {
        "unshard": "summon_full_params",
        "reshard": "remove the call",
        "set_requires_gradient_sync": "no_sync",
        "set_is_last_backward": "no_sync",
        "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
        "backward": "loss.backward()",
        "step": "optimizer.step()",
        "save_checkpoint": "Checkpoints",
    }.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=re.escape(replacement)):
            getattr(model, name)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'unknown'"):
        _ = model.unknown


@pytest.mark.parametrize("level", LEVELS)
def test_values_are_not_assigned_to_the_parameters_that_are_trained(
    level: str, cluster: zs.Session, tmp_path: Path
) -> None:
    model, optimizer, _ = wrap(level)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    part = {name[2:]: value for name, value in state.items() if name[0] == "0"}
    for load, values in ((model, state), (model.module, state), (model[0], part)):
        with pytest.raises(zs.InvalidArgumentError, match="assign=False"):
            load.load_state_dict(values, assign=True)
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    model.module.load_state_dict(state)
    # A copy of the module is plain, also where ZeroShard is not installed.
    for copied in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model))):
        copied.load_state_dict(after, assign=True)
        torch.save(after, tmp_path / "after")
        load_weights(copied, tmp_path / "after")
    if level != "p_g_os":
        assert b"zeroshard" not in pickle.dumps(model.module)
    load_weights(model, tmp_path / "after")
    assert torch.equal(model[0].weight, after["0.weight"])


@pytest.mark.parametrize("level", [*LEVELS, "DataParallel"])
def test_a_lazy_module_runs_before_it_is_wrapped(level: str, cluster: zs.Session) -> None:
    lazy = nn.Sequential(nn.LazyLinear(20), nn.Tanh(), nn.LazyLinear(6))
    with pytest.raises(zs.InvalidArgumentError, match="'0.weight' belongs to a lazy module.*once"):
        DataParallel(lazy) if level == "DataParallel" else wrap(level, lazy)
    lazy(INPUTS)
    if level != "DataParallel":
        step(*wrap(level, lazy)[:2])


def test_without_a_scaler_the_error_for_nan_has_a_remedy_for_a_trainer(
    cluster: zs.Session,
) -> None:
    model, optimizer, _ = wrap("os")
    (model(INPUTS) * float("inf")).sum().backward()
    with pytest.raises(zs.InvalidArgumentError, match="learning rate.*fp16 precision.*Trainer"):
        optimizer.step()


def interrupted(level: str | None, drops: bool) -> Tensor:
    """Interrupts a loop as Ctrl-C in a notebook does, and runs it again. ``drops``: drops the
    gradients before that. Returns the loss after it."""
    if level is None:
        model: Any = sequential()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        model, optimizer, _ = wrap(level)

    def cell(last: int | None = None) -> None:
        for number in range(3):
            model(INPUTS + number).square().mean().backward()
            if number == last:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt):
        cell(1)
    if not drops:
        # torch accumulates, and so do we as long as the gradients are here.
        if level not in (None, "os"):
            with pytest.raises(zs.InvalidArgumentError, match="interrupted step.*zero_grad"):
                cell()
            optimizer.zero_grad()
    else:
        optimizer.zero_grad()
    cell()
    found: Tensor = model(INPUTS).square().mean().detach()
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_that_was_interrupted_after_backward_runs_again(
    level: str, cluster: zs.Session
) -> None:
    for drops in (False, True):
        like_torch = drops if level == "os" else True
        torch.testing.assert_close(interrupted(level, drops), interrupted(None, like_torch))


#: Runs in a process of its own, since it opens and closes sessions.
SCRIPT = """
import copy
import sys
import tempfile
import torch
from torch import nn
import zeroshard as zs
from zeroshard._native import Cluster, TensorSpec
from zeroshard.torch import group_sharded_parallel

# Importing the compiler takes as long as importing torch.
assert "torch._dynamo" not in sys.modules


def refused(call, kind, *texts):
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(texts)


session = zs.init(shards=2, timeout=30.0)
assert zs.init(shards=2, timeout=30.0) is session
refused(lambda: zs.init(timeout=30.0), zs.InvalidArgumentError, "other values of shards")
models = {}
for level in ("os", "os_g", "p_g_os"):
    raw = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 6))
    model, optimizer, _ = group_sharded_parallel(
        raw, torch.optim.AdamW(raw.parameters()), level, segment_size=32
    )
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    models[level] = model, optimizer
zs.shutdown()
closed = "closed by zeroshard.shutdown()", "again after zeroshard.init()"
for level, (model, optimizer) in models.items():
    refused(optimizer.state_dict, zs.NotInitialisedError, *closed)
    refused(optimizer.step, zs.NotInitialisedError, *closed)
    for call in (
        model.state_dict,
        lambda: copy.deepcopy(model),
        lambda: model(torch.ones(2, 6)),
        lambda: print(model.module[0].weight),
    ):
        if level == "p_g_os":
            refused(call, zs.NotInitialisedError, *closed)
        else:
            call()

# Another run has the name of this script, which is in its checkpoints.
session = zs.init(token="secret")
other = Cluster.connect(session.address, token="secret")
other.create_job("c/sharded-0/all", [TensorSpec("other", [2])], [("average", {})], 1)
model = nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters())
with tempfile.TemporaryDirectory() as folder:
    checkpoints = zs.Checkpoints(f"file://{folder}")
    refused(
        lambda: group_sharded_parallel(model, optimizer, "os", checkpoints=checkpoints),
        zs.JobExistsError,
        "has named this run 'c' after its script",
        "name=",
    )
"""


def test_sessions_are_opened_again_and_read_after_they_were_closed() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
