# promise: no-silent-difference
"""Each member of ``paddle.base.framework.EagerParamBase`` does the same for a parameter that is on
the servers as for a plain one, and what it writes becomes part of the next step.

Every member that Paddle has is read, or called without arguments, so that a member of a new version
is compared as well.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle.base.framework import EagerParamBase

from comparison import assert_close
from test_members import Script

#: Members that differ, and why that is right.
DIFFERENT = {
    "data_ptr": "an address",
    "inplace_version": "counts the writes of ZeroShard as well",
    "name": "the plain parameter has another name",
}
#: Members that end the process of plain Paddle, if they are called without arguments.
CRASHES = {"copy_", "is_same_shape", "reconstruct_from_", "set_string_list", "set_vocab"}
#: A step uses the gradients of a backward pass, and not what this leaves.
LEFT_OUT = {"backward"}


def look(value: Any) -> Any:
    """What can be compared of a result."""
    if isinstance(value, paddle.Tensor):
        dense = value.detach().to_dense() if value.is_sparse() else value.detach()
        plain = dense.astype("float32") if dense.dtype == paddle.bfloat16 else dense
        return list(value.shape), str(value.dtype), look(plain.numpy())
    if isinstance(value, list | tuple):
        return [look(each) for each in value]
    if isinstance(value, np.ndarray):
        return look(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def used(parameter: Any, name: str) -> Any:
    """The result of a member and the values of the parameter afterwards, or the error's type."""
    paddle.seed(0)
    try:
        with paddle.no_grad():
            member = getattr(parameter, name)
            result = look(member() if callable(member) else member)
            return result, look(parameter.clone())
    except Exception as error:
        return type(error).__name__


def is_close(found: Any, expected: Any) -> bool:
    try:
        assert_close(found, expected)
    except AssertionError:
        return False
    return True


class Still:
    """A script whose steps change no value, and a parameter that is on the servers."""

    def __init__(self) -> None:
        self.script = Script("p_g_os")
        self.script.optimizer.set_lr(0.0)
        self.script.step()
        self.parameter = self.script.plain.body[0].weight
        self.values = self.stepped()

    def stepped(self) -> Any:
        """The values after a step."""
        self.parameter.stop_gradient = False
        self.script.step()
        return look(self.script.model.state_dict()["body.0.weight"])


@pytest.mark.filterwarnings("ignore")
def test_each_member_of_a_parameter_on_the_servers_does_the_same(cluster: zs.Session) -> None:
    still, different, lost = Still(), set(), []
    values = paddle.to_tensor(still.values[2])
    names = {name for name in dir(EagerParamBase) if name[0] != "_"} - CRASHES - LEFT_OUT
    for name in sorted(names):
        plain = paddle.create_parameter(list(values.shape), "float32")
        plain.set_value(values)
        still.script.model.sharding.gatherer.settle()
        expected, found = used(plain, name), used(still.parameter, name)
        if not is_close(found, expected):
            different.add(name)
        elif isinstance(found, str) or is_close(found[1], still.values):
            continue
        elif found[1][:2] == still.values[:2] and np.isfinite(plain.numpy()).all():
            if not is_close(still.stepped(), found[1]):
                lost.append(name)
        still = Still()
    assert different <= DIFFERENT.keys() and not lost, (different, lost)
