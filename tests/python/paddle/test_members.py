# promise: no-silent-difference
"""What a script can do with each member of ``paddle.nn.Layer`` on a wrapped model, and of
``paddle.optimizer.Optimizer`` on a sharded optimizer, compared with the same in plain Paddle.

The tables have every member, so that a member that a new version of Paddle adds fails the first
test until someone has looked at it.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard.paddle import DataParallel, group_sharded_parallel

from comparison import assert_close
from member_uses import Use, forward_replaced, hooked, text, then_step
from training import LEVELS

WRAPPERS = (*LEVELS, "DataParallel")


class Net(nn.Layer):
    """Has parameters, a buffer and an attribute of its own, sublayers, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(3)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1D(16), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)
        self.gain = self.create_parameter([4], default_initializer=nn.initializer.Constant(1.0))
        self.register_buffer("scale", paddle.ones([1]))
        self.temperature = 2.0
        self.note = "none"

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x)) * self.gain * self.scale / self.temperature


class Script:
    """A model and its optimizer, as a script has them."""

    def __init__(self, wrapper: str | None) -> None:
        with paddle.utils.unique_name.guard():
            self.plain: Any = Net()
        self.model: Any = self.plain
        self.optimizer: Any = paddle.optimizer.AdamW(
            0.1, epsilon=0.1, parameters=self.plain.parameters()
        )
        if wrapper == "DataParallel":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it has no effect in one process
                self.model = DataParallel(self.plain)
        elif wrapper is not None:
            self.model, self.optimizer = group_sharded_parallel(
                self.plain, self.optimizer, wrapper, segment_size=64
            )[:2]

    def loss(self) -> Any:
        """The loss of a forward pass, which dropout makes random."""
        paddle.seed(5)
        # No two rows differ by a constant: batch norm would divide by a variance of almost 0, and
        # enlarge differences of one rounding.
        x = paddle.sin(paddle.arange(32, dtype="float32").square()).reshape([4, 8])
        return self.model(x.astype(self.plain.gain.dtype)).square().mean()

    def step(self) -> list[float]:
        """Makes a step. Returns the loss, and that after the step."""
        self.optimizer.clear_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return [loss.item(), self.loss().item()]


# ---- uses of a member, which return what a script sees


def hooked_state(script: Script) -> Any:
    handle = script.model.register_state_dict_hook(lambda state: state.pop("gain"))
    names = list(script.model.state_dict())
    handle.remove()
    return names, list(script.model.state_dict())


def added(method: str) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        paddle.seed(1)
        getattr(model, method)("late", nn.Linear(2, 2))
        assert isinstance(model.late, nn.Linear)
        getattr(model, method)("head", nn.Linear(16, 4, bias_attr=False))

    return change


def initialised(layer: nn.Layer) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight.set_value(paddle.full(layer.weight.shape, 0.1))
    if isinstance(layer, Net):
        layer.temperature = 4.0


def buffer_registered(model: Any) -> None:
    model.register_buffer("mask", paddle.zeros([3]), persistable=False)
    assert "mask" not in model.state_dict() and model.mask.sum() == 0
    del model.scale
    model.register_buffer("scale", paddle.full([1], 3.0))


def parameter_added(method: str) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        constant = nn.initializer.Constant(2.0)
        getattr(model, method)("gain", model.create_parameter([4], default_initializer=constant))
        getattr(model, method)("other", None)
        assert model.other is None

    return change


def set_attributes(model: Any) -> None:
    model.temperature *= 0.5
    model.scale = paddle.full([1], 3.0)
    model.fresh = 1
    paddle.seed(1)
    model.head = nn.Linear(16, 4)
    model.training = False


def deleted_attributes(model: Any) -> None:
    del model.note, model.head
    assert not hasattr(model, "head")
    model.note, model.head = "gone", nn.Linear(16, 4)


def frozen(model: Any) -> Any:
    model.head.requires_grad_(False)
    return model.requires_grad_()


