"""The n-gram index finds what a scan of the whole text finds, at a cost that doesn't grow with the text."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.base import Chosen, Outcome, View
from forerun.drafters.ngram import NgramDrafter
from forerun.sampling.laws import Sampler
from forerun.types import SamplingParams

SAMPLER = Sampler(SamplingParams(), (), (), seed=0)


def scan(text: Sequence[int], longest: int, shortest: int, budget: int) -> list[int]:
    """Prompt lookup by its definition, as far as the match reaches back."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(text) - 1, size - 1, -1):
            if size < len(text) and text[start - size : start] == text[len(text) - size :]:
                match = size
                while match < start and text[start - match - 1] == text[len(text) - match - 1]:
                    match += 1
                copied: list[int] = []
                while len(copied) < min(budget, match, 64):
                    copied.append([*text, *copied][start + len(copied)])
                return copied
    return []


def ask(drafter: NgramDrafter, text: Sequence[int], budget: int, seq: int = 0) -> list[int]:
    (proposal,) = drafter.propose([View(seq, list(text), SAMPLER, "block")], [budget])
    assert isinstance(proposal, Chosen)
    return list(proposal.tokens)


edits = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 3), min_size=1, max_size=25)), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(edits, st.integers(1, 4), st.integers(0, 3), st.integers(0, 9))
def test_the_index_finds_what_a_scan_finds(
    edits: list[tuple[int, list[int]]], shortest: int, more: int, budget: int
) -> None:
    """Told piece by piece, each after the last few tokens were taken back, and asked at every stage."""
    drafter = NgramDrafter(longest=shortest + more, shortest=shortest)
    text: list[int] = []
    for taken_back, new in edits:
        start = max(0, len(text) - taken_back)
        text = [*text[:start], *new]
        drafter.observe([Outcome(0, text, start)])
        assert ask(drafter, text, budget) == scan(text, shortest + more, shortest, budget)
        supposed = [*text, *text[:5]]
        assert ask(drafter, supposed, budget) == scan(supposed, shortest + more, shortest, budget)


def test_the_longest_match_wins_and_among_equals_the_last() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 3, 6, 1, 2, 3]
    assert ask(NgramDrafter(), text, 2) == [4, 9]
    assert ask(NgramDrafter(longest=2), text, 2) == [5, 9]
    assert ask(NgramDrafter(longest=1), text, 2) == [6]
    assert ask(NgramDrafter(longest=1), [1, *text, 1, 2, 3], 9) == [1, 2, 3]
    assert ask(NgramDrafter(shortest=4), text, 2) == []


def test_past_the_end_of_the_text_the_copy_goes_on_with_itself() -> None:
    assert ask(NgramDrafter(), [7, *[1, 2, 3] * 4], 12) == [1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert ask(NgramDrafter(), [7, *[1, 2, 3] * 40], 12) == [1, 2, 3] * 4
    assert ask(NgramDrafter(), [5, 5, 5, 5, 5], 9) == [5, 5, 5, 5]


def test_there_is_nothing_to_copy_in_a_text_without_repetition() -> None:
    assert ask(NgramDrafter(), list(range(50)), 5) == []
    assert ask(NgramDrafter(), [3], 5) == []


class Counting(dict):  # type: ignore[type-arg]
    """Counts look-ups and writes."""

    touched = 0

    def get(self, *key: object) -> object:
        self.touched += 1
        return super().get(*key)

    def __setitem__(self, key: object, value: object) -> None:
        self.touched += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_a_round_touches_a_few_entries_whatever_the_length_of_the_text(length: int) -> None:
    text = np.random.default_rng(0).integers(50, size=length + 100).tolist()
    drafter = NgramDrafter()
    drafter.observe([Outcome(0, text[:length], 0)])
    index = drafter._texts.of(0)
    index._last = Counting(index._last)
    for end in range(length + 1, length + 101):
        before = index._last.touched
        drafter.observe([Outcome(0, text[:end], end - 2)])
        ask(drafter, text[:end], 5)
        assert index._last.touched - before <= 4 * (2 + 4 + 1)


def test_a_fork_shares_nothing_that_changes() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 9, 1, 2]
    drafter.observe([Outcome(0, text, 0)])
    drafter.fork(0, 1)
    drafter.observe([Outcome(1, [*text, 8, 1, 2], len(text))])
    assert ask(drafter, text, 2) == [3, 9]
    assert ask(drafter, [*text, 8, 1, 2], 2, seq=1) == [8, 1]
