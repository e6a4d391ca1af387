"""Ranks that are about to do something together say what, and hear at once of anybody who wants
something else.

Collectives between ranks that disagree hang or mix data up. Before the first of them the ranks
compare what they were asked for, where they meet: no collective, and a deadline.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ._rendezvous import Rendezvous, Store, place
from .errors import DisagreementError

#: Seconds that a rank waits for another to come to the same point: building a large model takes
#: time.
PATIENCE = 600.0

#: Where the ranks meet, and how often this rank has compared notes with each other one there.
_notes: tuple[Store, Counter[int]] | None = None


def agree(what: str, said: Mapping[str, str], ranks: Sequence[int]) -> None:
    """Returns once all ``ranks`` have called this with the same.

    ``what`` is the function that they are in, ``said`` each thing that must be equal, as text. One
    process, or a rank that is not among them, returns at once. Notes are compared in pairs, so that
    ranks also agree on who they are.

    Raises :class:`~zeroshard.DisagreementError`, which names both ranks and what each has, or
    :class:`~zeroshard.TimeoutError`.
    """
    here = place()
    if here.world == 1 or len(ranks) < 2 or here.rank not in ranks:
        return
    rendezvous = Rendezvous(here, PATIENCE)
    counts = _counts(rendezvous.store)
    mine = {"the call": what, **said}
    numbers = {other: counts[other] for other in ranks if other != here.rank}
    counts.update(numbers.keys())
    for other, number in numbers.items():
        rendezvous.tell(f"agree/{here.rank}>{other}/{number}", json.dumps(mine))
    for other, number in numbers.items():
        waiting_for = f"rank {other} in {what}: does it call {what} too?"
        theirs = json.loads(rendezvous.hear(f"agree/{other}>{here.rank}/{number}", waiting_for))
        if theirs != mine:
            _refuse({here.rank: mine, other: theirs})


def _refuse(said: dict[int, dict[str, str]]) -> None:
    """Says in what two ranks differ."""
    (first, mine), (second, theirs) = sorted(said.items())
    about = next(each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each))
    raise DisagreementError(
        f"rank {first} and rank {second} disagree about {about}: rank {first} has {mine.get(about)}, rank {second} has "
        f"{theirs.get(about)}; it must be the same on every rank"
    )


def _counts(store: Store) -> Counter[int]:
    global _notes
    if _notes is None or _notes[0] is not store:
        _notes = (store, Counter())  # the process group is a new one, and its store empty
    return _notes[1]