def replaced(method: str) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        paddle.seed(1)
        getattr(model, method)("head", nn.Linear(16, 4))
        getattr(model, method)("body.0", nn.Linear(8, 16))

    return change


def loaded(method: str) -> Use:
    def use(script: Script) -> Any:
        state = {name: value * 0.5 for name, value in script.model.state_dict().items()}
        state.pop("gain")
        options = {"strict": False} if method == "load_state_dict" else {}
        result = getattr(script.model, method)({**state, "more": paddle.ones([1])}, **options)
        # Paddle's own DataParallel returns nothing from set_state_dict.
        names = [list(each) for each in result] if method == "load_state_dict" else []
        return names, script.step(), script.step()

    return use


def saved(script: Script) -> Any:
    script.step()
    file = io.BytesIO()
    paddle.save(script.model.state_dict(structured_name_prefix="x."), file)
    file.seek(0)
    state = paddle.load(file)
    own_names = script.model.state_dict(include_sublayers=False)
    return {name: value.numpy() for name, value in state.items()}, list(own_names)


def zeroed(method: str) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        model(paddle.ones([4, 8])).sum().backward()
        getattr(model, method)()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())

    return change


def copied(script: Script) -> Any:
    script.step()
    state = copy.deepcopy(script.model).state_dict()
    return {name: value.numpy() for name, value in state.items()}


def cast(name: str, *args: Any) -> Use:
    def use(script: Script) -> Any:
        result = getattr(script.model, name)(*args)
        return result is script.model, script.step(), script.plain.gain.dtype.name

    return use


def created(method: str) -> Use:
    return lambda s: str(type(getattr(s.model, method)(dtype="float32")))


#: A member that does the same on a wrapped model.
SAME: dict[str, Use] = {
    "add_module": then_step(added("add_module")),
    "add_parameter": then_step(parameter_added("add_parameter")),
    "add_sublayer": then_step(added("add_sublayer")),
    "apply": then_step(lambda model: model.apply(initialised)),
    "buffers": lambda s: [b.numpy() for b in s.model.buffers()],
    "children": lambda s: text(s.model.children()),
    "clear_gradients": then_step(zeroed("clear_gradients")),
    "create_parameter": lambda s: s.model.create_parameter([2], is_bias=True).numpy(),
    "create_tensor": created("create_tensor"),
    "create_variable": created("create_variable"),
    "cpu": then_step(lambda model: model.cpu()),
    "eval": then_step(lambda model: model.eval()),
    "float": cast("float"),
    "forward": forward_replaced,
    "get_buffer": lambda s: s.model.get_buffer("scale").numpy(),
    "get_parameter": lambda s: s.model.get_parameter("body.0.weight").numpy(),
    "get_sublayer": lambda s: str(s.model.get_sublayer("body.0")),
    "get_submodule": lambda s: str(s.model.get_submodule("body.0")),
    "load_dict": loaded("load_dict"),
    "load_state_dict": loaded("load_state_dict"),
    "modules": lambda s: text(s.model.modules()),
    "named_buffers": lambda s: [name for name, _ in s.model.named_buffers("x")],
    "named_children": lambda s: text(s.model.named_children()),
    "named_modules": lambda s: text(s.model.named_modules()),
    "named_parameters": lambda s: [
        [name for name, _ in s.model.named_parameters("x", recurse)] for recurse in (True, False)
    ],
    "named_sublayers": lambda s: text(s.model.named_sublayers()),
    "parameters": lambda s: [p.numpy() for p in s.model.parameters(False)],
    "register_buffer": then_step(buffer_registered),
    "register_forward_hook": hooked("register_forward_hook"),
    "register_forward_post_hook": hooked("register_forward_post_hook"),
    "register_forward_pre_hook": hooked("register_forward_pre_hook"),
    "register_module": then_step(added("register_module")),
    "register_parameter": then_step(parameter_added("register_parameter")),
    "register_state_dict_hook": hooked_state,
    "requires_grad_": then_step(frozen),
    "set_dict": loaded("set_dict"),
    "set_state_dict": loaded("set_state_dict"),
    "set_sublayer": then_step(replaced("set_sublayer")),
    "set_submodule": then_step(replaced("set_submodule")),
    "sharded_state_dict": lambda s: list(s.model.sharded_state_dict()),
    "state_dict": saved,
    "sublayers": lambda s: text(s.model.sublayers(include_self=False)),
    "to": then_step(lambda model: model.to("cpu")),
    "to_static_state_dict": lambda s: list(s.model.to_static_state_dict()),
    "train": then_step(lambda model: (model.eval(), model.train())),
    "training": lambda s: (s.plain.eval(), s.model.training)[1],
    "zero_grad": then_step(zeroed("zero_grad")),
    "__call__": lambda s: s.loss().item(),
    "__delattr__": then_step(deleted_attributes),
    "__dir__": lambda s: {"temperature", "head", "gain", "scale"} <= set(dir(s.model)),
    "__getattr__": lambda s: (s.model.temperature, hasattr(s.model, "nothing")),
    "__setattr__": then_step(set_attributes),
}
#: A member that changes what the servers hold: an error at the call or in the next step. With
#: DataParallel it does the same as without.
REFUSED: dict[str, Use] = {
    "double": cast("double"),
    "type": cast("type", "float64"),
}
#: A member that works as long as parameters are on this worker. (On a CPU, plain Paddle cannot
#: train in half precision either.)
REFUSED_AT_P_G_OS: dict[str, Use] = {
    "astype": cast("astype", "bfloat16"),
    "bfloat16": cast("bfloat16"),
    "float16": cast("float16"),
    "half": cast("half"),
}
#: A member that is not for scripts, or of hardware that the tests do not have: why it is the same.
OTHER = {
    "__init__": "a wrapper is created by a function of ZeroShard",
    "__getstate__": "not called: Paddle does not pickle layers",
    "__repr__": "shows the wrapper around the layer, as that of paddle.DataParallel",
    "__setstate__": "as __getstate__",
    "backward": "raises an error in Paddle",
    "cuda": "as cpu",
    "extra_repr": "called by __repr__ of the layer",
    "full": "reads sharded_state_dict",
    "full_name": "the wrapper has a name of its own, as paddle.DataParallel",
    "get_extra_state": "raises an error in Paddle",
    "xpu": "as cpu",
}


