"""A draft model with a cheaper drafter inside: the same law of drafts, in fewer passes of the model."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Drafter, Drawn, Outcome, Tree, View
from forerun.drafters.lm import LMDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.sampling.laws import Row, Sampler, laws
from forerun.types import SamplingParams, Verify

SIZE = 5
TEXT = [1, 4, 0, 2, 2, 3, 1, 4, 0]
SAMPLED = SamplingParams(temperature=0.9, frequency_penalty=0.3)


class Counted(ToySession):
    passes = 0

    def extend(self, feeds: Any, *, taps: Any = ()) -> Any:
        self.passes += 1
        return super().extend(feeds, taps=taps)


def table(seed: int, noise: float = 0.0) -> np.ndarray:
    logits = ToySession.random(SIZE, order=2, spread=1.5, seed=seed)._logits
    return logits + np.random.default_rng(9).normal(scale=noise, size=logits.shape).astype(np.float32)


def model(noise: float = 0.0, inner: Drafter | None = None) -> LMDrafter:
    return LMDrafter(Counted(table(2, noise)), vocab_size=SIZE, inner=inner)


def view_of(params: SamplingParams, *, verify: Verify = "block", seed: int = 0, branches: bool = False) -> View:
    sampler = Sampler(params, TEXT[:3], (0,), seed=seed)
    sampler.advance(TEXT[3:])
    return View(0, list(TEXT), sampler, verify, branches)


@pytest.mark.parametrize("inner", [NgramDrafter, lambda: model(0.0), lambda: model(0.4, NgramDrafter())])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_drafts_have_the_models_own_law_whatever_is_inside(inner: Any, params: SamplingParams) -> None:
    count, depth = 1500 if params.temperature else 1, 4
    drafter = model(0.0, inner())
    drafter.observe([Outcome(0, TEXT, 0)])
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        (proposal,) = drafter.propose([view_of(params, seed=seed)], [depth])
        assert len(proposal.tokens) == depth
        seen[tuple(proposal.tokens[:3])] += 1
        if params.temperature:
            assert isinstance(proposal, Drawn)
            for i in (0, 3):
                np.testing.assert_allclose(proposal.q_KV[i], law_after(params, proposal.tokens[:i]), rtol=1e-5)
    if not params.temperature:
        assert list(seen) == [tuple(model().propose([view_of(params)], [3])[0].tokens)]
        return
    expected = {
        (a, b, c): float(law_after(params, [])[a] * law_after(params, [a])[b] * law_after(params, [a, b])[c])
        for a in range(SIZE)
        for b in range(SIZE)
        for c in range(SIZE)
    }
    cells = [(mass * count, seen[key]) for key, mass in expected.items() if mass * count >= 8]
    cells.append((count - sum(mass for mass, _ in cells), count - sum(n for _, n in cells)))
    statistic = sum((n - mass) ** 2 / mass for mass, n in cells)
    assert chi2.sf(statistic, len(cells) - 1) > 1e-5


def law_after(params: SamplingParams, drafts: Any) -> np.ndarray:
    view = view_of(params)
    row = ToySession(table(2))._row([*TEXT, *drafts])[None]
    return laws(row, [Row(view.sampler, tuple(drafts))])[0]


def test_point_masses_inside_change_no_draft_and_save_passes() -> None:
    """The model's own draws decide, so that the drafts are those without an inner drafter, token for token."""
    alone, cascade = model(), model(0.0, model(0.0))
    cascade.inner.propose = (
        lambda views, budgets: [  # type: ignore[union-attr, method-assign]
            Chosen(right[len(view.tokens) - len(TEXT) :][:budget]) for view, budget in zip(views, budgets, strict=True)
        ]
    )
    for seed in range(20):
        view = view_of(SAMPLED, seed=seed)
        right = list(alone.propose([view], [5])[0].tokens)
        cascade.session.passes = 0  # type: ignore[attr-defined]
        (proposal,) = cascade.propose([view], [5])
        assert list(proposal.tokens) == right
        assert cascade.session.passes == 1  # type: ignore[attr-defined]


def test_a_model_inside_that_is_the_model_itself_is_always_right() -> None:
    drafter = model(0.0, model(0.0))
    for seed in range(20):
        drafter.session.passes = 0  # type: ignore[attr-defined]
        drafter.propose([view_of(SAMPLED, seed=seed)], [5])
        assert drafter.session.passes == 1  # type: ignore[attr-defined]


