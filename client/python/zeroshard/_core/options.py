"""The arguments of ``group_sharded_parallel`` that are the same in every framework."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .._averages import Average
from .._spikes import SpikePolicy
from ..errors import InvalidArgumentError
from .collectives import GroupSize
from .modules import Modules
from .tensors import T

LEVELS = ("os", "os_g", "p_g_os")
STATE_DTYPES = ("f32", "int8")


def stage_of(level: str) -> int:
    """The stage of ZeRO, from 1 to 3, that a level is.

    Raises:
        InvalidArgumentError: there is no such level.
    """
    if level not in LEVELS:
        raise InvalidArgumentError(
            f"level is {level!r}; it must be one of {', '.join(map(repr, LEVELS))}"
        )
    return LEVELS.index(level) + 1


@dataclass(frozen=True)
class Options:
    """Validated arguments. Sizes count elements."""

    level: str
    sync_buffers: bool
    buffer_max_size: int
    segment_size: int
    sync_comm: bool
    dp_group: Any | None
    exclude_layer: Collection[str | int] | None
    accumulation_steps: int | None
    group_size: GroupSize
    offload: bool
    state_dtype: str
    averages: Mapping[str, Average]
    spikes: SpikePolicy | None

    def __post_init__(self) -> None:
        stage_of(self.level)
        if self.state_dtype not in STATE_DTYPES:
            raise InvalidArgumentError(
                f"state_dtype is {self.state_dtype!r}; it must be one of "
                f"{', '.join(map(repr, STATE_DTYPES))}"
            )
        for name, size in (
            ("buffer_max_size", self.buffer_max_size),
            ("segment_size", self.segment_size),
        ):
            if not isinstance(size, int) or size < 0:
                raise InvalidArgumentError(
                    f"{name} is {size!r}; it must be a non-negative number of elements"
                )
        if self.dp_group is not None:
            raise InvalidArgumentError(
                "dp_group is given; it must be None: pass all ranks as group, since the servers "
                "average over all of them"
            )
        steps = self.accumulation_steps
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise InvalidArgumentError(
                f"accumulation_steps is {steps!r}; it must be a whole number, 1 or more"
            )
        for name, switch in (
            ("offload", self.offload),
            ("sync_buffers", self.sync_buffers),
            ("sync_comm", self.sync_comm),
        ):
            if not isinstance(switch, bool):
                raise InvalidArgumentError(f"{name} is {switch!r}; it must be True or False")
        layers = self.exclude_layer
        if isinstance(layers, str) or not isinstance(layers, Collection | None):
            raise InvalidArgumentError(
                f"exclude_layer is {layers!r}; it must be a list of class names and ids of modules"
            )

    def bucket_numel(self, framework: Modules[T], model: Any) -> int:
        """Elements of a bucket of gradients. At ``p_g_os`` a bucket is not larger than the largest
        parameter, so that it does not delay the gradients of more than one layer."""
        if self.level != "p_g_os":
            return self.buffer_max_size
        largest = max(
            (framework.largest_numel(parameter) for _, parameter in framework.parameters(model)),
            default=0,
        )
        return min(self.buffer_max_size, largest)

    def fetched(self, framework: Modules[T], model: Any) -> set[int]:
        """The ids of the parameters of the model that are on the servers, and on a worker only
        while they are used."""
        excluded = self._excluded(framework, model)
        if self.level != "p_g_os":
            return set()
        return {
            id(parameter)
            for _, parameter in framework.parameters(model)
            if framework.largest_numel(parameter) > self.segment_size
            and id(parameter) not in excluded
            # Nobody trains a quantised base: it stays.
            and framework.dtype(parameter) is not None
        }

    def _excluded(self, framework: Modules[T], model: Any) -> set[int]:
        """The parameters of modules that are excluded, or run in native code: they stay on the
        worker."""
        layers = self.exclude_layer or ()
        modules = list(framework.modules(model))
        known = {id(module) for module in modules} | {type(module).__name__ for module in modules}
        for layer in layers:
            if layer not in known:
                raise InvalidArgumentError(
                    f"exclude_layer contains {layer!r}; each element must be the class name or the "
                    "id of a module of the model"
                )
        return {
            id(parameter)
            for module in modules
            if type(module).__name__ in layers or id(module) in layers or framework.stays(module)
            for _, parameter in framework.parameters(module)
        }
