"""The states of a step: what leads from one to another, and what each of them forbids. Neither
torch nor servers take part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

import zeroshard as zs
from zeroshard._core.step_state import Phase, Step, StepStateError

#: Stands for the rest that the coordinator grants.
REST: Any = object()


def idle() -> Step:
    return Step()


def backward() -> Step:
    step = Step()
    step.computed(3)
    return step


def sent() -> Step:
    step = backward()
    step.sending().sent[3] = None
    return step


def committed() -> Step:
    step = sent()
    step.vote(7)
    return step


def interrupted() -> Step:
    step = sent()
    step.failed(dropped=False)
    return step


def resting() -> Step:
    step = Step()
    step.begin_loop(excluding=False)
    step.begin_rest()
    step.rests(REST)
    return step


def behind() -> Step:
    step = resting()
    step.end_loop()
    return step


STATES: dict[Phase, Callable[[], Step]] = {
    Phase.IDLE: idle,
    Phase.BACKWARD: backward,
    Phase.SENT: sent,
    Phase.COMMITTED: committed,
    Phase.INTERRUPTED: interrupted,
    Phase.RESTING: resting,
    Phase.BEHIND: behind,
}

I, B, S, C = Phase.IDLE, Phase.BACKWARD, Phase.SENT, Phase.COMMITTED
N, R, L = Phase.INTERRUPTED, Phase.RESTING, Phase.BEHIND

#: Each event, and the state that it leads to from each state that allows it.
EVENTS: dict[str, tuple[Callable[[Step], object], dict[Phase, Phase]]] = {
    "a gradient is computed": (lambda step: step.computed(0), {I: B, B: B, S: S, N: N, L: L}),
    "gradients are sent": (
        lambda step: step.sending().sent.update({0: None}),
        {I: S, B: S, S: S},
    ),
    "gradients are dropped": (
        lambda step: step.restart(),
        {I: I, B: I, S: I, C: C, N: N, R: R, L: L},
    ),
    "the rank votes": (lambda step: step.vote(7), {I: C, B: C, S: C}),
    "the step is made": (lambda step: step.made(), {C: I}),
    "the step is aborted": (
        lambda step: step.failed(dropped=True),
        {I: I, B: I, S: I, C: I, N: I, R: L, L: L},
    ),
    "an error ends the step": (
        lambda step: step.failed(dropped=False),
        {I: N, B: N, S: N, C: N, N: N, R: L, L: L},
    ),
    "the servers drop their part": (lambda step: step.settled(), {N: I}),
    "an aborted step begins again": (
        lambda step: step.abandon(),
        {I: I, B: I, S: I, C: I, N: N, R: R, L: L},
    ),
    "the job is rolled back": (lambda step: step.rolled_back(), dict.fromkeys(Phase, I)),
    "a new job begins": (lambda step: step.reopens(), {I: I, B: B, S: S, N: N, L: L}),
    "a rest is requested": (lambda step: step.begin_rest(), {I: L}),
    "a rest is granted": (lambda step: step.rests(REST), {L: R}),
    "the rank waits for the end of its rest": (lambda step: step.rest, {R: R}),
    "the rank catches up": (lambda step: step.caught_up(), {R: I, L: I}),
    "the loop ends": (
        lambda step: step.end_loop(),
        {I: I, B: B, S: S, C: C, N: N, R: L, L: L},
    ),
}


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", EVENTS)
def test_an_event_leads_to_its_state_or_is_refused(name: str, phase: Phase) -> None:
    event, leads_to = EVENTS[name]
    step = STATES[phase]()
    assert step.phase is phase
    if phase in leads_to:
        event(step)
        assert step.phase is leads_to[phase]
        return
    progress = step.progress
    with pytest.raises(StepStateError, match=f"while this rank {phase.value}; ") as refused:
        event(step)
    assert refused.value.phase is phase
    assert isinstance(refused.value, zs.InvalidArgumentError)
    # A refused event changes nothing.
    assert step.phase is phase and step.progress is progress


def test_a_vote_is_remembered_until_its_outcome_is_known() -> None:
    step = committed()
    assert step.voted == 7
    step.failed(dropped=False)
    assert step.voted == 7
    step.settled()
    assert step.voted is None
    step = committed()
    step.made()
    assert step.voted is None


class Ending(Step):
    """A step that begins and ends between any two looks at its state."""

    looks = itertools.cycle([committed()._state, Step()._state])

    @property
    def _state(self) -> Any:  # type: ignore[override]
        return next(self.looks)

    @_state.setter
    def _state(self, state: Any) -> None:
        pass


def test_another_thread_reads_the_vote_of_a_step_that_ends_meanwhile() -> None:
    assert [Ending().voted for _ in range(4)] == [7, None, 7, None]


def test_the_steps_of_a_new_job_have_no_votes() -> None:
    step = committed()
    step.failed(dropped=False)
    step.reopens()
    assert step.phase is Phase.INTERRUPTED and step.voted is None


def test_an_attempt_that_ends_leaves_nothing_to_the_next_one() -> None:
    ends: list[Callable[[Step], None]] = [
        lambda step: step.restart(),
        lambda step: step.failed(dropped=True),
        lambda step: step.failed(dropped=False),
        lambda step: step.abandon(),
        lambda step: step.rolled_back(),
    ]
    for end in ends:
        step = sent()
        step.progress.contributed.add(3)
        step.progress.absent.append(4)
        end(step)
        progress = step.progress
        assert not progress.passes and not progress.sent
        assert not progress.contributed and not progress.absent


def test_a_rank_whose_rest_was_interrupted_drops_its_part_after_it_has_caught_up() -> None:
    step = resting()
    step.failed(dropped=False)
    assert step.phase is Phase.BEHIND and not step.knows_version
    step.caught_up()
    assert step.phase is Phase.INTERRUPTED and step.knows_version


def test_a_rank_whose_rest_was_aborted_only_catches_up() -> None:
    step = resting()
    step.failed(dropped=True)
    step.caught_up()
    assert step.phase is Phase.IDLE


def test_loops_are_counted_and_exclude_resting_ranks_while_they_run() -> None:
    step = Step()
    assert not step.excludes_resting
    for number in (1, 2):
        step.begin_loop(excluding=True)
        assert cast(Any, step.loop).number == number and step.excludes_resting
        step.end_loop()
        assert step.loop is None and not step.excludes_resting


def test_backward_passes_after_an_interruption_count_for_the_next_attempt() -> None:
    # A forward that the model's wrapper does not see settles nothing.
    step = interrupted()
    assert [step.computed(0), step.computed(0)] == [1, 2]
    step.settled()
    assert step.phase is Phase.BACKWARD
