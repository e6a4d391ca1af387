# promise: no-silent-difference
"""What a script can do with each member of ``torch.nn.Module`` on a wrapped model, and of
``torch.optim.Optimizer`` on a sharded optimizer, compared with the same without ZeroShard.

The tables have every member, so that a member that a new version of torch adds fails the first test
until someone has looked at it.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from member_uses import Use, forward_replaced, hooked, text, then_step
from training import LEVELS, SEGMENT
from zeroshard.torch import DataParallel, group_sharded_parallel

WRAPPERS = (*LEVELS, "DataParallel")


class Net(nn.Module):
    """Has parameters, a buffer and an attribute of its own, children, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))
        self.temperature = 2.0
        self.note = "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.gain * self.scale / self.temperature

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


class Script:
    """A model and its optimizer, as a script has them."""

    def __init__(self, wrapper: str | None) -> None:
        self.plain = Net()
        self.model: Any = self.plain
        self.optimizer: Any = torch.optim.AdamW(self.plain.parameters(), lr=0.1)
        #: A call for each step, of a hook that is registered before wrapping.
        self.steps: list[int] = []
        self.optimizer.register_step_post_hook(lambda *_: self.steps.append(1))
        if wrapper == "DataParallel":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it has no effect in one process
                self.model = DataParallel(self.plain)
        elif wrapper is not None:
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.plain, self.optimizer, wrapper, segment_size=SEGMENT
            )

    def outputs(self) -> Tensor:
        """The outputs of a forward pass, which dropout makes random."""
        torch.manual_seed(5)
        dtype = next(iter(self.model.parameters())).dtype
        return self.model(torch.linspace(-1, 1, 32).reshape(4, 8).to(dtype))

    def step(self) -> list[float]:
        """Makes a step. Returns the loss, and that after the step."""
        self.optimizer.zero_grad()
        loss = self.outputs().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return [loss.item(), self.outputs().pow(2).mean().item()]


# ---- uses of a member, which return what a script sees


def hooked_state(register: str) -> Use:
    def use(script: Script) -> Any:
        calls: list[str] = []

        def hook(module: Any, *_: Any) -> None:
            calls.append(type(module).__name__)

        handle = getattr(script.model, register)(hook)
        script.model.load_state_dict(script.model.state_dict())
        handle.remove()
        script.model.load_state_dict(script.model.state_dict())
        return calls

    return use


def added(model: Any) -> None:
    torch.manual_seed(1)
    model.add_module("late", nn.Linear(2, 2))
    assert isinstance(model.late, nn.Linear)
    model.add_module("head", nn.Linear(16, 4, bias=False))


def compiled(script: Script) -> Any:
    script.model.compile(backend="eager")
    return script.step()


def cast(name: str, *args: Any) -> Use:
    def use(script: Script) -> Any:
        getattr(script.model, name)(*args)
        return script.step()

    return use


def moved(name: str, *args: Any) -> Use:
    return then_step(lambda model: getattr(model, name)(*args))


def initialised(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.1)
    if isinstance(module, Net):
        module.temperature = 4.0


def buffer_registered(model: Any) -> None:
    model.register_buffer("mask", torch.zeros(3), persistent=False)
    assert "mask" not in model.state_dict() and model.mask.sum() == 0
    del model.scale
    model.register_buffer("scale", torch.tensor(3.0))


def parameter_registered(model: Any) -> None:
    model.register_parameter("gain", nn.Parameter(torch.full((4,), 2.0)))
    model.register_parameter("other", None)
    assert model.other is None


def module_registered(model: Any) -> None:
    torch.manual_seed(1)
    model.register_module("head", nn.Linear(16, 4))


def set_attributes(model: Any) -> None:
    model.temperature *= 0.5
    model.scale = torch.tensor(3.0)
    model.fresh = 1
    torch.manual_seed(1)
    model.head = nn.Linear(16, 4)
    model.training = False


def deleted_attributes(model: Any) -> None:
    del model.note, model.head
    assert not hasattr(model, "head")
    model.note, model.head = "gone", nn.Linear(16, 4)


def frozen(model: Any) -> Any:
    model.head.requires_grad_(False)
    model.body.requires_grad_(False)
    return model.requires_grad_()


