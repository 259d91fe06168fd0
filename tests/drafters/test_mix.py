"""Several drafters in one tree, and who is asked."""

from collections.abc import Sequence

import numpy as np
import pytest

from forerun.backends.toy import ToySession
from forerun.drafters.base import NOTHING, Chosen, Drawn, Offer, Outcome, Proposal, Tree, View
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter, merged
from tests.drafters.drafter_suite import view_of

SIZE = 5


def law(*tokens: int) -> np.ndarray:
    """A law for each token, sure of it."""
    return np.eye(SIZE)[list(tokens)]


class Says:
    """Drafts the same again and again, and keeps what it was asked and told."""

    name, max_drafts, num_top = "says", 6, 2

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.budgets: list[list[int]] = []
        self.told: list[object] = []

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        self.budgets.append(list(budgets))
        return [Chosen(self.tokens[:budget]) for budget in budgets]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.told += outcomes

    def fork(self, seq: int, child: int) -> None:
        self.told.append((seq, child))

    def release(self, seq: int) -> None:
        self.told.append(seq)


def lm() -> LMDrafter:
    return LMDrafter(ToySession.random(SIZE, seed=1), vocab_size=SIZE)


def test_one_proposal_or_none_stays_what_it_is() -> None:
    drawn = Drawn([1, 2], law(1, 2))
    assert merged([], 4) is NOTHING
    assert merged([NOTHING, drawn, NOTHING], 4) is drawn


def test_point_masses_share_the_rows_that_they_agree_on() -> None:
    assert merged([Chosen([1, 2, 3]), Chosen([1, 2, 4, 0])], 9) == Chosen([1, 2, 3, 4, 0], [-1, 0, 1, 1, 3])
    assert merged([Chosen([1, 2]), Chosen([1, 2, 3])], 9) == Chosen([1, 2, 3])
    branching = Chosen([1, 4, 2], [-1, -1, 0])
    assert merged([branching, Chosen([4, 2])], 9) == Chosen([1, 4, 2, 2], [-1, -1, 0, 1])


def test_point_masses_past_the_budget_go_and_all_that_would_follow_them() -> None:
    assert merged([Chosen([1, 2, 3]), Chosen([4, 0, 3])], 3) == Chosen([1, 4, 2], [-1, -1, 0])
    assert merged([Chosen([1, 2, 3]), Chosen([4, 0, 3])], 1) == Chosen([1])


def test_a_token_that_two_offer_is_one_row_and_two_candidates() -> None:
    tree = merged([Chosen([1, 2]), Drawn([1, 3], law(1, 3)), Drawn([4], law(4))], 9)
    assert isinstance(tree, Tree)
    assert (tree.tokens, tree.parents) == ([1, 4, 2, 3], [-1, -1, 0, 0])
    assert tree.offers == [Offer(0, None), Offer(0, 0), Offer(1, 2), Offer(2, None), Offer(3, 1)]
    assert np.array_equal(tree.q_MV, law(1, 3, 4))


def test_what_was_drawn_is_never_left_out() -> None:
    with pytest.raises(AssertionError, match="judged"):
        merged([Chosen([1, 2]), Drawn([3], law(3))], 1)


def test_free_drafters_come_first_and_leave_room_for_a_model() -> None:
    says, model = Says([1, 2, 3, 4]), lm()
    mix = MixDrafter([model, says])
    assert (mix.max_drafts, mix.num_top) == (64, 2)
    assert mix.drafters == [says, model]
    view = view_of([1, 2, 3])._replace(branches=True)
    (tree,) = mix.propose([view], [6])
    assert says.budgets == [[3]]
    assert isinstance(tree, Tree)
    assert len(tree.tokens) <= 6
    assert sum(offer.law is not None for offer in tree.offers) == 3
    assert sum(offer.law is None for offer in tree.offers) == 3


def test_without_branches_the_first_that_has_a_guess_makes_the_chain() -> None:
    says, silent = Says([1, 2, 3, 4]), Says([])
    (chain,) = MixDrafter([silent, lm(), says]).propose([view_of([1, 2, 3])], [4])
    assert chain == Chosen([1, 2, 3, 4])
    (chain,) = MixDrafter([silent, lm()]).propose([view_of([1, 2, 3])], [4])
    assert isinstance(chain, Drawn)
    assert len(chain.tokens) == 4


def test_all_are_told() -> None:
    first, second = Says([]), Says([])
    mix = MixDrafter([first, second])
    mix.observe([Outcome(0, [1, 2], 0)])
    mix.fork(0, 1)
    mix.release(0)
    assert first.told == second.told == [Outcome(0, [1, 2], 0), (0, 1), 0]
