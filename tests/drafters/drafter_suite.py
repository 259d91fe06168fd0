"""What every drafter must do. A new one is right when these checks pass: each takes a factory of fresh drafters.

The checks of a law don't sample. A drawn token must be the very one that the DRAFT uniforms pick from its row of q, and
rows and lengths must be functions of what was known before the draw, for hundreds of seeds.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.drafters.base import Chosen, Drafter, Drawn, Outcome, Proposal, Verified, View
from forerun.sampling.laws import Sampler
from forerun.sampling.streams import Role
from forerun.sampling.verify import draw
from forerun.types import SamplingParams, Verify


@dataclass(frozen=True)
class Subject:
    """A drafter to be checked: how to make a fresh one, and the target's vocabulary."""

    make: Callable[[], Drafter]
    vocab_size: int
    has_past: bool = False  # it is made with texts that have ended


SETTINGS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "mixed": SamplingParams(
        temperature=0.8, top_k=5, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=9
    ),
}
RULES: tuple[Verify, ...] = ("block", "token", "coupled")


def a_text(subject: Subject, length: int, seed: int = 0) -> list[int]:
    """A text with repetitions, so that there is something to copy."""
    rng = np.random.default_rng(seed)
    phrase = rng.integers(subject.vocab_size, size=max(2, length // 4)).tolist()
    text = (phrase * 5)[:length]
    for place in rng.integers(length, size=length // 8):
        text[place] = int(rng.integers(subject.vocab_size))
    return text


def view_of(
    text: Sequence[int], *, seq: int = 0, params: SamplingParams = SETTINGS["plain"], verify: Verify = "block",
    seed: int = 0, num_prompt: int = 3, branches: bool = False,
) -> View:  # fmt: skip
    sampler = Sampler(params, text[:num_prompt], (0,), seed=seed)
    sampler.advance(text[num_prompt:])
    return View(seq, list(text), sampler, verify, branches)


def tell(drafter: Drafter, text: Sequence[int], *, seq: int = 0, pieces: int = 4) -> None:
    """Let a drafter follow a text from its start, piece by piece."""
    edges = sorted({round(len(text) * i / pieces) for i in range(pieces + 1)})
    for start, end in itertools.pairwise(edges):
        drafter.observe([Outcome(seq, list(text[:end]), start)])


def told(subject: Subject, text: Sequence[int], *, seq: int = 0) -> Drafter:
    drafter = subject.make()
    tell(drafter, text, seq=seq)
    return drafter


def ask(drafter: Drafter, view: View, budget: int = 5) -> Proposal:
    (proposal,) = drafter.propose([view], [budget])
    return proposal


def same(a: Proposal, b: Proposal) -> bool:
    if type(a) is not type(b) or list(a.tokens) != list(b.tokens) or a.parents != b.parents:
        return False
    return not isinstance(a, Drawn) or not a.tokens or np.array_equal(np.asarray(a.q_KV), np.asarray(b.q_KV))


def check_all(subject: Subject) -> None:
    for check in CHECKS:
        check(subject)


def check_proposals_are_within_budget_and_vocabulary(subject: Subject) -> None:
    for params in SETTINGS.values():
        for verify in RULES:
            text = a_text(subject, 20)
            drafter = told(subject, text)
            for budget in (0, 1, 2, 7, 200):
                proposal = ask(drafter, view_of(text, params=params, verify=verify), budget)
                assert isinstance(proposal, Chosen | Drawn)
                assert len(proposal.tokens) <= min(budget, drafter.max_drafts)
                assert all(type(token) is int and 0 <= token < subject.vocab_size for token in proposal.tokens)
                if isinstance(proposal, Drawn):
                    assert tuple(proposal.q_KV.shape) == (len(proposal.tokens), subject.vocab_size)
    assert drafter.propose([], []) == []


def check_a_drawn_token_is_the_one_that_the_uniforms_pick_from_its_row(subject: Subject) -> None:
    text = a_text(subject, 20)
    drafter = told(subject, text)
    for params in SETTINGS.values():
        for seed in range(60):
            view = view_of(text, params=params, seed=seed)
            proposal = ask(drafter, view, 4)
            if not isinstance(proposal, Drawn) or not proposal.tokens:
                continue
            q = np.asarray(proposal.q_KV)
            assert (q >= 0).all()
            np.testing.assert_allclose(q.sum(axis=-1), 1.0, atol=1e-5)
            u = np.asarray(view.sampler.stream.uniforms(len(text), Role.DRAFT, len(proposal.tokens)))
            assert draw(q, u).tolist() == list(proposal.tokens)


def check_rows_and_lengths_are_known_before_the_draw(subject: Subject) -> None:
    """Whatever follows the same earlier drafts has the same row of q, and is drafted or not for all seeds alike."""
    text = a_text(subject, 20)
    drafter = told(subject, text)
    rows: dict[tuple[int, ...], np.ndarray] = {}
    goes_on: dict[tuple[int, ...], bool] = {}
    for seed in range(200):
        proposal = ask(drafter, view_of(text, seed=seed), 3)
        if not isinstance(proposal, Drawn):
            assert same(proposal, ask(drafter, view_of(text), 3)), "what is chosen must not depend on a seed"
            continue
        for depth in range(4):
            before = tuple(proposal.tokens[:depth])
            if depth <= len(proposal.tokens):
                assert goes_on.setdefault(before, depth < len(proposal.tokens)) == (depth < len(proposal.tokens))
            if depth < len(proposal.tokens):
                row = np.asarray(proposal.q_KV[depth])
                np.testing.assert_allclose(rows.setdefault(before, row), row, rtol=1e-5, atol=1e-7)


def check_asking_changes_nothing(subject: Subject) -> None:
    """Twice the same; and a text that may come, longer or another end, leaves no mark on what is asked next."""
    for params in SETTINGS.values():
        for verify in RULES:
            text = a_text(subject, 24)
            drafter, fresh = told(subject, text), told(subject, text)
            real = view_of(text, params=params, verify=verify, seed=3)
            first = ask(drafter, real)
            assert same(ask(drafter, real), first)
            for ahead in (text[-3:], text[:1], text[2:9] * 2):
                supposed = view_of(text + ahead, params=params, verify=verify, seed=3)
                assert same(ask(drafter, supposed), ask(told(subject, text + ahead), supposed))
                assert same(ask(drafter, real), first)
            assert same(ask(fresh, real), first)


def check_state_does_not_depend_on_what_was_asked_or_on_the_pieces_of_a_text(subject: Subject) -> None:
    text = a_text(subject, 30)
    busy, quiet = subject.make(), subject.make()
    start = 0
    for end in (5, 6, 9, 10, 17, 18, 30):
        busy.observe([Outcome(0, text[:end], start)])
        ask(busy, view_of(text[:end]))
        start = end - 1  # the engine counts the last token, which the target hasn't read, as new again
    tell(quiet, text, pieces=1)
    unseen = subject.make()
    for params in SETTINGS.values():
        view = view_of(text, params=params)
        assert same(ask(busy, view), ask(quiet, view))
        assert same(ask(unseen, view), ask(quiet, view))  # never told, only asked


def check_sequences_do_not_touch_each_other(subject: Subject) -> None:
    texts = [a_text(subject, length, seed=length) for length in (4, 9, 23, 40)]
    together = subject.make()
    for seq, text in enumerate(texts):
        tell(together, text, seq=seq)
    views = [
        view_of(text, seq=seq, params=params, seed=seq)
        for (seq, text), params in zip(enumerate(texts), [*SETTINGS.values(), SETTINGS["plain"]], strict=True)
    ]
    budgets = [3, 0, 5, 1]
    proposals = together.propose(views, budgets)
    assert len(proposals) == len(views)
    for view, budget, proposal in zip(views, budgets, proposals, strict=True):
        alone = ask(told(subject, view.tokens, seq=view.seq), view, budget)
        assert list(alone.tokens) == list(proposal.tokens)
        if isinstance(proposal, Drawn):
            np.testing.assert_allclose(np.asarray(alone.q_KV), np.asarray(proposal.q_KV), rtol=1e-5, atol=1e-7)


def check_a_fork_has_the_state_and_a_life_of_its_own(subject: Subject) -> None:
    text = a_text(subject, 20)
    drafter = told(subject, text)
    drafter.fork(0, 1)
    view = view_of(text)
    assert same(ask(drafter, view_of(text, seq=1)), ask(told(subject, text), view))
    other = [*text, *text[3:9]]
    drafter.observe([Outcome(1, other, len(text))])
    assert same(ask(drafter, view), ask(told(subject, text), view))
    assert same(ask(drafter, view_of(other, seq=1)), ask(told(subject, other), view_of(other)))
    drafter.release(0)
    assert same(ask(drafter, view_of(other, seq=1)), ask(told(subject, other), view_of(other)))
    drafter.fork(77, 78)  # never seen


def check_a_released_sequence_is_forgotten(subject: Subject) -> None:
    drafter = told(subject, a_text(subject, 30))
    drafter.release(0)
    drafter.release(0)
    drafter.release(12345)
    text = a_text(subject, 15, seed=4)
    tell(drafter, text)
    assert same(ask(drafter, view_of(text)), ask(told(subject, text), view_of(text)))


def check_an_edited_text_is_followed(subject: Subject) -> None:
    """Cut back to any place and written on differently, as when a conversation goes on from an earlier turn."""
    text = a_text(subject, 24)
    for kept in (0, 1, 7, 20, 23):
        for more in (1, 2, 10):
            edited = text[:kept] + a_text(subject, 16, seed=9)[:more]
            drafter = told(subject, text)
            ask(drafter, view_of(text))
            drafter.observe([Outcome(0, edited, kept)])
            assert same(ask(drafter, view_of(edited)), ask(told(subject, edited), view_of(edited)))


def check_what_was_learned_from_ended_texts_can_be_forgotten(subject: Subject) -> None:
    drafter = subject.make()
    for seq in range(1, 4):
        text = a_text(subject, 40, seed=seq)
        tell(drafter, text[:20], seq=seq)
        verified = Verified(text[19:40], np.arange(21 * 2).reshape(21, 2) % subject.vocab_size)
        drafter.observe([Outcome(seq, text, 19, verified, 10)])
        drafter.release(seq)
    drafter.forget()
    text = a_text(subject, 40, seed=2)[:30]
    tell(drafter, text)
    if not subject.has_past:
        assert same(ask(drafter, view_of(text)), ask(told(subject, text), view_of(text)))


def check_a_tree_is_one_and_only_where_it_may_be(subject: Subject) -> None:
    """Parents come before their children, no two children of a node are one token, and a chain has no other parents."""
    for params in SETTINGS.values():
        for length in (4, 20, 50):
            text = a_text(subject, length, seed=length)
            drafter = told(subject, text)
            for budget in (1, 2, 5, 16):
                chain = ask(drafter, view_of(text, params=params), budget)
                assert chain.parents is None or list(chain.parents) == list(range(-1, len(chain.tokens) - 1))
                tree = ask(drafter, view_of(text, params=params, branches=True), budget)
                assert len(tree.tokens) <= budget
                if isinstance(tree, Drawn):
                    continue
                parents = range(-1, len(tree.tokens) - 1) if tree.parents is None else tree.parents
                assert all(-1 <= parent < i for i, parent in enumerate(parents))
                edges = list(zip(parents, tree.tokens, strict=True))
                assert len(set(edges)) == len(edges) or not isinstance(tree, Chosen)
                assert not isinstance(tree, Chosen) or tree.keys is None or len(tree.keys) == len(tree.tokens)


CHECKS: list[Callable[[Subject], None]] = [
    check_proposals_are_within_budget_and_vocabulary,
    check_a_drawn_token_is_the_one_that_the_uniforms_pick_from_its_row,
    check_rows_and_lengths_are_known_before_the_draw,
    check_asking_changes_nothing,
    check_state_does_not_depend_on_what_was_asked_or_on_the_pieces_of_a_text,
    check_sequences_do_not_touch_each_other,
    check_a_fork_has_the_state_and_a_life_of_its_own,
    check_a_released_sequence_is_forgotten,
    check_an_edited_text_is_followed,
    check_a_tree_is_one_and_only_where_it_may_be,
    check_what_was_learned_from_ended_texts_can_be_forgotten,
]
