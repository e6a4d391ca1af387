"""Ranks that are about to do something together say what, and hear at once of anybody who wants something else.

Collectives between ranks that disagree hang or mix data up. Before the first of them the ranks compare what they were
asked for, where they meet: no collective, and a deadline.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ._rendezvous import Rendezvous, place
from .errors import Disagreement

#: Seconds that a rank waits for another to come to the same point: building a large model takes time.
PATIENCE = 600.0

_rendezvous: Rendezvous | None = None
#: How often the ranks of each set have compared notes.
_counts: Counter[tuple[int, ...]] = Counter()


def agree(what: str, said: Mapping[str, str], ranks: Sequence[int]) -> None:
    """Returns once all ``ranks`` have called this with the same.

    ``what`` is the function that they are in, ``said`` each thing that must be equal, as text. One process, or a rank
    that is not among them, returns at once.

    Raises :class:`~zeroshard.Disagreement`, which names both ranks and what each has, or :class:`~zeroshard.Timeout`.
    """
    global _rendezvous
    here, members = place(), tuple(sorted(ranks))
    if here.world == 1 or len(members) < 2 or here.rank not in members:
        return
    if _rendezvous is None:
        _rendezvous = Rendezvous(here, PATIENCE)
    key = f"agree/{'-'.join(map(str, members))}/{_counts[members]}"
    _counts[members] += 1
    mine = {"the call": what, **said}
    for rank, text in zip(members, _rendezvous.exchange(key, json.dumps(mine), members), strict=True):
        theirs: dict[str, str] = json.loads(text)
        about = next((each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each)), None)
        if about is not None:
            raise Disagreement(
                f"rank {here.rank} and rank {rank} disagree about {about}: rank {here.rank} has {mine.get(about)}, rank {rank} "
                f"has {theirs.get(about)}; it must be the same on every rank"
            )