# ---- optimizers


def scheduled(script: Script) -> Any:
    found = []
    script.optimizer.set_lr_scheduler(paddle.optimizer.lr.StepDecay(0.05, 1))
    for _ in range(3):
        found += [script.optimizer.get_lr(), *script.step()]
        script.optimizer._learning_rate.step()
    return found


def rate_set(script: Script) -> Any:
    found = script.step()
    script.optimizer.set_lr(0.01)
    return found, script.optimizer.get_lr(), script.step(), script.step()


def optimizer_loaded(method: str) -> Use:
    def use(script: Script) -> Any:
        script.step()
        state = {
            key: value.clone() if isinstance(value, paddle.Tensor) else value
            for key, value in script.optimizer.state_dict().items()
        }
        script.step()
        getattr(script.optimizer, method)(state)
        return script.step(), script.step()

    return use


def optimizer_state(script: Script) -> Any:
    script.step()
    state = script.optimizer.state_dict()
    # The numbers at the end of Paddle's names count the accumulators of the process.
    return {
        key.rpartition("_")[0]: value.numpy() for key, value in sorted(state.items()) if "_" in key
    }


def minimized(script: Script) -> Any:
    found = []
    for _ in range(2):
        loss = script.loss()
        loss.backward()
        script.optimizer.minimize(loss)
        script.optimizer.clear_grad()
        found.append(loss.item())
    return found


def gradients_of(script: Script) -> Any:
    loss = script.loss()
    loss.backward()
    pairs = script.optimizer.backward(loss)
    return [gradient.numpy() for _, gradient in pairs], script.step()


