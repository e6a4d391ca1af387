"""What every framework asks of a mesh's dimensions, and of placements on it."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidArgumentError


def dimension(dim: object, ndim: int, names: Sequence[str]) -> int:
    """The number of a mesh's dimension that is given by number or by name; ``names`` may be
    none."""
    if isinstance(dim, str) and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and not isinstance(dim, bool) and -ndim <= dim < ndim:
        return dim % ndim
    known = ", ".join(map(repr, names)) or "without names"
    raise InvalidArgumentError(f"the mesh has no dimension {dim!r}; it has {ndim} ({known})")


def check_placements(placements: object, placement_type: type, mesh_ndim: int, what: str) -> None:
    """There must be one placement for each dimension of the mesh."""
    if not isinstance(placements, Sequence) or not all(
        isinstance(each, placement_type) for each in placements
    ):
        raise InvalidArgumentError(
            f"placements of {what} is {placements!r}; it must be a list of Shard(dim), Replicate() or Partial()"
        )
    if len(placements) != mesh_ndim:
        raise InvalidArgumentError(
            f"placements of {what} has {len(placements)}; it must have one for each of the {mesh_ndim} dimensions of the "
            "mesh"
        )


def tensor_dimension(dim: int, ndim: int, what: str) -> int:
    """The dimension of a tensor that is sharded, counted from the front."""
    if not -ndim <= dim < ndim:
        raise InvalidArgumentError(
            f"{what} is to be sharded on dimension {dim}, and has {ndim} dimension{'s' if ndim != 1 else ''}; it must be "
            f"one of {list(range(ndim))}"
        )
    return dim % ndim
