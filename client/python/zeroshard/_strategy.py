"""What the shard servers hold for the workers, by the stages of sharding: the same words in every
framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import InvalidArgumentError

#: The levels that the stages of sharding stand for.
LEVEL_OF_STAGE = {1: "os", 2: "os_g", 3: "p_g_os"}


def level_of_stage(stage: int) -> str:
    """The level that a stage of sharding stands for: 1 ``os``, 2 ``os_g``, 3 ``p_g_os``."""
    try:
        return LEVEL_OF_STAGE[stage]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"stage is {stage!r}; it must be 1 (os), 2 (os_g) or 3 (p_g_os)"
        ) from None


@dataclass(frozen=True)
class ShardingStage:
    """For ``shard_optimizer``: what the shard servers hold for the workers.

    The servers share the work by bytes, whatever mesh the workers have. ``mesh`` says which ranks
    train together (all, if it is None), and ``sharding_mesh_dim``, one of its dimensions, is
    accepted for programs that have it.
    """

    sharding_mesh_dim: Any = None
    mesh: Any = None
    stage: ClassVar[int]

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.stage)


class ShardingStage1(ShardingStage):
    """The optimizer's state: level ``os``."""

    stage = 1


class ShardingStage2(ShardingStage):
    """Gradients too: level ``os_g``."""

    stage = 2


class ShardingStage3(ShardingStage):
    """Parameters too: level ``p_g_os``."""

    stage = 3


@dataclass
class ShardingStrategy:
    """What the shard servers hold for the workers; without ``enable`` it is the optimizer's state,
    as with stage 1."""

    enable: bool = False
    #: 1: optimizer state. 2: gradients too. 3: parameters too.
    stage: int = 1


@dataclass
class Strategy:
    """How a :class:`DistModel` trains."""

    sharding: ShardingStrategy = field(default_factory=ShardingStrategy)

    def __init__(self, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """``config``: ``{"sharding": {"enable": True, "stage": 2}}``."""
        self.sharding = ShardingStrategy()
        for section, values in (config or {}).items():
            if section != "sharding":
                raise InvalidArgumentError(
                    f"the strategy's config has {section!r}; it can have 'sharding'"
                )
            known = vars(self.sharding)
            for name, value in values.items():
                if name not in known:
                    raise InvalidArgumentError(
                        f"the strategy's {section!r} has {name!r}; it can have {', '.join(known)}"
                    )
                setattr(self.sharding, name, value)

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.sharding.stage if self.sharding.enable else 1)


def stage_of(shard_fn: object, mesh_type: type) -> ShardingStage:
    """The stage that ``shard_optimizer`` is given: also by its class, with a mesh in its
    dimension's place, or None.

    ``mesh_type``: what the framework's meshes are.
    """
    if isinstance(shard_fn, type) and issubclass(shard_fn, ShardingStage):
        shard_fn = shard_fn()
    if shard_fn is None:
        return ShardingStage1()
    if not isinstance(shard_fn, ShardingStage) or not hasattr(shard_fn, "stage"):
        raise InvalidArgumentError(
            f"shard_fn is {shard_fn!r}; it must be ShardingStage1(), ShardingStage2() or ShardingStage3(), or None"
        )
    if isinstance(shard_fn.sharding_mesh_dim, mesh_type):
        return type(shard_fn)(None, shard_fn.sharding_mesh_dim)
    return shard_fn


def check_request(
    stage: ShardingStage, gradient_accumulation_steps: object, model: object | None
) -> None:
    """What ``shard_optimizer`` is asked for must be possible."""
    if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
        raise InvalidArgumentError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps!r}; it must be 1 or more"
        )
    if model is None and stage.level == "p_g_os":
        raise InvalidArgumentError(
            "ShardingStage3 has parameters fetched for each use, and no model is given; it must be: "
            "shard_optimizer(optimizer, ShardingStage3(), model=model), or to_static with a strategy of stage 3"
        )