def loaded(script: Script) -> Any:
    state = {
        name: value * 0.5 if isinstance(value, Tensor) else "loaded"
        for name, value in script.model.state_dict().items()
    }
    result = script.model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        script.model.load_state_dict({})
    outer = nn.ModuleDict({"part": script.model})
    outer.load_state_dict({f"part.{name}": value for name, value in state.items()})
    keys = [list(outer.state_dict()), [name for name, _ in outer.named_parameters()]]
    return str(result), script.model.note, script.step(), keys


def saved(script: Script) -> Any:
    script.step()
    file = io.BytesIO()
    torch.save(script.model.state_dict(prefix="x."), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in state.items()}


def emptied(script: Script) -> Any:
    script.model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*script.model.parameters(), *script.model.buffers()):
            tensor.fill_(0.5)
    return script.step()


def zeroed(model: Any) -> None:
    model(torch.ones(4, 8)).sum().backward()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def copied(copy_of: Callable[[Any], Any]) -> Use:
    def use(script: Script) -> Any:
        script.step()
        state = copy_of(script.model).state_dict()
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in state.items()}

    return use


def shared(script: Script) -> Any:
    script.model.share_memory()
    return script.step()


def replaced(model: Any) -> None:
    torch.manual_seed(1)
    model.set_submodule("head", nn.Linear(16, 4))
    model.set_submodule("body.0", nn.Linear(8, 16))


#: A member that does the same on a wrapped model.
SAME: dict[str, Use] = {
    "T_destination": lambda s: str(type(s.model).T_destination),
    "add_module": then_step(added),
    "apply": then_step(lambda model: model.apply(initialised)),
    "buffers": lambda s: [b.tolist() for b in s.model.buffers()],
    "call_super_init": lambda s: s.model.call_super_init,
    "children": lambda s: text(s.model.children()),
    "compile": compiled,
    "cpu": moved("cpu"),
    "dump_patches": lambda s: s.model.dump_patches,
    "eval": then_step(lambda model: model.eval()),
    "float": moved("float"),
    "forward": forward_replaced,
    "get_buffer": lambda s: s.model.get_buffer("body.1.running_mean").tolist(),
    "get_extra_state": lambda s: s.model.get_extra_state(),
    "get_parameter": lambda s: s.model.get_parameter("body.0.weight").tolist(),
    "get_submodule": lambda s: str(s.model.get_submodule("body.0")),
    "load_state_dict": loaded,
    "modules": lambda s: text(s.model.modules()),
    "named_buffers": lambda s: [
        [name for name, _ in s.model.named_buffers("x", recurse)] for recurse in (True, False)
    ],
    "named_children": lambda s: text(s.model.named_children()),
    "named_modules": lambda s: text(s.model.named_modules()),
    "named_parameters": lambda s: [
        [name for name, _ in s.model.named_parameters("x", recurse)] for recurse in (True, False)
    ],
    "parameters": lambda s: [p.tolist() for p in s.model.parameters(recurse=False)],
    "register_buffer": then_step(buffer_registered),
    "register_forward_hook": hooked("register_forward_hook"),
    "register_forward_pre_hook": hooked("register_forward_pre_hook"),
    "register_full_backward_hook": hooked("register_full_backward_hook"),
    "register_full_backward_pre_hook": hooked("register_full_backward_pre_hook"),
    "register_load_state_dict_post_hook": hooked_state("register_load_state_dict_post_hook"),
    "register_load_state_dict_pre_hook": hooked_state("register_load_state_dict_pre_hook"),
    "register_module": then_step(module_registered),
    "register_parameter": then_step(parameter_registered),
    "register_state_dict_post_hook": hooked_state("register_state_dict_post_hook"),
    "register_state_dict_pre_hook": hooked_state("register_state_dict_pre_hook"),
    "requires_grad_": then_step(frozen),
    "set_extra_state": lambda s: (s.model.set_extra_state("set"), s.plain.note),
    "set_submodule": then_step(replaced),
    "state_dict": saved,
    "to": moved("to", "cpu"),
    "to_empty": emptied,
    "train": then_step(lambda model: model.eval().train()),
    "training": lambda s: (s.plain.eval().training, s.model.training),
    "zero_grad": then_step(zeroed),
    "__call__": lambda s: s.outputs().tolist(),
    "__delattr__": then_step(deleted_attributes),
    "__dir__": lambda s: {"temperature", "head", "gain", "scale"} <= set(dir(s.model)),
    "__getattr__": lambda s: (s.model.temperature, hasattr(s.model, "nothing")),
    "__getstate__": copied(copy.deepcopy),
    "__setattr__": then_step(set_attributes),
    "__setstate__": copied(lambda model: pickle.loads(pickle.dumps(model))),
}
#: A member that changes what the servers hold: an error at the call or in the next step. With
#: DataParallel, whose optimizer is the script's own, it does the same as without.
REFUSED: dict[str, Use] = {
    "bfloat16": cast("bfloat16"),
    "double": cast("double"),
    "half": cast("half"),
}
#: A member that works as long as parameters are on this worker.
REFUSED_AT_P_G_OS: dict[str, Use] = {
    "share_memory": shared,
    "type": moved("type", torch.float32),
}
#: A member that is not for scripts, or of hardware that the tests do not have: why it is the same.
OTHER = {
    "__init__": "a wrapper is created by a function of ZeroShard",
    "__repr__": "shows the wrapper around the module, as DistributedDataParallel's",
    "cuda": "as cpu, in test_cuda.py",
    "extra_repr": "called by __repr__ of the module",
    "ipu": "as cpu",
    "mtia": "as cpu",
    "register_backward_hook": "deprecated; torch's documentation refers to the full hook",
    "xpu": "as cpu",
}


