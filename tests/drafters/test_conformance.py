"""Every drafter passes the suite; and the suite finds drafters that are wrong."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Drafter, Drawn, Proposal, View
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.recycle import RecycleDrafter
from forerun.drafters.suffix import Past, SuffixDrafter
from tests.drafters.drafter_suite import (
    CHECKS,
    Subject,
    check_a_drawn_token_is_the_one_that_the_uniforms_pick_from_its_row,
    check_an_edited_text_is_followed,
    check_asking_changes_nothing,
    check_proposals_are_within_budget_and_vocabulary,
    check_rows_and_lengths_are_known_before_the_draw,
)
from tests.engine.playground import bridge, toy

SIZE = 11


def lm(*, size: int = SIZE, order: int = 2, inner: Drafter | None = None, **limits: int) -> LMDrafter:
    return LMDrafter(ToySession.random(size, order=order, seed=4, **limits), vocab_size=SIZE, inner=inner)


def recycle() -> RecycleDrafter:
    table = np.random.default_rng(0).permuted(np.tile(np.arange(SIZE), (SIZE, 1)), axis=1)[:, :8]
    table[3] = -1
    table[5, 2:] = -1
    return RecycleDrafter(table)


def past() -> Past:
    past = Past()
    for seed in range(6):
        past.add(np.random.default_rng(seed).integers(SIZE, size=80).tolist())
    return past


SUBJECTS = {
    "ngram": Subject(NgramDrafter, SIZE),
    "ngram of one size": Subject(lambda: NgramDrafter(longest=3, shortest=3, max_drafts=2), SIZE),
    "suffix": Subject(SuffixDrafter, SIZE),
    "suffix with a past": Subject(lambda: SuffixDrafter(past=past(), reach=2), SIZE, has_past=True),
    "recycle": Subject(recycle, SIZE),
    "free ones in a tree": Subject(
        lambda: MixDrafter([recycle(), SuffixDrafter(past=past()), NgramDrafter()]), SIZE, True
    ),
    "lm": Subject(lm, SIZE),
    "lm of another tokenizer": Subject(lambda: LMDrafter(bridge(toy(size=9)), vocab_size=7), 7),
    "mix": Subject(lambda: MixDrafter([lm(), NgramDrafter(longest=3, shortest=3)]), SIZE),
    "cascade": Subject(lambda: lm(inner=NgramDrafter()), SIZE),
    "lm with a wider head": Subject(lambda: lm(size=SIZE + 5), SIZE),
    "lm with a short context": Subject(lambda: lm(max_len=21), SIZE),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_drafter_conforms(subject: str, check: Callable[[Subject], None]) -> None:
    check(SUBJECTS[subject])


class Overspends(NgramDrafter):
    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return super().propose(views, [budget + 1 for budget in budgets])


class GivesAnotherLaw(LMDrafter):
    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        found = super().propose(views, budgets)
        return [
            Drawn(p.tokens, p.q_KV**2 / (p.q_KV**2).sum(axis=-1, keepdims=True)) if isinstance(p, Drawn) else p
            for p in found
        ]


class LooksAhead(LMDrafter):
    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        found = []
        for p in super().propose(views, budgets):
            unlikely = [isinstance(p, Drawn) and p.q_KV[i, token] < 0.2 for i, token in enumerate(p.tokens)]
            count = unlikely.index(True) if True in unlikely else len(p.tokens)
            found.append(Drawn(p.tokens[:count], p.q_KV[:count]) if isinstance(p, Drawn) else p)
        return found


class CallsADrawAChoice(LMDrafter):
    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [Chosen(p.tokens) for p in super().propose(views, budgets)]


class Remembers(NgramDrafter):
    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        for view in views:
            index = self._texts.of(view.seq)
            index.extend(view.tokens[index.end :])
        return super().propose(views, budgets)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Overspends, check_proposals_are_within_budget_and_vocabulary),
        (GivesAnotherLaw, check_a_drawn_token_is_the_one_that_the_uniforms_pick_from_its_row),
        (LooksAhead, check_rows_and_lengths_are_known_before_the_draw),
        (CallsADrawAChoice, check_rows_and_lengths_are_known_before_the_draw),
        (Remembers, check_asking_changes_nothing),
    ],
)
def test_the_suite_finds_a_drafter_that_is_wrong(wrong: type, check: Callable[[Subject], None]) -> None:
    if issubclass(wrong, LMDrafter):
        subject = Subject(lambda: wrong(ToySession.random(SIZE, seed=4), vocab_size=SIZE), SIZE)
    else:
        subject = Subject(wrong, SIZE)
    with pytest.raises(AssertionError):
        check(subject)


class DeafToEdits(NgramDrafter):
    def observe(self, outcomes: Sequence[object]) -> None:
        super().observe([outcome._replace(start=1 << 40) for outcome in outcomes])  # type: ignore[attr-defined]


def test_the_suite_finds_a_drafter_that_is_deaf_to_edits() -> None:
    with pytest.raises(AssertionError):
        check_an_edited_text_is_followed(Subject(DeafToEdits, SIZE))
