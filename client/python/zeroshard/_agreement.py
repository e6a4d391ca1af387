"""Checks that ranks call the same function with the same arguments before they run a collective.

Collectives between ranks that disagree hang or mix up data. The comparison goes through the store
of the run; it uses no collective and has a timeout.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ._rendezvous import Rendezvous, world_group
from .errors import DisagreementError

#: Seconds that a rank waits for another to reach the same call: building a large model takes time.
TIMEOUT = 600.0

#: The rendezvous of the run, and the number of comparisons with each other rank in its store.
_comparisons: tuple[Rendezvous, Counter[int]] | None = None


def agree(call: str, arguments: Mapping[str, str], ranks: Sequence[int]) -> None:
    """Returns when all ``ranks`` have called this with the same arguments.

    ``call`` is the name of the user's function, ``arguments`` the text of each value that must be
    equal. Returns immediately in a single process and on ranks that are not in ``ranks``. Ranks are
    compared in pairs, so a difference in ``ranks`` itself is found as well.

    Raises :class:`~zeroshard.DisagreementError`, which names both ranks and their values, or
    :class:`~zeroshard.TimeoutError`.
    """
    mine = {"the call": call, **arguments}
    for other, theirs in _told(call, mine, ranks):
        check_equal({world_group().rank: mine, other: theirs})


def share(call: str, value: str, ranks: Sequence[int]) -> list[str]:
    """Returns the values of the other ``ranks``, which all call this. For ``call`` and errors see
    :func:`agree`."""
    values = []
    mine = {"the call": f"{call}, with values to share"}
    for other, theirs in _told(call, {**mine, "value": value}, ranks):
        check_equal({world_group().rank: mine, other: {"the call": theirs["the call"]}})
        values.append(theirs["value"])
    return values


def _told(
    call: str, mine: Mapping[str, str], ranks: Sequence[int]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Publishes ``mine``, and yields what each other rank publishes."""
    world = world_group()
    if world.size == 1 or len(ranks) < 2 or world.rank not in ranks:
        return
    rendezvous = Rendezvous(world, TIMEOUT)
    counts = _counts(rendezvous)
    numbers = {other: counts[other] for other in ranks if other != world.rank}
    counts.update(numbers.keys())
    for other, number in numbers.items():
        rendezvous.publish(f"agree/{world.rank}>{other}/{number}", json.dumps(mine))
    for other, number in numbers.items():
        waiting_for = f"rank {other} to call {call}"
        received = rendezvous.receive(f"agree/{other}>{world.rank}/{number}", waiting_for)
        if number > 0:
            # The other rank has ended the comparison before this one.
            rendezvous.withdraw(f"agree/{world.rank}>{other}/{number - 1}")
        theirs: dict[str, str] = json.loads(received)
        yield other, theirs


def exchange_equal(
    exchange: Callable[[str, str], Sequence[str]],
    mine: Mapping[str, str],
    ranks: Sequence[int],
    value: str = "",
) -> list[str]:
    """Raises :class:`~zeroshard.DisagreementError` if ranks have different texts in ``mine``, by
    name. Returns the ``value`` of each rank, which may differ.

    ``exchange`` sends a value to all of the ranks, under a name, and returns their values in rank
    order. The texts are sent if their hashes differ: a model has many tensors.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    own = json.dumps([digest, value])
    everywhere = [json.loads(received) for received in exchange("hash", own)]
    if any(other != digest for other, _ in everywhere):
        texts = map(json.loads, exchange("texts", json.dumps(mine)))
        check_equal(dict(zip(ranks, texts, strict=True)))
    return [value for _, value in everywhere]


def check_equal(values: Mapping[int, Mapping[str, str]]) -> None:
    """Raises :class:`~zeroshard.DisagreementError` if ranks have different values.

    ``values`` has a dict for each rank, with the text of each value by its name.
    """
    first, *others = sorted(values)
    for other in others:
        ours, theirs = values[first], values[other]
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise DisagreementError(
                    f"rank {first} and rank {other} disagree about {name}: "
                    f"rank {first} has {ours.get(name, 'none')}, "
                    f"rank {other} has {theirs.get(name, 'none')}; "
                    "it must be the same on every rank"
                )


def _counts(rendezvous: Rendezvous) -> Counter[int]:
    global _comparisons
    if _comparisons is None or _comparisons[0].store is not rendezvous.store:
        _comparisons = (rendezvous, Counter())  # a new process group has a new, empty store
    return _comparisons[1]
