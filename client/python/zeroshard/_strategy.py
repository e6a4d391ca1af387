"""Sharding stages and strategies, which are the same in every framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import InvalidArgumentError

#: The level of each sharding stage.
LEVEL_OF_STAGE = {1: "os", 2: "os_g", 3: "p_g_os"}


def level_of_stage(stage: int) -> str:
    """The level of a sharding stage: 1 is ``os``, 2 is ``os_g``, 3 is ``p_g_os``."""
    try:
        return LEVEL_OF_STAGE[stage]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"stage is {stage!r}; it must be 1 (os), 2 (os_g) or 3 (p_g_os)"
        ) from None


@dataclass(frozen=True)
class ShardingStage:
    """An argument of ``shard_optimizer`` that selects the tensors that the shard servers hold.

    The servers distribute the load by bytes, independently of meshes. ``mesh`` determines the ranks
    that train together, all ranks by default. ``sharding_mesh_dim``, one of its dimensions, is
    accepted for compatibility.
    """

    sharding_mesh_dim: Any = None
    mesh: Any = None
    stage: ClassVar[int]

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.stage)


class ShardingStage1(ShardingStage):
    """The servers hold the optimizer state: level ``os``."""

    stage = 1


class ShardingStage2(ShardingStage):
    """The servers hold optimizer state and gradients: level ``os_g``."""

    stage = 2


class ShardingStage3(ShardingStage):
    """The servers hold optimizer state, gradients and parameters: level ``p_g_os``."""

    stage = 3


@dataclass
class ShardingStrategy:
    """Selects the tensors that the shard servers hold. Without ``enable``, these are the optimizer
    state, as with stage 1."""

    enable: bool = False
    #: 1: optimizer state. 2: also gradients. 3: also parameters.
    stage: int = 1


@dataclass
class Strategy:
    """The settings with which a :class:`DistModel` is trained."""

    sharding: ShardingStrategy = field(default_factory=ShardingStrategy)

    def __init__(self, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """``config``: ``{"sharding": {"enable": True, "stage": 2}}``."""
        self.sharding = ShardingStrategy()
        for section, values in (config or {}).items():
            if section != "sharding":
                raise InvalidArgumentError(
                    f"the strategy's config has an unknown section {section!r}; use 'sharding'"
                )
            known = vars(self.sharding)
            for name, value in values.items():
                if name not in known:
                    raise InvalidArgumentError(
                        f"the section {section!r} of the strategy's config has an unknown key "
                        f"{name!r}; use {', '.join(known)}"
                    )
                setattr(self.sharding, name, value)

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.sharding.stage if self.sharding.enable else 1)


def stage_of(shard_fn: object, mesh_type: type) -> ShardingStage:
    """The stage for the ``shard_fn`` of ``shard_optimizer``, which may also be a stage class or
    None. The mesh may be passed in place of its dimension.

    ``mesh_type``: the framework's mesh class.
    """
    if isinstance(shard_fn, type) and issubclass(shard_fn, ShardingStage):
        shard_fn = shard_fn()
    if shard_fn is None:
        return ShardingStage1()
    if not isinstance(shard_fn, ShardingStage) or not hasattr(shard_fn, "stage"):
        raise InvalidArgumentError(
            f"shard_fn is {shard_fn!r}; "
            "it must be ShardingStage1(), ShardingStage2(), ShardingStage3() or None"
        )
    if isinstance(shard_fn.sharding_mesh_dim, mesh_type):
        return type(shard_fn)(None, shard_fn.sharding_mesh_dim)
    return shard_fn


def check_request(
    stage: ShardingStage, gradient_accumulation_steps: object, model: object | None
) -> None:
    """Validates the arguments of ``shard_optimizer``."""
    if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
        raise InvalidArgumentError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps!r}; it must be 1 or more"
        )
    if model is None and stage.level == "p_g_os":
        raise InvalidArgumentError(
            "ShardingStage3 needs the model, whose parameters are fetched for each use; call "
            "shard_optimizer(optimizer, ShardingStage3(), model=model), or to_static with a "
            "strategy of stage 3"
        )