def gradients_cleared(method: str) -> Use:
    def use(script: Script) -> Any:
        script.step()
        script.loss().backward()
        getattr(script.optimizer, method)()
        left = [p.grad is None or not p.grad.any() for p in script.plain.parameters()]
        return left, script.step()

    return use


#: A member that does the same on a sharded optimizer. What scripts change in its settings is tested
#: in test_optimizer_members.py.
OPTIMIZER: dict[str, Use] = {
    "backward": gradients_of,
    "clear_grad": gradients_cleared("clear_grad"),
    "clear_gradients": gradients_cleared("clear_gradients"),
    "get_lr": rate_set,
    "load_state_dict": optimizer_loaded("load_state_dict"),
    "minimize": minimized,
    "regularization": lambda s: str(s.optimizer.regularization),
    "set_lr": rate_set,
    "set_lr_scheduler": scheduled,
    "set_state_dict": optimizer_loaded("set_state_dict"),
    "state_dict": optimizer_state,
    "step": lambda s: [s.step() for _ in range(3)],
    "type": lambda s: s.optimizer.type,
    "zero_grad": gradients_cleared("zero_grad"),
}
#: A member that is an error with a remedy.
OPTIMIZER_REFUSED: dict[str, Use] = {
    "apply_gradients": lambda s: s.optimizer.apply_gradients([]),
}
#: A part of Paddle's own steps, or of its static graphs.
OPTIMIZER_OTHER = {
    "append_regularization_ops", "fused_buffer_version", "fused_states_accumulators_meta",
    "fused_states_buffer", "fused_states_buffer_ipc_meta", "fused_states_master_weights_meta",
    "fusion_storage", "get_opti_var_name_list", "helper", "merged_model_params", "need_refuse",
    "reset_need_refuse", "set_merged_model_params", "use_fusion_storage",
}  # fmt: skip


def members(kind: type) -> set[str]:
    """The public members of a class, and the special ones that it defines itself."""
    special = {"__annotations__", "__dict__", "__doc__", "__module__", "__weakref__"}
    own = {name for name in vars(kind) if name.startswith("__")} - special
    return own | {name for name in dir(kind) if name[0] != "_"}


def test_every_member_of_layer_is_known() -> None:
    known = {*SAME, *REFUSED, *REFUSED_AT_P_G_OS, *OTHER}
    assert members(nn.Layer) | {"training"} == known


def test_every_member_of_optimizer_is_known() -> None:
    public = {name for name in vars(Script(None).optimizer) if name[0] != "_"}
    known = {*OPTIMIZER, *OPTIMIZER_REFUSED, *OPTIMIZER_OTHER}
    assert members(paddle.optimizer.Optimizer) - {"__init__"} | public == known


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_members_of_a_wrapped_layer_do_the_same(wrapper: str, cluster: zs.Session) -> None:
    same = SAME | {f"Optimizer.{name}": use for name, use in OPTIMIZER.items()}
    same |= {} if wrapper == "p_g_os" else REFUSED_AT_P_G_OS
    different = {}
    for name, use in same.items():
        expected, found = outcome(use, None), outcome(use, wrapper)
        try:
            assert_close(found, expected, rtol=1e-4, atol=1e-6)
        except AssertionError:
            different[name] = found, expected
    assert different == {}


@pytest.mark.parametrize("level", LEVELS)
def test_the_members_that_change_what_servers_hold_are_refused(
    level: str, cluster: zs.Session
) -> None:
    refused = REFUSED | OPTIMIZER_REFUSED | (REFUSED_AT_P_G_OS if level == "p_g_os" else {})
    remedies = "do it before|change the model before|call optimizer.step"
    for name, use in refused.items():
        with pytest.raises(zs.InvalidArgumentError, match=remedies):
            use(Script(level))
            pytest.fail(f"{name} is not refused")


def outcome(use: Use, wrapper: str | None) -> Any:
    """What a use returns, or the type of the error that it raises."""
    try:
        return use(Script(wrapper))
    except Exception as error:
        return type(error).__name__
