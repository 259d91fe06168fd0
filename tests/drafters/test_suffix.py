"""The suffix drafter follows counts, its past is bounded, and what is isolated stays apart."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.base import Chosen, Outcome, View
from forerun.drafters.index import Index
from forerun.drafters.suffix import Past, SuffixDrafter
from forerun.errors import ModelError
from forerun.sampling.laws import Sampler
from forerun.types import SamplingParams

SAMPLER = Sampler(SamplingParams(), (), (), seed=0)
ISOLATED = Sampler(SamplingParams(isolated=True), (), (), seed=0)


def ask(
    drafter: SuffixDrafter, text: Sequence[int], budget: int = 16, *, seq: int = 0, sampler: Sampler = SAMPLER,
    branches: bool = False,
) -> Chosen:  # fmt: skip
    (proposal,) = drafter.propose([View(seq, list(text), sampler, "block", branches)], [budget])
    assert isinstance(proposal, Chosen)
    return proposal


def write(
    drafter: SuffixDrafter, seq: int, prompt: Sequence[int], output: Sequence[int], *, isolated: bool = False
) -> None:
    """A request as the engine tells of it: its prompt in two pieces, then three tokens a round."""
    half = len(prompt) // 2
    drafter.observe([Outcome(seq, list(prompt[:half]), 0)])
    drafter.observe([Outcome(seq, list(prompt[: len(prompt) - 1]), half)])
    for start in range(0, len(output), 3):
        tokens = [*prompt, *output[: start + 3]]
        num_prompt = None if isolated else len(prompt)
        drafter.observe([Outcome(seq, tokens, len(prompt) + start - 1, None, num_prompt)])


def test_the_most_frequent_continuation_wins_and_among_equals_the_most_recent() -> None:
    often = [7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2]
    assert ask(SuffixDrafter(), often, 1).tokens == [3]
    assert ask(SuffixDrafter(), [7, 1, 2, 3, 8, 1, 2, 4, 5, 1, 2], 1).tokens == [4]


def test_a_tree_has_all_continuations_by_their_share() -> None:
    text = [7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2]
    tree = ask(SuffixDrafter(reach=2), text, branches=True)
    children = {token for token, parent in zip(tree.tokens, tree.parents or (), strict=True) if parent == -1}
    assert children == {3, 4}
    assert tree.tokens[0] == 3
    assert ask(SuffixDrafter(reach=2), text).parents is None


def test_a_longer_match_outweighs_more_places() -> None:
    text = [5, 6, 7, 8, 9, *[1, 8, 2] * 6, 5, 6, 7, 8]
    assert ask(SuffixDrafter(), text, 1).tokens == [9]
    assert len(ask(SuffixDrafter(), text).tokens) <= 4  # as far as the match reaches back


def test_drafts_that_are_too_rare_are_not_offered() -> None:
    text = [token for i in range(20) for token in (1, 20 + i)] + [1]
    tree = ask(SuffixDrafter(), text, branches=True)
    assert len(tree.tokens) <= 8  # of the eight places that are looked at each goes on differently
    assert ask(SuffixDrafter(), list(range(50))).tokens == ()


def test_what_was_written_before_is_drafted_for_another_request() -> None:
    drafter = SuffixDrafter(past=Past())
    write(drafter, 0, [50, 51, 52], list(range(20)))
    assert ask(drafter, [60, 3, 4, 5], seq=1).tokens == ()
    drafter.release(0)
    assert ask(drafter, [60, 3, 4, 5], seq=1).tokens == [6, 7, 8]
    assert ask(drafter, [60, 50, 51], seq=1).tokens == ()  # prompts are not remembered


def test_the_turns_of_a_conversation_are_remembered_without_what_was_asked() -> None:
    drafter, first, second = SuffixDrafter(past=Past()), [*range(10, 19)], [*range(30, 39)]
    write(drafter, 0, [1, 2, 3], first)
    prompt = [1, 2, 3, *first, 80, 81, 82]
    drafter.observe([Outcome(0, prompt[:-1], 12)])
    drafter.observe([Outcome(0, [*prompt, *second], len(prompt) - 1, None, len(prompt))])
    drafter.release(0)
    assert drafter.past is not None
    assert drafter.past.index.tokens == [-1, *first, -1, *second]


def test_an_isolated_request_neither_gives_nor_takes() -> None:
    drafter = SuffixDrafter(past=Past())
    write(drafter, 0, [50, 51], list(range(20)), isolated=True)
    drafter.release(0)
    assert ask(drafter, [60, 3, 4, 5], seq=1).tokens == ()
    write(drafter, 2, [50, 51], list(range(20)))
    drafter.release(2)
    assert ask(drafter, [60, 3, 4, 5], seq=3).tokens == [6, 7, 8]
    assert ask(drafter, [60, 3, 4, 5], seq=3, sampler=ISOLATED).tokens == ()
    assert ask(drafter, [3, 4, 5, 6, 60, 3, 4], seq=3, sampler=ISOLATED).tokens == [5, 6]  # its own text still helps


def test_a_draft_never_joins_two_texts() -> None:
    past = Past()
    for text in ([1, 2, 3], [4, 5, 6], [1, 2, 3]):
        past.add(text)
    assert ask(SuffixDrafter(past=past, reach=9), [9, 2, 3]).tokens == ()
    assert ask(SuffixDrafter(past=past, reach=9), [9, 3, 4]).tokens == [5, 6]
    assert ask(SuffixDrafter(past=past, reach=9), [9, 1]).tokens == [2, 3]


def test_the_oldest_is_forgotten_first_and_the_bound_is_kept() -> None:
    past = Past(memory=640 * 1000)
    for i in range(200):
        past.add([1000 + 10 * i + j for j in range(10)])
        assert len(past) <= 1000
        assert past.index.end == 11 * (i + 1)
    drafter = SuffixDrafter(past=past)
    assert ask(drafter, [1000, 1001, 1002]).tokens == ()
    assert ask(drafter, [2990, 2991, 2992]).tokens == [2993, 2994, 2995]
    assert all(position > past.index.first for position in past.index._last.values())
    past.add(list(range(5000)))
    assert len(past) <= 1000
    assert ask(drafter, [4990, 4991]).tokens == [4992, 4993]


def test_the_bound_of_memory_is_about_what_a_past_takes() -> None:
    import tracemalloc

    tokens = np.random.default_rng(0).integers(49_152, size=20_000).tolist()  # no n-gram twice: the worst
    tracemalloc.start()
    past = Past(memory=640 * 30_000)
    past.add(tokens)
    size, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.3 < size / (640 * len(tokens)) <= 1.0


def test_a_past_comes_back_from_its_file(tmp_path: Path) -> None:
    past = Past(vocabulary="abc", vocab_size=100)
    past.add([1, 2, 3, 4, 5, 6])
    past.add([7, 8, 9])
    past.save(tmp_path / "past")
    again = Past(vocabulary="abc", vocab_size=100)
    again.load(tmp_path / "past")
    assert ask(SuffixDrafter(past=again), [50, 1, 2, 3]).tokens == [4, 5, 6]
    assert ask(SuffixDrafter(past=again), [50, 5, 6]).tokens == ()
    small = Past(vocabulary="abc", vocab_size=100, memory=640 * 5)
    small.load(tmp_path / "past")
    assert 0 < len(small) <= 5
    assert small.index.tokens[-3:] == [7, 8, 9]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is no file of past texts"),
        (lambda data: b"something else\n" + data, "is no file of past texts"),
        (lambda data: data[:-1], "is no file of past texts"),
        (lambda data: data.replace(b"abc", b"abd"), "another tokenizer"),
        (lambda data: data[:-4] + b"\x64\0\0\0", "tokens that don't exist"),
        (lambda data: data[:-4] + b"\xfe\xff\xff\xff", "tokens that don't exist"),
    ],
)
def test_a_file_that_is_no_past_of_this_tokenizer_is_refused(damage: object, message: str, tmp_path: Path) -> None:
    past = Past(vocabulary="abc", vocab_size=100)
    past.add([1, 2, 3])
    past.save(tmp_path / "past")
    (tmp_path / "past").write_bytes(damage((tmp_path / "past").read_bytes()))  # type: ignore[operator]
    with pytest.raises(ModelError, match=message):
        past.load(tmp_path / "past")


texts = st.lists(st.integers(0, 3), max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, texts, st.integers(0, 40), st.integers(0, 40), texts)
def test_an_index_cut_and_dropped_finds_what_a_scan_finds(
    first: list[int], second: list[int], dropped: int, cut: int, question: list[int]
) -> None:
    index = Index((3, 2, 1))
    index.extend(first)
    index.drop(dropped)
    dropped = min(dropped, len(first))
    index.cut(max(cut, dropped))
    text = [*first[: max(cut, dropped)], *second]
    index.extend(second)
    assert index.tokens == text[dropped:]
    for size in (3, 2, 1):
        expected = [
            end
            for end in range(len(text) - 1, dropped + size - 1, -1)
            if len(question) >= size and text[end - size : end] == question[len(question) - size :]
        ]
        assert list(index.occurrences(question, size)) == expected
        for position in expected:
            assert index.match_length(question, position) >= size


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=14), st.integers(1, 3))
def test_shares_are_those_of_the_places_that_a_match_has(text: list[int], reach: int) -> None:
    """With few places for all of them to be looked at: the first draft is the commonest after one of the matches."""
    (first, *_) = ask(SuffixDrafter(reach=reach), text, 1).tokens or [None]
    if first is None:
        assert text[-1] not in text[:-1]
        return
    best = []
    for size in range(1, len(text)):
        after = Counter(
            text[end] for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]
        )
        if after:
            best.append({token for token, count in after.items() if count == max(after.values())})
    assert any(first in tokens for tokens in best)