# ---- optimizers


def hooked_optimizer(register: str) -> Use:
    """Registers a hook on the optimizer, and calls what has hooks."""

    def use(script: Script) -> Any:
        calls: list[int] = []
        handle = getattr(script.optimizer, register)(lambda *_: calls.append(len(_)))
        script.step()
        script.optimizer.load_state_dict(script.optimizer.state_dict())
        handle.remove()
        return calls, script.step(), script.optimizer.state_dict(), calls, script.steps

    return use


def group_added(script: Script) -> Any:
    script.step()
    extra = nn.Parameter(torch.ones(4))
    script.model.extra = extra
    script.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    for _ in range(2):
        script.optimizer.zero_grad()
        (script.outputs().pow(2).mean() + (extra * 2).sum()).backward()
        script.optimizer.step()
    return script.step(), extra.tolist(), len(script.optimizer.param_groups)


def group_changed(script: Script) -> Any:
    script.step()
    script.optimizer.param_groups[0]["lr"] = 0.01
    found = [script.step(), script.step(), str(script.optimizer).split("(", 1)[1]]
    script.optimizer.param_groups = [
        {**group, "lr": 0.05} for group in script.optimizer.param_groups
    ]
    found.append(script.step())
    parameters = script.optimizer.param_groups[0]["params"]
    removed = parameters.pop(0)
    found += [script.step(), script.step()]
    parameters[0] = removed  # instead of another one
    return [*found, script.step(), script.step(), removed.tolist()]


def optimizer_saved(script: Script) -> Any:
    losses = script.step()
    state = copy.deepcopy(script.optimizer.state_dict())
    torch.optim.AdamW(script.model.parameters()).load_state_dict(copy.deepcopy(state))
    script.optimizer.load_state_dict(copy.deepcopy(state))
    return losses, state, script.step()


def stepped(script: Script) -> Any:
    def closure() -> Tensor:
        script.optimizer.zero_grad()
        loss = script.outputs().pow(2).mean()
        loss.backward()
        return loss

    return [script.optimizer.step(closure).item() for _ in range(3)]


def gradients_kept(script: Script) -> Any:
    script.step()
    script.optimizer.zero_grad(set_to_none=False)
    zeros = [parameter.grad.abs().sum().item() for parameter in script.model.parameters()]
    script.optimizer.step()
    script.optimizer.zero_grad()
    return zeros, [p.grad is None for p in script.model.parameters()], script.step()


