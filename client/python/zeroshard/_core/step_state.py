"""The state of a step: what this rank has done for the open step, and what it knows of its outcome.

:class:`Step` is the one owner of this state. Its methods say what happened, and raise
:class:`StepStateError` if that cannot happen now. This file knows neither jobs nor frameworks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from .._native import Rest
from ..errors import InvalidArgumentError


class Phase(Enum):
    """The states of a step. The value completes the sentence "This rank ..."."""

    #: Also between two steps.
    IDLE = "has no gradient of the step"
    BACKWARD = "has gradients of the step, and has sent none of them"
    SENT = "has sent gradients of the step"
    #: The servers may have made the step.
    COMMITTED = "has voted for the step, and does not know the decision"
    #: The servers may have a part of the step, or may have made it.
    INTERRUPTED = "has made a part of the step, and an error has ended it"
    #: The other ranks may make any number of steps.
    RESTING = "has no more batches, and waits for the other ranks"
    #: As RESTING, and nothing waits for the end of it.
    BEHIND = "does not know how many steps the other ranks have made since its last one"


#: What to do instead of a call in a state that forbids it.
_ADVICE = {
    Phase.IDLE: "run a forward and a backward pass first",
    Phase.BACKWARD: "call optimizer.step() or zero_grad() first",
    Phase.SENT: "call optimizer.step() or zero_grad() first",
    Phase.COMMITTED: (
        "wait until optimizer.step() has returned: signal handlers and other threads may read the "
        "model while a step is made, and must not train it"
    ),
    Phase.INTERRUPTED: "run the forward of the model again first",
    Phase.RESTING: "train again after the loops under zeroshard.torch.join have ended",
    Phase.BEHIND: "run the forward of the model again first",
}


class StepStateError(InvalidArgumentError):
    """The state of the step forbids what was called."""

    def __init__(self, event: str, phase: Phase) -> None:
        super().__init__(f"{event} while this rank {phase.value}; {_ADVICE[phase]}")
        self.phase = phase


@dataclass
class Progress:
    """What this rank has done in one attempt at a step. Parameters are given by their index in the
    manifest."""

    #: Backward passes of each parameter.
    passes: Counter[int] = field(default_factory=Counter)
    #: Of each parameter whose gradient was sent, or that has none: the object that the program saw
    #: as its gradient.
    sent: dict[int, object] = field(default_factory=dict)
    #: Those in ``sent`` of which this rank had a gradient.
    contributed: set[int] = field(default_factory=set)
    #: Those in ``sent`` without a gradient that were not reported yet.
    absent: list[int] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        """IDLE, BACKWARD or SENT."""
        if self.sent:
            return Phase.SENT
        return Phase.BACKWARD if self.passes else Phase.IDLE


@dataclass(frozen=True)
class Loop:
    """A loop that may have a different number of steps on each rank."""

    #: It counts the loops of the model.
    number: int
    #: ``True`` if mean gradients are over the ranks whose loop has not ended.
    excluding: bool


@dataclass(frozen=True)
class _Open:
    phase = None
    voted = None


@dataclass(frozen=True)
class _Committed:
    #: The step for which this rank has voted.
    voted: int
    phase = Phase.COMMITTED


@dataclass(frozen=True)
class _Interrupted:
    #: The step for which this rank had voted before; None: it had not.
    voted: int | None
    phase = Phase.INTERRUPTED


@dataclass(frozen=True)
class _Resting:
    rest: Rest
    phase = Phase.RESTING
    voted = None


@dataclass(frozen=True)
class _Behind:
    #: ``True`` if the servers may have a part of the open step from this rank.
    has_part: bool
    phase = Phase.BEHIND
    voted = None


_State: TypeAlias = _Open | _Committed | _Interrupted | _Resting | _Behind

_ALL = frozenset(Phase)
_OPEN = frozenset({Phase.IDLE, Phase.BACKWARD, Phase.SENT})


class Step:
    """The open step of a model on this rank."""

    def __init__(self) -> None:
        #: The current attempt. An interrupted step has begun another one.
        self.progress = Progress()
        #: The loop with different numbers of steps that is running.
        self.loop: Loop | None = None
        self._loops = 0
        self._state: _State = _Open()

    @property
    def phase(self) -> Phase:
        """The state."""
        return self._state.phase or self.progress.phase

    @property
    def voted(self) -> int | None:
        """The step that the servers may have made, since this rank has voted for it. None if there
        is none."""
        # Another thread may read it while a step ends: one look at the state.
        return self._state.voted

    @property
    def knows_version(self) -> bool:
        """Returns whether the servers make no step without this rank."""
        return self.phase not in (Phase.RESTING, Phase.BEHIND)

    def check_trains(self, event: str) -> None:
        """Raises :class:`StepStateError` if this rank waits for the decision of a step, or for the
        end of its rest."""
        self._check(event, _ALL - {Phase.COMMITTED, Phase.RESTING})

    @property
    def excludes_resting(self) -> bool:
        """Returns whether mean gradients are over the ranks that do not rest."""
        return self.loop is not None and self.loop.excluding

    # ---- gradients

    def computed(self, index: int) -> int:
        """A backward pass has computed the gradient of a parameter. Returns the number of its
        passes."""
        self.check_trains("a backward pass has computed a gradient")
        self.progress.passes[index] += 1
        return self.progress.passes[index]

    def sending(self) -> Progress:
        """Called before gradients are sent. Returns the attempt that they belong to."""
        self.check_open("a gradient is sent to the servers")
        return self.progress

    def check_open(self, event: str) -> None:
        """Raises :class:`StepStateError` if gradients cannot be sent and committed now."""
        self._check(event, _OPEN)

    def restart(self) -> None:
        """Begins another attempt, without gradients."""
        self.progress = Progress()

    # ---- the decision

    def vote(self, version: int) -> None:
        """This rank commits step ``version``."""
        self.check_open("a step is committed")
        self._state = _Committed(version)

    def made(self) -> None:
        """The servers have made the step."""
        self._check("a step ends", {Phase.COMMITTED})
        self._state, self.progress = _Open(), Progress()

    def failed(self, *, dropped: bool) -> None:
        """What this rank was sending for the step has failed. ``dropped``: the servers have no part
        of the step any more."""
        if not self.knows_version:
            self._state = _Behind(has_part=not dropped)
        else:
            self._state = _Open() if dropped else _Interrupted(self.voted)
        self.progress = Progress()

    def settled(self) -> None:
        """The servers have no part of the interrupted step, or this rank has its result."""
        self._check("an interrupted step is settled", {Phase.INTERRUPTED})
        self._state = _Open()

    def abandon(self) -> None:
        """The servers have dropped the step, and it begins again."""
        self.progress = Progress()
        if isinstance(self._state, _Committed):
            self._state = _Open()
        elif isinstance(self._state, _Interrupted):
            self._state = _Interrupted(None)

    def reopens(self) -> None:
        """A new job is about to begin, at version 0, for whose steps this rank has not voted."""
        self.check_trains("the script has changed what the servers train")
        if isinstance(self._state, _Interrupted):
            self._state = _Interrupted(None)

    def rolled_back(self) -> None:
        """This rank follows the job to its checkpoint, whatever it was doing."""
        self._state, self.progress = _Open(), Progress()

    # ---- loops with different numbers of steps

    def begin_loop(self, excluding: bool) -> None:
        """Such a loop begins. ``excluding``: see :class:`Loop`."""
        self._loops += 1
        self.loop = Loop(self._loops, excluding)

    def end_loop(self) -> None:
        """The loop has ended, perhaps with an error. A rest is given up."""
        self.loop = None
        if isinstance(self._state, _Resting):
            self._state = _Behind(has_part=False)

    def begin_rest(self) -> None:
        """This rank asks the coordinator for a rest. From now on the others may make steps."""
        self._check("a rank rests", {Phase.IDLE})
        self._state = _Behind(has_part=False)

    def rests(self, rest: Rest) -> None:
        """The coordinator has granted the rest."""
        self._check("a rest begins", {Phase.BEHIND})
        self._state = _Resting(rest)

    @property
    def rest(self) -> Rest:
        """The rest of this rank."""
        self._check("a rank waits for the end of its rest", {Phase.RESTING})
        assert isinstance(self._state, _Resting)
        return self._state.rest

    def caught_up(self) -> None:
        """This rank has the current version again."""
        self._check("a rank catches up", {Phase.RESTING, Phase.BEHIND})
        has_part = isinstance(self._state, _Behind) and self._state.has_part
        self._state = _Interrupted(None) if has_part else _Open()

    def _check(self, event: str, allowed: AbstractSet[Phase]) -> None:
        if self.phase not in allowed:
            raise StepStateError(event, self.phase)
