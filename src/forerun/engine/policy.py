"""Who drafts, and how much: the part of a round between plan and pass. `Fixed` is one drafter with a set number.

A policy sees what is committed, what was drafted and how far the target went along; never the target's draws of the
round that it decides on.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forerun.drafters.base import NOTHING, Drafter, Outcome, Proposal, View
from forerun.engine.sequence import Work
from forerun.errors import EngineError
from forerun.types import Decision


class Guess(NamedTuple):
    """What is drafted for one sequence in a round."""

    proposal: Proposal = NOTHING
    drafter: str | None = None  # who made it
    decision: Decision | None = None  # where a controller decides
    planned: tuple[str, int] | None = None  # the draft model that was asked, and for how many drafts


class Report(NamedTuple):
    """How a guess went."""

    seq: int
    guess: Guess
    path: Sequence[int]  # the drafts that stood


class Policy(Protocol):
    """Decides on drafts. It owns drafters, and passes on to them what happened."""

    drafters: Sequence[Drafter]
    max_drafts: int  # the most rows of drafts that a sequence may have in a round

    def propose(self, works: Sequence[Work], num_rows: int, *, branches: bool) -> list[Guess]:
        """Return a guess for each sequence that writes, of at most `work.k` drafts.

        `num_rows`: rows of the pass without drafts.
        """

    def num_top(self, seq: int) -> int:
        """How many of the target's likeliest tokens the drafters of a sequence want to see at each verified row."""

    def observe(self, outcomes: Sequence[Outcome], reports: Sequence[Report]) -> None:
        """Learn what was committed (see `Drafter.observe`), and how the guesses of the round went."""

    def release(self, seq: int) -> None:
        """Forget a sequence."""


class Fixed:
    """At most one drafter, and as many drafts as the request asks for."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafters: Sequence[Drafter] = [drafter] if drafter else []
        self.max_drafts = drafter.max_drafts if drafter else 0
        self._drafter = drafter

    def propose(self, works: Sequence[Work], num_rows: int, *, branches: bool) -> list[Guess]:
        guesses = [Guess()] * len(works)
        asked = [i for i, work in enumerate(works) if work.k > 0]
        if self._drafter is None or not asked:
            return guesses
        views = [works[i].sequence.view(branches=branches) for i in asked]
        for i, proposal in zip(asked, ask(self._drafter, views, [works[i].k for i in asked]), strict=True):
            guesses[i] = Guess(proposal, self._drafter.name if proposal.tokens else None)
        return guesses

    def num_top(self, seq: int) -> int:
        return self._drafter.num_top if self._drafter else 0

    def observe(self, outcomes: Sequence[Outcome], reports: Sequence[Report]) -> None:
        if self._drafter:
            self._drafter.observe(outcomes)

    def release(self, seq: int) -> None:
        if self._drafter:
            self._drafter.release(seq)


def ask(drafter: Drafter, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
    """Ask a drafter; nothing is drafted where it fails because some sequence's own constraints do."""
    try:
        proposals = drafter.propose(views, budgets)
    except EngineError:  # the verdict will find out whose
        return [NOTHING] * len(views)
    for proposal, budget in zip(proposals, budgets, strict=True):
        assert len(proposal.tokens) <= budget
    return proposals
