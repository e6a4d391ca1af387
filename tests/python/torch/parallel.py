"""Helpers for the tests of parallel modules: parts of tensors, and comparisons with the dense
module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from zeroshard.torch import ProcessMesh


def mesh_1d() -> ProcessMesh:
    """A one-dimensional mesh of all ranks."""
    return ProcessMesh(list(range(dist.get_world_size())), ["tp"])


def part(tensor: Tensor, rank: int, dim: int) -> Tensor:
    """A rank's part of a tensor, split as by torch.chunk. It may be empty."""
    parts = tensor.chunk(dist.get_world_size(), dim)
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def placements(module: nn.Module) -> dict[str, Placement]:
    """The placements of the parameters, by name."""
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        (found[name],) = parameter.placements
    return found


def assert_gradients(parallel: nn.Module, dense: nn.Module) -> None:
    """Asserts that all gradients are those of the dense module."""
    own = dict(parallel.named_parameters())
    assert own.keys() == dict(dense.named_parameters()).keys()
    for name, parameter in dense.named_parameters():
        grad = own[name].grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, parameter.grad, msg=lambda text: f"{name}: {text}")


def assert_trains_as(
    parallel: nn.Module, dense: nn.Module, given: Tensor, taken: Tensor | None = None
) -> None:
    """Asserts that the output and the gradients of parameters and input are equal. ``taken`` is the
    input of the parallel module, if it differs."""
    ours = (given if taken is None else taken).clone().requires_grad_()
    reference = given.clone().requires_grad_()
    output, expected = parallel(ours), dense(reference)
    torch.testing.assert_close(output, expected)
    weight = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_gradients(parallel, dense)
    torch.testing.assert_close(ours.grad, reference.grad)
