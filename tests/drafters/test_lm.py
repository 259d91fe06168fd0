"""A small model as drafter: its q, its cache, and vocabularies that differ."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.backends.base import Feed, Scores
from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Drawn, Outcome, View
from forerun.drafters.lm import LMDrafter
from forerun.errors import OptionError
from forerun.sampling.laws import Sampler
from forerun.types import SamplingParams, Verify
from tests.reference import next_law

SIZE = 6
TEXT = [1, 4, 0, 2, 2, 5, 1]


def view_of(text: list[int], params: SamplingParams, *, verify: Verify = "block", seed: int = 0) -> View:
    sampler = Sampler(params, text[:3], (0,), seed=seed)
    sampler.advance(text[3:])
    return View(0, list(text), sampler, verify)


def ask(drafter: LMDrafter, view: View, budget: int) -> Any:
    return drafter.propose([view], [budget])[0]


class TorchToy(ToySession):
    """The same table, with logits as torch tensors."""

    def extend(self, feeds: Any, *, taps: Any = ()) -> Scores:
        return Scores(torch.from_numpy(super().extend(feeds, taps=taps).logits))


@pytest.mark.parametrize("kind", [ToySession, TorchToy])
@pytest.mark.parametrize("size", [SIZE, SIZE + 4])
def test_q_is_the_models_law_under_the_requests_own_settings_along_the_draft(size: int, kind: type) -> None:
    """Cut to the target's vocabulary before any transform: what is cut has no mass and takes none."""
    params = SamplingParams(
        temperature=0.8, top_k=4, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2,
        min_tokens=7, logit_bias={3: 1.0}, logits_processors=(lambda tokens, x: x * (1 + 0.1 * (len(tokens) % 3)),),
    )  # fmt: skip
    session = kind(ToySession.random(size, seed=2)._logits)
    drafter = LMDrafter(session, vocab_size=SIZE)
    for seed in range(30):
        proposal = ask(drafter, view_of(TEXT, params, seed=seed), 5)
        assert isinstance(proposal, Drawn)
        assert tuple(proposal.q_KV.shape) == (5, SIZE)
        for i, row in enumerate(np.asarray(proposal.q_KV)):
            text = [*TEXT, *proposal.tokens[:i]]
            expected = next_law(session._row(text)[:SIZE].tolist(), params, TEXT[:3], text[3:], (0,))
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-8)
            assert row[proposal.tokens[i]] > 0


def test_greedy_and_coupled_drafts_are_point_masses() -> None:
    drafter = LMDrafter(ToySession.random(SIZE, seed=2), vocab_size=SIZE)
    greedy = ask(drafter, view_of(TEXT, SamplingParams()), 4)
    assert isinstance(greedy, Chosen)
    text = list(TEXT)
    for token in greedy.tokens:
        assert token == drafter.session._row(text).argmax()
        text.append(token)
    assert isinstance(ask(drafter, view_of(TEXT, SamplingParams(temperature=1.0), verify="coupled"), 4), Chosen)


def test_a_coupled_draft_is_the_race_over_the_targets_own_noise() -> None:
    session = ToySession.random(SIZE, seed=2)
    drafter = LMDrafter(session, vocab_size=SIZE)
    params = SamplingParams(temperature=0.9)
    for seed in range(30):
        view = view_of(TEXT, params, verify="coupled", seed=seed)
        text = list(TEXT)
        for token in ask(drafter, view, 4).tokens:
            law = np.asarray(next_law(session._row(text).tolist(), params, TEXT[:3], text[3:], ()))
            noise = view.sampler.stream.exponentials(len(text), SIZE, law)
            assert token == (law / noise).argmax()
            text.append(token)


def test_a_smaller_vocabulary_than_the_targets_is_refused() -> None:
    with pytest.raises(OptionError, match=f"knows {SIZE - 1} tokens, the target {SIZE}"):
        LMDrafter(ToySession.random(SIZE - 1), vocab_size=SIZE)


@pytest.mark.parametrize("max_len", [5, 7, 8, 9, 20])
def test_drafting_stops_where_the_draft_models_context_is_full(max_len: int) -> None:
    """The last draft is never fed, so a text of n tokens leaves room for max_len - n + 1 drafts."""
    drafter = LMDrafter(ToySession.random(SIZE, max_len=max_len), vocab_size=SIZE)
    proposal = ask(drafter, view_of(TEXT, SamplingParams(temperature=1.0)), 5)
    assert len(proposal.tokens) == max(0, min(5, max_len - len(TEXT) + 1))
    drafter.observe([Outcome(0, [*TEXT, 1, 2], len(TEXT))])
    drafter.release(0)
    assert not drafter.session._tokens


