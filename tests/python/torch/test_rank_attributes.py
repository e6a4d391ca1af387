"""What optimizers that run on the ranks may have in their attributes: constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import zeroshard as zs
from optimizers_on_ranks import STAGES, make_step
from training import SEGMENT, assert_same
from zeroshard.torch import shard


class Momentum(torch.optim.Optimizer):
    """Momentum. Subclasses have attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter])

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(self.decay()).add_(parameter.grad)
        parameter.sub_(0.05 * momentum)

    def decay(self) -> Any:
        return 0.9


class WithTable(Momentum):
    """Has a table of constants, and notes its first step, as the classes of bitsandbytes do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tables = {"decay": torch.tensor([0.8, 0.9])}
        self.is_ready = False

    def step(self, closure: Any = None) -> None:
        self.is_ready = True
        super().step()

    def decay(self) -> Any:
        return self.tables["decay"][1]


class Warmed(WithTable):
    """Its first step differs from the others, and only an attribute tells which is the first."""

    def decay(self) -> Any:
        return 0.0

    def step(self, closure: Any = None) -> None:
        if not self.is_ready:
            self.is_ready = True
            return
        super().step()


class Totalling(Momentum):
    """Adds up something in a tensor that it has in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.total = [torch.zeros(())]

    def step(self, closure: Any = None) -> None:
        self.total[0] += 1
        super().step()


class Late(Momentum):
    """Begins to keep a tensor in an attribute."""

    def step(self, closure: Any = None) -> None:
        self.kept = {"norm": torch.ones(3)}
        super().step()


class Holding(Momentum):
    """Has the parameters in an attribute, too, and changes them there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.matrices = [[each] for group in self.param_groups for each in group["params"]]


@pytest.mark.parametrize("stage", STAGES)
def test_constants_may_be_in_attributes(stage: int, cluster: zs.Session) -> None:
    outcomes = []
    for is_sharded in (False, True):
        model = models.build("mlp")
        optimizer = WithTable(model.parameters())
        if is_sharded:
            shard(model, optimizer, stage, segment_size=SEGMENT)
        for step in range(4):
            make_step(model, [optimizer], models.batch("mlp", step, 8))
        outcomes.append(model.state_dict())
    assert_same(*outcomes)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Warmed, "Warmed keeps state in its attribute 'is_ready'"),
        (Totalling, "Totalling keeps state in its attribute 'total'"),
        (Late, "Late keeps state in its attribute 'kept'"),
        (Holding, "Holding has parameters or another optimizer in its attribute 'matrices'"),
    ],
)
def test_state_in_attributes_is_refused(cls: Any, message: str, cluster: zs.Session) -> None:
    model = models.build("mlp")
    with pytest.raises(zs.UnsupportedOptimizerError, match=message):
        shard(model, cls(model.parameters()))
