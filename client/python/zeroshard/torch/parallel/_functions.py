"""The input and output functions of the earlier tensor parallel styles, which torch has removed.

``make_input_*`` turn the input of a module into a DTensor, ``make_output_*`` turn its output into
the next module's input. A plain tensor passed to ``make_input_shard_*`` is this rank's shard: no
data is moved, and the global size is the local size times the mesh's size, so all shards must have
the same size. A DTensor is redistributed.

Meshes must have one dimension. All functions raise :class:`~zeroshard.NotATensorError` (a
RuntimeError) if the value is not a tensor, and :class:`~zeroshard.InvalidArgumentError` if the mesh
has several dimensions or the tensor does not have the dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...errors import InvalidArgumentError, NotATensorError
from .._mesh import check_1d, check_placement, mesh_text

#: A module's input or output. Module hooks receive a single input as a tuple.
Value = Tensor | Sequence[Tensor]


def make_input_shard_1d(
    input: Value, device_mesh: DeviceMesh | None = None, dim: int = 0
) -> DTensor:
    """A DTensor that is sharded on ``dim``. ``device_mesh`` defaults to a DTensor's own mesh."""
    return _input(input, device_mesh, Shard(dim))


def make_input_shard_1d_last_dim(input: Value, device_mesh: DeviceMesh | None = None) -> DTensor:
    """:func:`make_input_shard_1d` on the last dimension."""
    return _input(input, device_mesh, Shard(-1))


def make_input_reshard_replicate(input: Value, device_mesh: DeviceMesh | None = None) -> DTensor:
    """A replicated DTensor, from shards of dimension 0: an all-gather."""
    return make_input_replicate_1d(make_input_shard_1d(input, device_mesh), device_mesh)


def make_input_replicate_1d(input: Value, device_mesh: DeviceMesh | None = None) -> DTensor:
    """A replicated DTensor. A plain tensor must be equal on every rank."""
    return _input(input, device_mesh, Replicate())


def make_output_shard_1d(
    output: Value, device_mesh: DeviceMesh | None = None, dim: int = 0
) -> DTensor:
    """The DTensor ``output``, sharded on ``dim``. ``device_mesh`` defaults to its own mesh."""
    return _output(output, device_mesh, Shard(dim))


def make_output_replicate_1d(output: Value, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The DTensor ``output``, replicated."""
    return _output(output, device_mesh, Replicate())


def make_output_tensor(output: Value, device_mesh: DeviceMesh | None = None) -> Tensor:
    """The whole DTensor ``output`` as a plain tensor, on every rank."""
    return local(make_output_replicate_1d(output, device_mesh))


def make_sharded_output_tensor(
    output: Value, _device_mesh: DeviceMesh | None = None, *, device_mesh: DeviceMesh | None = None
) -> Tensor:
    """This rank's shard of the DTensor ``output``, with its current placement, as a plain tensor.

    The mesh has torch's name ``_device_mesh`` here, and also that of the other functions.
    """
    return local(_distributed(output, _device_mesh or device_mesh))


def make_output_reshard_tensor(output: Value, device_mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's shard of dimension 0 of the DTensor ``output``, as a plain tensor: a
    reduce-scatter of partial sums.

    The shards must have the same size, because a plain tensor does not carry the global size.
    """
    return local(even(make_output_shard_1d(output, device_mesh), "output"))


def local(value: DTensor) -> Tensor:
    """The local tensor."""
    return value.to_local()


def even(value: DTensor, what: str) -> DTensor:
    """Returns the DTensor, or raises an error if its shards have different sizes."""
    mesh, (placement,) = value.device_mesh, value.placements
    if isinstance(placement, Shard) and value.shape[placement.dim] % mesh.size():
        raise InvalidArgumentError(
            f"dimension {placement.dim} of {what} has {value.shape[placement.dim]} elements; "
            f"it must be divisible by the {mesh.size()} ranks of the mesh, because its shards "
            "become plain tensors; otherwise keep a DTensor (use_local_output=False, "
            "make_output_shard_1d)"
        )
    return value


def redistributed(value: DTensor, placement: Placement) -> DTensor:
    """The DTensor with another placement on its one-dimensional mesh."""
    if value.placements == (placement,):
        return value
    return value.redistribute(placements=(placement,))


def same_mesh(value: DTensor, mesh: DeviceMesh, what: str) -> None:
    """Raises an error unless the DTensor is on the mesh."""
    if value.device_mesh != mesh:
        raise InvalidArgumentError(
            f"{what} is on the mesh {mesh_text(value.device_mesh)}; it must be on "
            f"{mesh_text(mesh)}; use reshard to move it"
        )


def _input(value: Value, mesh: DeviceMesh | None, placement: Placement) -> DTensor:
    tensor = _single(value)
    if not isinstance(tensor, Tensor):
        raise NotATensorError(
            f"the input is a {type(tensor).__name__}; it must be a torch.Tensor or a DTensor"
        )
    if mesh is None and isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
    mesh = check_1d(mesh, "device_mesh")
    placement = check_placement(placement, tensor.dim(), "the input")
    if isinstance(tensor, DTensor):
        same_mesh(tensor, mesh, "the input")
        return redistributed(tensor, placement)
    return DTensor.from_local(tensor, mesh, (placement,), run_check=False)


def _output(value: Value, mesh: DeviceMesh | None, placement: Placement) -> DTensor:
    output = _distributed(value, mesh)
    return redistributed(output, check_placement(placement, output.dim(), "the output"))


def _distributed(value: Value, mesh: DeviceMesh | None) -> DTensor:
    output = _single(value)
    if not isinstance(output, DTensor):
        raise NotATensorError(
            f"the output is a {type(output).__name__}; it must be a DTensor, which parallel "
            "modules return"
        )
    mesh = check_1d(output.device_mesh if mesh is None else mesh, "device_mesh")
    same_mesh(output, mesh, "the output")
    return output


def _single(value: Value) -> object:
    """The element of a hook's tuple of one."""
    if isinstance(value, (tuple, list)) and len(value) == 1:
        return value[0]
    return value
