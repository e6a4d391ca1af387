# promise: no-silent-difference
"""Each member of ``torch.nn.Parameter`` does the same for a parameter that is on the servers, and
each member of ``Tensor`` for a gradient that is on the servers, as for plain tensors.

Every member that torch has is read, or called without arguments, so that a member of a new version
of torch is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from test_members import Script, is_close

#: Members that differ for a parameter, and why that is right.
PARAMETER = {
    "_cdata": "the address of the object",
    "_post_accumulate_grad_hooks": "has the hook that sends the gradient",
    "_version": "counts the writes of ZeroShard as well",
    "const_data_ptr": "an address",
    "data_ptr": "an address",
}
#: Members that differ for a gradient.
GRADIENT = {
    "_cdata": "the address of the object",
    "_python_dispatch": "whether it is a subclass",
    "_use_count": "counts the references to the object",
}
#: Members that are an error for a gradient, which has no memory on the worker.
REFUSED_FOR_GRADIENTS = {
    "_typed_storage", "const_data_ptr", "data_ptr", "set_", "share_memory_", "squeeze_", "storage",
    "t_", "untyped_storage",
}  # fmt: skip


def names(kind: type) -> list[str]:
    """The members of a class, without those of every object, and without backward passes."""
    left_out = {*dir(object), "__dict__", "__weakref__", "__module__", "backward"}
    return sorted(set(dir(kind)) - left_out)


def look(value: Any) -> Any:
    """What can be compared of a result."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (
            tuple(value.shape),
            value.dtype,
            (value.to_dense() if value.is_sparse else value).tolist(),
        )
    if isinstance(value, list | tuple):
        return [look(each) for each in value]
    if type(value).__module__ == "numpy":
        return value.tolist()
    is_plain = isinstance(value, int | float | str | type(None) | torch.dtype | torch.device)
    return value if is_plain else type(value).__name__


def used(tensor: Tensor, name: str) -> Any:
    """The result of a member and the values of the tensor afterwards, or the error's type."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            member = getattr(tensor, name)
            result = look(member() if callable(member) else member)
            return result, look(tensor.clone())
    except Exception as error:
        return type(error).__name__


def still(level: str) -> tuple[Script, nn.Parameter]:
    """A script whose steps change no value, and a parameter that has gradients."""
    script = Script(level)
    script.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    for _ in range(2):
        script.step()
    return script, script.plain.body[0].weight  # type: ignore[return-value]


def differences(kind: type, plain: Tensor, ours: Callable[[], Tensor]) -> dict[str, Any]:
    """The members that differ from those of ``plain``, with what they do."""
    found = {}
    for name in names(kind):
        of_plain = plain.clone()
        expected = used(nn.Parameter(of_plain) if kind is nn.Parameter else of_plain, name)
        got = used(ours(), name)
        if not is_close(got, expected):
            found[name] = got
    return found


@pytest.mark.filterwarnings("ignore")
def test_each_member_of_a_parameter_on_the_servers_does_the_same(cluster: zs.Session) -> None:
    script, parameter = still("p_g_os")
    values = script.model.state_dict()["body.0.weight"].clone()

    def on_servers() -> Tensor:
        sharding = script.model.sharding
        if parameter.shape != values.shape:
            with torch.no_grad():
                parameter.set_(values.clone())  # type: ignore[call-overload]
        parameter.grad = None
        parameter.requires_grad_()
        if sharding.job.entry(parameter).modified:
            with torch.no_grad():
                parameter.copy_(values)
            script.step()
        sharding.gatherer.settle()
        return parameter

    assert differences(nn.Parameter, values, on_servers).keys() == PARAMETER.keys()


@pytest.mark.filterwarnings("ignore")
def test_each_member_of_a_gradient_on_the_servers_does_the_same(cluster: zs.Session) -> None:
    script, parameter = still("os_g")

    def on_servers() -> Tensor:
        script.optimizer.zero_grad()
        script.outputs().pow(2).mean().backward()
        assert parameter.grad is not None
        return parameter.grad

    found = differences(Tensor, on_servers().clone(), on_servers)
    refused = {name for name, got in found.items() if got == "InvalidArgumentError"}
    assert refused == REFUSED_FOR_GRADIENTS
    assert found.keys() - refused == GRADIENT.keys()