#: A member that does the same on a sharded optimizer. What scripts write to ``state`` is tested in
#: test_optimizer_state.py.
OPTIMIZER: dict[str, Use] = {
    "add_param_group": group_added,
    "load_state_dict": optimizer_saved,
    "register_load_state_dict_post_hook": hooked_optimizer("register_load_state_dict_post_hook"),
    "register_load_state_dict_pre_hook": hooked_optimizer("register_load_state_dict_pre_hook"),
    "register_state_dict_post_hook": hooked_optimizer("register_state_dict_post_hook"),
    "register_state_dict_pre_hook": hooked_optimizer("register_state_dict_pre_hook"),
    "register_step_post_hook": hooked_optimizer("register_step_post_hook"),
    "register_step_pre_hook": hooked_optimizer("register_step_pre_hook"),
    "state_dict": optimizer_saved,
    "step": stepped,
    "zero_grad": gradients_kept,
    "defaults": lambda s: s.optimizer.defaults,
    "param_groups": group_changed,
    "state": lambda s: (
        s.step(),
        [s.optimizer.state[p]["step"].item() for p in s.plain.parameters()],
    ),
    "__repr__": lambda s: str(s.optimizer).split("(", 1)[1],
}
#: A member that is an error with a remedy.
OPTIMIZER_REFUSED: dict[str, Use] = {
    "__getstate__": lambda s: copy.deepcopy(s.optimizer),
    "__setstate__": lambda s: pickle.dumps(s.optimizer),
}
#: As ``OTHER``.
OPTIMIZER_OTHER = {
    "__init__": "a sharded optimizer is created by group_sharded_parallel",
    "profile_hook_step": "calls the hooks of steps",
    "OptimizerPreHook": "a type",
    "OptimizerPostHook": "a type",
}


def members(kind: type) -> set[str]:
    """The public members of a class, and the special ones that it defines itself."""
    special = {
        "__module__",
        "__annotations__",
        "__annotate_func__",
        "__annotations_cache__",
    }
    special |= {
        "__doc__",
        "__dict__",
        "__weakref__",
        "__firstlineno__",
        "__static_attributes__",
    }
    own = {name for name in vars(kind) if name.startswith("__")} - special
    annotated = set(kind.__annotations__)
    # torch's compiler marks classes with names of three underscores.
    names = {name for name in own | annotated | set(dir(kind)) if name[:3] != "___"}
    return (
        {name for name in names if name[:2] == "__" or name[0] != "_"}
        - {name for name in dir(object) if name not in own}
        - special
    )


def test_every_member_of_module_is_known() -> None:
    assert members(nn.Module) == {*SAME, *REFUSED, *REFUSED_AT_P_G_OS, *OTHER}


def test_every_member_of_optimizer_is_known() -> None:
    known = {*OPTIMIZER, *OPTIMIZER_REFUSED, *OPTIMIZER_OTHER}
    assert members(torch.optim.Optimizer) | {"defaults", "param_groups", "state"} == known


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_members_of_a_wrapped_module_do_the_same(wrapper: str, cluster: zs.Session) -> None:
    same = SAME | {f"Optimizer.{name}": use for name, use in OPTIMIZER.items()}
    same |= REFUSED if wrapper == "DataParallel" else {}
    same |= {} if wrapper == "p_g_os" else REFUSED_AT_P_G_OS
    different = {}
    for name, use in same.items():
        expected = use(Script(None))
        try:
            found = use(Script(wrapper))
        except Exception as error:
            found = error
        if not is_close(found, expected):
            different[name] = found, expected
    assert different == {}


@pytest.mark.parametrize("level", LEVELS)
def test_the_members_that_change_what_servers_hold_are_refused(
    level: str, cluster: zs.Session
) -> None:
    refused = REFUSED | OPTIMIZER_REFUSED | (REFUSED_AT_P_G_OS if level == "p_g_os" else {})
    for name, use in refused.items():
        with pytest.raises(zs.InvalidArgumentError):
            use(Script(level))
            pytest.fail(f"{name} is not refused")


def is_close(found: Any, expected: Any) -> bool:
    """Returns whether results are equal, but for the rounding of numbers."""
    if isinstance(found, Exception) or isinstance(found, str) != isinstance(expected, str):
        return False
    if isinstance(expected, float):
        return isinstance(found, float) and found == pytest.approx(
            expected, rel=1e-4, abs=1e-6, nan_ok=True
        )
    if isinstance(expected, Tensor):
        return is_close(found.tolist(), expected.tolist())
    if isinstance(expected, dict):
        return list(found) == list(expected) and is_close([*found.values()], [*expected.values()])
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(is_close, found, expected))
    return bool(found == expected)
