"""Running averages of the parameters of a job, which the shard servers keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ._native import Array
from .errors import InvalidArgumentError

_ON_SKIP = ("update", "keep")


@dataclass(frozen=True)
class Average:
    """A running average of the parameters, for ``ema`` of :func:`zeroshard.shard`.

    Steps and updates are counted from 1. Until step ``start`` the average has the initial values of
    the parameters. After this step it is equal to the parameters, and it moves towards them after
    every ``every``-th step that follows.
    """

    #: The fraction of the average that an update keeps, from 0 to 1: an exponential moving average,
    #: as ``get_ema_multi_avg_fn(decay)`` of ``torch.optim.swa_utils``. None: the parameters of all
    #: updates have the same weight, as in stochastic weight averaging.
    decay: float | None = None
    #: How the fraction grows in the first updates. ``"tenth"``: after ``n`` updates it is at most
    #: ``(1 + n) / (10 + n)``, as in ``EMAModel`` of diffusers. A pair ``(inv_gamma, power)``: it is
    #: at most ``1 - (1 + n / inv_gamma) ** -power``, as there with ``use_ema_warmup=True``, and in
    #: ``ModelEmaV3`` of timm. None: it does not grow.
    warmup: str | tuple[float, float] | None = None
    #: The step after which the average begins.
    start: int = 1
    #: The number of steps from one update to the next.
    every: int = 1
    #: Whether a step that is skipped because of an overflow counts: ``"update"``, as in a training
    #: loop that calls ``update_parameters`` after each step, or ``"keep"``. It must be the same for
    #: all averages of a job.
    on_skip: str = "update"

    def __post_init__(self) -> None:
        for name in ("start", "every"):
            steps = getattr(self, name)
            if type(steps) is not int or steps < 1:
                raise InvalidArgumentError(
                    f"{name} of an average is {steps!r}; it must be a number of steps, at least 1"
                )
        if self.decay is not None and not isinstance(self.decay, Real):
            raise InvalidArgumentError(
                f"decay of an average is {self.decay!r}; it must be a number from 0 to 1, or None "
                "for equal weights"
            )
        pair = self.warmup
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair))
        if not (pair is None or pair == "tenth" or is_pair):
            raise InvalidArgumentError(
                f"warmup of an average is {pair!r}; it must be None, 'tenth' or a pair "
                "(inv_gamma, power)"
            )
        if self.decay is None and pair is not None:
            raise InvalidArgumentError(
                "an average has a warmup and no decay; set decay, or leave warmup out for equal "
                "weights"
            )
        if self.on_skip not in _ON_SKIP:
            raise InvalidArgumentError(
                f"on_skip of an average is {self.on_skip!r}; it must be one of "
                f"{', '.join(map(repr, _ON_SKIP))}"
            )


def averages_of(ema: Any) -> dict[str, Average]:
    """The averages that a program has passed: numbers are the ``decay`` of exponential ones.

    Raises:
        InvalidArgumentError: this is not a mapping of names to numbers and averages, or they have
            different ``on_skip``.
    """
    if ema is None:
        return {}
    if not isinstance(ema, Mapping) or not all(isinstance(name, str) for name in ema):
        raise InvalidArgumentError(
            f"ema is {ema!r}; it must be a dict from names to decays, such as {{'slow': 0.9999}}"
        )
    found = {}
    for name, value in ema.items():
        if not isinstance(value, Average) and not _is_number(value):
            raise InvalidArgumentError(
                f"ema[{name!r}] is {value!r}; it must be a number from 0 to 1, or a "
                "zeroshard.Average"
            )
        found[name] = value if isinstance(value, Average) else Average(float(value))
    if len({average.on_skip for average in found.values()}) > 1:
        raise InvalidArgumentError(
            "the averages of ema have different on_skip; it must be the same for all of them"
        )
    return found


def by_part(
    arrays: list[tuple[int, Array]], trains: Callable[[int], bool], average: str, part: str | None
) -> list[tuple[list[tuple[int, Array]], str | None]]:
    """Arrays by the part of the state that each receives: an average, or ``part`` for the tensors
    that do not train. ``trains``: whether the tensor with this index does."""
    averaged = [one for one in arrays if trains(one[0])]
    others = [one for one in arrays if not trains(one[0])]
    return [both for both in ((averaged, f"average.{average}"), (others, part)) if both[0]]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
