"""What ``zeroshard.shard`` refuses, with the remedies, and its names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.torch import ShardOptions, group_sharded_parallel, shard


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that can be sharded."""
    model = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 2))
    return model, torch.optim.AdamW(model.parameters())


def refused(match: str, *args: Any, **options: Any) -> zs.Error:
    with pytest.raises(zs.InvalidArgumentError, match=match) as raised:
        shard(*args, **options)
    return raised.value


@pytest.mark.parametrize("stage", [0, 4, "p_g_os", True, 2.0, None])
def test_a_stage_is_1_2_or_3(stage: Any) -> None:
    assert refused("stage is", *made(), stage).remedy == "it must be 1, 2 or 3"


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    assert "segment_size" in refused("no option 'segments'", *made(), segments=3).remedy


def test_a_model_is_sharded_once(cluster: zs.Session) -> None:
    model, optimizer = made()
    shard(model, optimizer)
    refused("not sharded yet", model, optimizer)
    refused("wrapped by ShardedInPlace", nn.ModuleList([model]), made()[1])
    with pytest.raises(zs.InvalidArgumentError, match="not sharded yet"):
        group_sharded_parallel(model, optimizer, "os")
    wrapped, its, _ = group_sharded_parallel(*made(), "os")
    refused("not sharded yet", wrapped, its)


def test_models_and_optimizers_that_do_not_belong_together_are_refused() -> None:
    (one, its), (other, others) = made(), made()
    refused("2 models and 1 optimizers.*one torch.nn.Module", [one, other], its)
    refused("0 models and 0 optimizers", [], [])
    refused("model 1 is passed twice", [one, one], [its, others])
    both = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    refused(r"optimizer 0 has parameters of models \[0, 1\]", [one, other], [both, its])
    refused(r"optimizer 1 has parameters of models \[\]", [one, other], [its, made()[1]])
    again = torch.optim.AdamW(one.parameters())
    refused("no optimizer has parameters of model 1", [one, other], [its, again])
    refused("optimizer 1, a AdamW, has a parameter", one, [its, again])
    tied = nn.Sequential(one[0], nn.Linear(30, 2))
    refused("model 0 and model 1 share", [one, tied], [its, others])


def test_a_model_whose_class_cannot_be_changed_is_refused() -> None:
    model, optimizer = made()
    remedy = refused("RecursiveScriptModule", torch.jit.script(model), optimizer).remedy
    assert "group_sharded_parallel" in remedy
    refused("the result of torch.compile", torch.compile(model), optimizer)
    model.no_sync = None
    refused("attribute 'no_sync'", model, optimizer)
    assert type(model) is nn.Sequential and type(optimizer) is torch.optim.AdamW


def test_a_replaced_step_is_refused() -> None:
    model, optimizer = made()
    optimizer.step = lambda: None
    refused("has replaced optimizer.step", model, optimizer)


def test_a_scaler_of_another_library_is_refused() -> None:
    class Scaler(torch.amp.GradScaler):
        pass

    refused("pass a torch.amp.GradScaler", *made(), scaler=Scaler("cpu"))
    refused("it must be a torch.amp.GradScaler", *made(), scaler=2.0)


def test_a_layer_of_paddle_is_refused_with_the_function_for_it() -> None:
    layer = type("Layer", (), {"__module__": "paddle.nn.layer.layers"})
    remedy = refused("a Mine of Paddle", type("Mine", (layer,), {})(), made()[1]).remedy
    assert remedy == "use zeroshard.paddle.group_sharded_parallel"


def test_the_options_are_those_of_group_sharded_parallel() -> None:
    older = inspect.signature(group_sharded_parallel).parameters.keys()
    # One object, the levels are stages, and dp_group must be None.
    assert older - ShardOptions.__annotations__.keys() == {
        "model", "optimizer", "scaler", "level", "dp_group"
    }  # fmt: skip
    assert ShardOptions.__annotations__.keys() <= older
    assert zs.shard is shard


@pytest.mark.parametrize("torch_is_installed", [True, False])
def test_torch_is_imported_when_shard_is_first_used(torch_is_installed: bool) -> None:
    script = "\n".join(
        (
            "import sys",
            "from zeroshard import *" if torch_is_installed else "sys.modules['torch'] = None",
            "import zeroshard as zs",
            "assert not sys.modules.get('torch')",
            "zs.shard",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if torch_is_installed:
        assert done.returncode == 0, done.stderr
    else:
        assert "use zeroshard.paddle.group_sharded_parallel" in done.stderr