def test_in_coupled_mode_all_levels_share_the_targets_noise() -> None:
    alone, cascade = model(), model(0.0, model(0.0, NgramDrafter()))
    for seed in range(20):
        view = view_of(SAMPLED, verify="coupled", seed=seed)
        cascade.session.passes = 0  # type: ignore[attr-defined]
        assert cascade.propose([view], [4])[0].tokens == alone.propose([view], [4])[0].tokens
        assert cascade.session.passes == 1  # type: ignore[attr-defined]


def test_it_stops_before_a_draft_that_looks_unlikely_by_its_law_alone() -> None:
    """1 - sqrt(0.2 H(q)) (AdaEDL): the same for each seed that led to the same drafts."""
    drafter = model()
    longest = {seed: drafter.propose([view_of(SAMPLED, seed=seed)], [6])[0] for seed in range(60)}
    bounds = {seed: [looks(row) for row in full.q_KV] for seed, full in longest.items()}
    drafter.stop_below = float(np.median([bound for own in bounds.values() for bound in own]))
    if bounds[0][0] < drafter.stop_below:
        drafter.stop_below = bounds[0][0] - 1e-4
    lengths = set()
    for seed, full in longest.items():
        (proposal,) = drafter.propose([view_of(SAMPLED, seed=seed)], [6])
        expected = next((i for i, bound in enumerate(bounds[seed]) if bound < drafter.stop_below), 6)
        assert len(proposal.tokens) == expected
        assert list(proposal.tokens) == list(full.tokens[:expected])
        lengths.add(expected)
    assert len(lengths) > 2
    drafter.stop_below = 0.99
    assert not drafter.propose([view_of(SamplingParams())], [6])[0].tokens  # greedy: by the law at temperature 1


def looks(row: np.ndarray) -> float:
    return float(1 - (0.2 * -np.sum(row * np.log(np.maximum(row, 1e-30)))) ** 0.5)


def test_a_full_cache_of_the_model_shortens_drafts_and_fails_nothing() -> None:
    for capacity in range(30):
        session = ToySession(table(2), cache_tokens=capacity)
        drafter = LMDrafter(session, vocab_size=SIZE)
        views = [view_of(SAMPLED)._replace(seq=seq) for seq in range(3)]
        drafter.observe([Outcome(seq, TEXT, 0) for seq in range(3)])
        room = session.room()
        proposals = drafter.propose(views, [4] * 3)
        assert session.room() >= 0
        for seq, proposal in enumerate(proposals):
            known = len(TEXT) - 1 if seq < capacity // (len(TEXT) - 1) else 0
            assert len(proposal.tokens) == min(4, max(0, room + known - len(TEXT) + 1))
            room -= len(TEXT) - known + len(proposal.tokens) - 1 if proposal.tokens else 0
        for seq in range(3):
            drafter.release(seq)


def test_a_tree_is_drawn_without_replacement_from_the_laws_of_its_nodes() -> None:
    drafter = model()
    drafter.shape = lambda count: [-1, -1, -1, 0, 0, 1, 3][:count]
    for seed in range(50):
        (tree,) = drafter.propose([view_of(SAMPLED, seed=seed, branches=True)], [7])
        assert isinstance(tree, Tree)
        assert list(tree.parents) == [-1, -1, -1, 0, 0, 1, 3]
        paths = [[tree.tokens[i] for i in path] for path in ([], [], [], [0], [0], [1], [0, 3])]
        for offer in tree.offers:
            assert offer.law is not None
            np.testing.assert_allclose(tree.q_MV[offer.law], law_after(SAMPLED, paths[offer.draft]), rtol=1e-5)
        for siblings in ((0, 1, 2), (3, 4)):
            assert len({tree.tokens[i] for i in siblings}) == len(siblings)
        assert drafter.session.length(drafter._handles[0]) == len(TEXT)


def test_a_greedy_tree_has_the_likeliest_tokens_in_order_with_a_word_on_each() -> None:
    drafter = model()
    drafter.shape = lambda count: [-1, -1, -1, 0, 0][:count]
    params = SamplingParams(frequency_penalty=0.3)
    (tree,) = drafter.propose([view_of(params, branches=True)], [5])
    assert isinstance(tree, Chosen)
    soft = SamplingParams(temperature=1.0, frequency_penalty=0.3)
    assert list(tree.tokens[:3]) == np.argsort(-law_after(soft, []), kind="stable")[:3].tolist()
    assert list(tree.tokens[3:]) == np.argsort(-law_after(soft, tree.tokens[:1]), kind="stable")[:2].tolist()
    assert [key[0] for key in tree.keys or ()] == [0, 1, 2, 0, 1]  # type: ignore[index]
