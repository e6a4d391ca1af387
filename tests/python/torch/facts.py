"""Groups of tests on several ranks that share one group of processes, because starting one takes
seconds.

    TWO = Facts(2)

    @TWO
    def a_sum_is_the_same_everywhere(rank: int) -> None:
        assert ...

    test_on_two_ranks = TWO.test(__name__)
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks

#: Maximum wait for the other ranks at the end of a fact.
TIMEOUT = timedelta(seconds=60)


class Outcomes:
    """The result of each fact on each rank: None, or the error."""

    def __init__(self, by_rank: list[dict[str, str | None]]) -> None:
        self._by_rank = by_rank

    def check(self, fact: str) -> None:
        """Fails if the fact does not hold on some rank."""
        wrong = {
            rank: told[fact] for rank, told in enumerate(self._by_rank) if told[fact] is not None
        }
        assert not wrong, "\n".join(f"--- rank {rank}:\n{text}" for rank, text in wrong.items())


class Facts:
    """The facts that are checked by one group of ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        #: Once they are checked.
        self._outcomes: Outcomes | None = None
        self._functions: dict[str, Callable[[int], None]] = {}

    def __call__(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Adds a fact: a function of the rank that raises an error if the fact does not hold."""
        self._functions[function.__name__] = function
        return function

    @property
    def names(self) -> list[str]:
        """The names of the facts, in order."""
        return list(self._functions)

    def test(self, module: str, servers: bool = False) -> Any:
        """Makes a test for each fact, to be assigned in the module after all of them. With
        ``servers`` the ranks use server processes.

        The first test that runs checks all facts.
        """

        @pytest.mark.parametrize("fact", self.names)
        def test(fact: str, request: pytest.FixtureRequest) -> None:
            if self._outcomes is None:
                self._outcomes = self._check(
                    module, request.getfixturevalue("processes") if servers else None
                )
            self._outcomes.check(fact)

        return test

    def _check(self, module: str, env: dict[str, str] | None) -> Outcomes:
        attributes = vars(importlib.import_module(module))
        found = next(name for name, value in attributes.items() if value is self)
        try:
            return Outcomes(ranks.run(self.world, check_all, module, found, env=env))
        except ranks.RankFailed as error:
            return Outcomes([dict.fromkeys(self.names, str(error))])


def check_all(rank: int, module: str, attribute: str) -> dict[str, str | None]:
    """Checks the facts in order, and stops if a fact has different results on the ranks."""
    facts: Facts = getattr(importlib.import_module(module), attribute)
    store = dist.distributed_c10d._get_default_store()
    told: dict[str, str | None] = dict.fromkeys(
        facts.names, "not checked, since the ranks were no longer together"
    )
    for name, function in facts._functions.items():
        torch.manual_seed(0)
        try:
            function(rank)
            told[name] = None
        except Exception:
            told[name] = traceback.format_exc()
        store.set(f"facts/{name}/{rank}", "right" if told[name] is None else "wrong")
        keys = [f"facts/{name}/{other}" for other in range(facts.world)]
        try:
            store.wait(keys, TIMEOUT)
        except Exception as error:
            raise AssertionError(
                f"a rank has not come to the end of {name}; here: {told[name]}"
            ) from error
        if len({store.get(key) for key in keys}) > 1:
            break
    return told