def test_a_row_without_a_law_ends_the_draft_and_leaves_the_others() -> None:
    def fails(tokens: Any, logits: Any) -> Any:
        if len(tokens) >= len(TEXT) + 2:
            raise ValueError("no more")
        return logits

    drafter = LMDrafter(ToySession.random(SIZE, seed=2), vocab_size=SIZE)
    fine = SamplingParams(temperature=1.0)
    params = [
        fine,
        SamplingParams(temperature=1.0, logits_processors=(fails,)),
        SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(SIZE), -math.inf)),
        fine,
    ]
    views = [view_of(TEXT, p)._replace(seq=i) for i, p in enumerate(params)]
    proposals = drafter.propose(views, [4] * 4)
    assert [len(proposal.tokens) for proposal in proposals] == [4, 2, 0, 4]
    alone = ask(LMDrafter(ToySession.random(SIZE, seed=2), vocab_size=SIZE), view_of(TEXT, fine), 4)
    for i in (0, 3):
        assert proposals[i].tokens == alone.tokens
        assert np.array_equal(proposals[i].q_KV, alone.q_KV)


class Watched(ToySession):
    """Remembers how many rows each pass had, and the largest."""

    passes: list[list[int]]

    def extend(self, feeds: Any, *, taps: Any = ()) -> Scores:
        self.passes.append([len(feed.tokens) for feed in feeds])
        return super().extend(feeds, taps=taps)


def test_after_full_acceptance_the_cache_has_no_hole_and_feeds_no_more_than_it_must() -> None:
    """The last draft was never fed: with the bonus token two rows are new. After a rejection it is one."""
    session = Watched(ToySession.random(SIZE, seed=2)._logits)
    session.passes = []
    drafter = LMDrafter(session, vocab_size=SIZE)
    params = SamplingParams(temperature=1.0)
    drafts = list(ask(drafter, view_of(TEXT, params), 3).tokens)
    assert session.passes == [[len(TEXT)], [1], [1]]
    text = [*TEXT, *drafts, 3]
    drafter.observe([Outcome(0, text, len(TEXT) - 1)])
    session.passes.clear()
    more = list(ask(drafter, view_of(text, params), 2).tokens)
    assert session.passes == [[2], [1]]
    (handle,) = drafter._handles.values()
    assert session._tokens[handle] == [*text, more[0]]
    text = [*text, (more[0] + 1) % SIZE]
    drafter.observe([Outcome(0, text, len(text) - 2)])
    session.passes.clear()
    ask(drafter, view_of(text, params), 1)
    assert session.passes == [[1]]
    assert session._tokens[handle] == text


def test_all_sequences_draft_in_one_pass_for_each_depth() -> None:
    session = Watched(ToySession.random(SIZE, seed=2)._logits)
    session.passes = []
    drafter = LMDrafter(session, vocab_size=SIZE)
    views = [view_of(TEXT[: 4 + i], SamplingParams(temperature=1.0), seed=i)._replace(seq=i) for i in range(3)]
    assert [len(p.tokens) for p in drafter.propose(views, [1, 3, 2])] == [1, 3, 2]
    assert session.passes == [[4, 5, 6], [1, 1], [1]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_after_any_sequence_of_rounds_the_cache_scores_as_a_fresh_prefill(data: st.DataObject) -> None:
    """Rounds with any number accepted, pieces of prompts, edits, forks: the next q is that of a model fed at once."""
    table = ToySession.random(SIZE, order=3, seed=2)._logits
    drafter = LMDrafter(ToySession(table), vocab_size=SIZE)
    params = SamplingParams(temperature=1.0)
    text = data.draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=8))
    drafter.observe([Outcome(0, text[: len(text) // 2], 0)] if len(text) > 1 else [])
    for _ in range(6):
        view = view_of(text, params, seed=len(text))
        proposal = ask(drafter, view, data.draw(st.integers(0, 4)))
        if proposal.tokens:
            fresh = ToySession(table)
            fed = [*text, *proposal.tokens[:-1]]
            logits = fresh.extend([Feed(fresh.open(), fed, len(proposal.tokens))]).logits
            w = np.exp(logits - logits.max(axis=-1, keepdims=True))
            np.testing.assert_allclose(proposal.q_KV, w / w.sum(axis=-1, keepdims=True), rtol=1e-5)
        accepted = data.draw(st.integers(0, len(proposal.tokens)))
        start = len(text) - 1
        text = [*text, *proposal.tokens[:accepted], data.draw(st.integers(0, SIZE - 1))]
        if data.draw(st.integers(0, 5)) == 0:
            start = data.draw(st.integers(0, len(text) - 1))
            text = [*text[:start], *data.draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=5))]
        if data.draw(st.booleans()):
            drafter.observe([Outcome(0, text, start)])
        if data.draw(st.integers(0, 5)) == 0:
            drafter.fork(0, 1)
            drafter.release(0)
            drafter.fork(1, 0)
            drafter.release(1)
    drafter.release(0)
    assert not drafter.session._tokens
