"""Validation of mesh dimensions and placements, for all frameworks."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidArgumentError


def dimension(dim: object, ndim: int, names: Sequence[str]) -> int:
    """The index of a mesh dimension that is given by index or by name. ``names`` may be empty."""
    if isinstance(dim, str) and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and not isinstance(dim, bool) and -ndim <= dim < ndim:
        return dim % ndim
    known = ", ".join(map(repr, names)) or "without names"
    raise InvalidArgumentError(
        f"the mesh has no dimension {dim!r}; it has {ndim} dimensions ({known})"
    )


def check_placements(placements: object, placement_type: type, mesh_ndim: int, what: str) -> None:
    """Raises an error unless there is one placement per mesh dimension."""
    if not isinstance(placements, Sequence) or not all(
        isinstance(each, placement_type) for each in placements
    ):
        raise InvalidArgumentError(
            f"the placements of {what} are {placements!r}; "
            "they must be a list of Shard(dim), Replicate() or Partial()"
        )
    if len(placements) != mesh_ndim:
        raise InvalidArgumentError(
            f"expected one placement of {what} per mesh dimension ({mesh_ndim}), "
            f"got {len(placements)}"
        )


def unsupported_placement(placement: str) -> InvalidArgumentError:
    """The error for a parameter whose placement the servers do not support."""
    return InvalidArgumentError(
        f"a parameter has the placement {placement}; it must be Shard or Replicate"
    )


def placed_already(placements: Sequence[object], mesh: str) -> InvalidArgumentError:
    """The error of ``shard_tensor`` for a tensor that is distributed in another way. ``mesh``: the
    text of its mesh."""
    return InvalidArgumentError(
        f"the tensor already has the placements {list(placements)} on the mesh {mesh}; use reshard "
        "to change its placements or mesh"
    )


def tensor_dimension(dim: int, ndim: int, what: str) -> int:
    """The non-negative index of a tensor's dimension."""
    if not -ndim <= dim < ndim:
        raise InvalidArgumentError(
            f"{what} cannot be sharded on dimension {dim}; "
            f"it has {ndim} dimension{'s' if ndim != 1 else ''}"
        )
    return dim % ndim
