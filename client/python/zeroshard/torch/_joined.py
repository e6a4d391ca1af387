"""Several optimizers of one model as one job, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .._core.gradients import STEP_TOGETHER
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from ._conversion import server_name
from ._rank_optimizer import TorchRankOptimizer
from ._trial import changes, class_name, hyperparameters


class Joined(torch.optim.Optimizer):
    """Has the parameter groups of several optimizers. It does not step itself."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Not that of torch, which would copy the groups.
        self.parts = list(parts)
        self.defaults: dict[str, Any] = {}
        stepped: set[int] = set()
        for number, part in enumerate(parts):
            own = {id(p) for group in part.param_groups for p in group["params"]}
            if own & stepped:
                raise InvalidArgumentError(
                    f"optimizer {number}, a {class_name(part)}, has a parameter that an optimizer "
                    "before it has, too; give each parameter to one of them"
                )
            stepped |= own
        clips = [part.grad_clip for part in parts if hasattr(part, "grad_clip")]
        if clips:
            #: How every step is clipped: see ``max_norm_of``.
            self.grad_clip = clips[0]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups of all, in the order of the optimizers."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of all."""
        return {key: held for part in self.parts for key, held in part.state.items()}


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers in a joined one; otherwise the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, Joined) else [optimizer]


def on_ranks(optimizer: torch.optim.Optimizer, separable: bool | None) -> TorchRankOptimizer | None:
    """The part of an optimizer that ranks run: what the servers do not have. None if the servers
    run all of it."""
    if separable is not None and not isinstance(separable, bool):
        raise InvalidArgumentError(f"separable is {separable!r}; it must be True, False or None")
    ranks = [part for part in parts_of(optimizer) if server_name(part) is None]
    return TorchRankOptimizer(ranks, separable) if ranks else None


@dataclass
class _Waiting:
    """An optimizer that has stepped, while another optimizer of its model has not."""

    optimizer: torch.optim.Optimizer
    #: The hyperparameters of its groups when it stepped. A scheduler may change them since.
    groups: list[dict[str, Any]]


class Together:
    """The optimizers of one model, which make one step of the job: when the last of them steps.

    In torch each has changed its parameters by then. What a script could notice of that between two
    of the steps is an error.
    """

    def __init__(self, members: int, sharding: Sharding[Tensor]) -> None:
        self._members = members
        self._sharding = sharding
        self._waiting: list[_Waiting] = []
        #: The hook that refuses forwards while one waits.
        self._refusing: RemovableHandle | None = None
        #: Those that have been asked to drop their gradients before the step, and how.
        self._zeroed: list[tuple[torch.optim.Optimizer, bool]] = []

    def waits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether it has stepped, and the others have not."""
        return any(optimizer is each.optimizer for each in self._waiting)

    def arrives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called when an optimizer steps. Returns whether it is the last one, whose step is that of
        all: :meth:`as_stepped`."""
        if self.waits(optimizer):
            raise InvalidArgumentError(
                f"{class_name(optimizer)} steps again, and the other optimizers of its model have "
                f"not stepped; {STEP_TOGETHER}"
            )
        groups = [hyperparameters(group) for group in optimizer.param_groups]
        self._waiting.append(_Waiting(optimizer, groups))
        self._sharding.gradients.stepped |= {
            id(parameter): class_name(optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if self._refusing is None:
            self._refusing = register_module_forward_pre_hook(self._refuse)
        return len(self._waiting) == self._members

    def _refuse(self, module: nn.Module, _: Any) -> None:
        """Raises an error if a module has parameters that another optimizer of the model has still
        to change."""
        for name, parameter in module.named_parameters(recurse=False):
            stepped = self._sharding.gradients.stepped.get(id(parameter))
            if stepped is not None:
                raise InvalidArgumentError(
                    f"a forward uses parameter {name!r} of a {type(module).__name__} after the "
                    f"step of {stepped}, and another optimizer of the model has not stepped; "
                    f"{STEP_TOGETHER}"
                )

    @contextlib.contextmanager
    def as_stepped(self) -> Iterator[None]:
        """A context for the step, with the hyperparameters that each optimizer had when it stepped.
        After it the groups have those that the script has set since."""
        waiting, self._waiting = self._waiting, []
        self._sharding.gradients.stepped.clear()
        if self._refusing is not None:
            self._refusing.remove()
            self._refusing = None
        since: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for each in waiting:
            for group, had in zip(each.optimizer.param_groups, each.groups):
                now = changes(had, group)
                changed = {key: value for key, value in now.items() if key in had}
                since.append((group, changed))
                group.update({key: had[key] for key in changed})
        try:
            yield
        finally:
            for group, changed in since:
                group.update(changed)

    def zero_later(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Called when an optimizer that waits is to drop its gradients."""
        self._zeroed.append((optimizer, set_to_none))

    def zero(self) -> None:
        """Called after the step."""
        zeroed, self._zeroed = self._zeroed, []
        for optimizer, set_to_none in zeroed:
            optimizer.zero_grad(set_to_none)
