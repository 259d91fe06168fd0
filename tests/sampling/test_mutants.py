"""Well-known mistakes, each of which fails the very proof that the shipped rules pass.

The table below is what the enumeration finds: the largest total-variation distance of each over all its cases.
Several of them keep more drafts than the exact rules do, which is why they are made.

    resample from p                                    0.268
    softmax of the residual                            0.631
    block rule, break at the first failure             0.762
    block rule, residual of the token rule             0.052
    block rule, product capped at the end only         0.106
    whole draft by the product of ratios               0.178
    prefixes by the product of ratios                  0.110
    one uniform for all drafts                         0.390
    typical acceptance                                 0.951
    lenience of one half                               0.580
    token rule, unlikely draft dropped                 0.283
    block rule, unlikely draft dropped                 0.283
    token rule, forbidden draft dropped                0.184
    block rule, forbidden draft dropped                0.184
    token rule, draft cut by its own masses            0.267
    token rule, greedy draft with its softmax as q     0.863
    block rule, greedy draft with its softmax as q     0.863
    token rule, q of another temperature               0.288
    block rule, q of another temperature               0.288
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from forerun.sampling.verify import Verdict, block_rule, residual, token_rule
from tests.sampling.enumeration import (
    KINDS,
    Case,
    Drafting,
    Rule,
    cases,
    cut,
    distance,
    drawn,
    prove,
    sequence_law,
)

Array = Any


# ---- rules


def resamples_from_the_target(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    n = token_rule(p, q, drafts, num_drafts, u).num_accepted_B
    return Verdict(n, p[np.arange(len(n)), n])


def softmax_of_the_residual(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    n, left = token_rule(p, q, drafts, num_drafts, u)
    return Verdict(n, np.where((n < num_drafts)[:, None], np.exp(left), left))


def block_broken_at_the_first_failure(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    """`while u < h: n += 1`, with the thresholds and the residual of the block rule."""
    longest = np.zeros_like(num_drafts)
    going = np.ones(len(p), dtype=bool)
    for i in range(drafts.shape[1]):
        only = np.ones_like(u)
        only[:, i] = u[:, i]
        going &= block_rule(p, q, drafts, num_drafts, only).num_accepted_B >= i + 1
        longest += going
    return _residual_of_block(p, q, drafts, longest)


def block_with_the_residual_of_tokens(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    n, rows = block_rule(p, q, drafts, num_drafts, u).num_accepted_B, np.arange(len(p))
    return Verdict(n, residual(p[rows, n], q[rows, n]))


def block_without_the_cap(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    """The product of ratios is capped once, at the end, and not step by step."""
    ratio = _ratios(p, q, drafts)
    product = np.concatenate([np.ones((len(p), 1)), np.minimum(np.cumprod(ratio, axis=1), 1.0)], axis=1)
    surplus = np.maximum(product[..., None] * p - q, 0).sum(axis=-1)
    room = surplus + 1 - product
    h = np.where(room > 1e-12, surplus / np.where(room > 1e-12, room, 1.0), 1.0)
    h[:, -1] = product[:, -1]
    stands = (u < h[:, 1:]) & (product[:, 1:] > 0)
    n = np.max(np.concatenate([np.zeros((len(p), 1), int), stands * np.arange(1, p.shape[1])], axis=1), axis=1)
    rows = np.arange(len(p))
    return Verdict(n, residual(p[rows, n], q[rows, n], product[rows, n]))


def whole_draft_by_the_product_of_ratios(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    """The draft stands as a whole if u is under the uncapped product of its ratios; else token by token."""
    whole = u[:, 0] < _ratios(p, q, drafts).prod(axis=1)
    n, law = token_rule(p, q, drafts, num_drafts, u)
    return Verdict(np.where(whole, num_drafts, n), np.where(whole[:, None], p[:, -1], law))


def prefixes_by_the_product_of_ratios(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    """Draft i stands while u is under the uncapped product of the ratios so far."""
    stands = u < np.cumprod(_ratios(p, q, drafts), axis=1)
    n, rows = np.cumprod(stands, axis=1).sum(axis=1), np.arange(len(p))
    return Verdict(n, residual(p[rows, n], q[rows, n]))


def one_uniform_for_all_drafts(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    return token_rule(p, q, drafts, num_drafts, np.broadcast_to(u[:, :1], u.shape))


def typical_acceptance(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    """A draft stands if its mass is above a threshold that falls with the entropy of p."""
    entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)[:, :-1]
    mass = np.take_along_axis(p[:, :-1], drafts[..., None], axis=2)[..., 0]
    n = np.cumprod(mass > np.minimum(0.1, 0.3 * np.exp(-entropy)), axis=1).sum(axis=1)
    return Verdict(n, p[np.arange(len(p)), n])


def lenience(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
    return token_rule(p, q, drafts, num_drafts, u * 0.5)


def _ratios(p: Array, q: Array, drafts: Array) -> Array:
    p = np.take_along_axis(p[:, :-1], drafts[..., None], axis=2)[..., 0]
    q = np.take_along_axis(q[:, :-1], drafts[..., None], axis=2)[..., 0]
    return np.divide(p, q, out=np.zeros_like(p), where=q > 0)


def _residual_of_block(p: Array, q: Array, drafts: Array, n: Array) -> Verdict:
    prefix = np.ones(len(p))
    for i, ratio in enumerate(_ratios(p, q, drafts).T):
        prefix = np.where(i < n, np.minimum(prefix * ratio, 1.0), prefix)
    rows = np.arange(len(p))
    return Verdict(n, residual(p[rows, n], q[rows, n], prefix))


# ---- ways to draft


def masses(laws: Array, drafts: Array) -> Array:
    return np.take_along_axis(laws[:, :-1], drafts[..., None], axis=2)[..., 0]


def first(stops: Array, depth: int) -> Array:
    return np.where(stops.any(axis=1), stops.argmax(axis=1), depth)


def unlikely_draft_is_dropped(case: Case) -> Drafting:
    """A drawn token whose own q is low isn't verified: K looks ahead."""
    drafts = drawn(case)
    return cut(drafts, first(masses(drafts.q_NLV, drafts.drafts_NK) < 0.4, case.num_drafts))


def forbidden_draft_is_dropped(case: Case) -> Drafting:
    """A drawn token that the target's grammar forbids isn't verified; the next token is drawn from p."""
    drafts = drawn(case)
    p = case.rows(case.p, drafts.drafts_NK)
    return cut(drafts, first(masses(p, drafts.drafts_NK) == 0.0, case.num_drafts))


def greedy_draft_with_its_softmax(case: Case) -> Drafting:
    """The most likely token is drafted, and the whole law given as q."""
    drafts = drawn(case)
    best = drafts.q_NLV[:, :-1].argmax(axis=-1)
    return drafts._replace(weight_N=(best == drafts.drafts_NK).all(axis=1).astype(float))


def raw_law_given_as_q(case: Case) -> Drafting:
    """Drafts are drawn at another temperature than that of the law which is given as q."""
    drafts = drawn(case)
    sharper = drafts.q_NLV[:, :-1] ** 2
    sharper /= sharper.sum(axis=-1, keepdims=True)
    weight = np.take_along_axis(sharper, drafts.drafts_NK[..., None], axis=2)[..., 0].prod(axis=1)
    return drafts._replace(weight_N=weight)


def longest_mass_first(case: Case) -> Drafting:
    """The draft is cut where the product of its own masses falls under a threshold, the last token excluded."""
    drafts = drawn(case)
    return cut(drafts, first(np.cumprod(masses(drafts.q_NLV, drafts.drafts_NK), axis=1) < 0.15, case.num_drafts))


@dataclass(frozen=True)
class Mutant:
    rule: Rule
    drafting: Callable[[Case], Drafting]
    distance: float  # the largest that is found


MUTANTS = {
    "resample from p": Mutant(resamples_from_the_target, drawn, 0.268),
    "softmax of the residual": Mutant(softmax_of_the_residual, drawn, 0.631),
    "block rule, break at the first failure": Mutant(block_broken_at_the_first_failure, drawn, 0.762),
    "block rule, residual of the token rule": Mutant(block_with_the_residual_of_tokens, drawn, 0.052),
    "block rule, product capped at the end only": Mutant(block_without_the_cap, drawn, 0.106),
    "whole draft by the product of ratios": Mutant(whole_draft_by_the_product_of_ratios, drawn, 0.178),
    "prefixes by the product of ratios": Mutant(prefixes_by_the_product_of_ratios, drawn, 0.110),
    "one uniform for all drafts": Mutant(one_uniform_for_all_drafts, drawn, 0.390),
    "typical acceptance": Mutant(typical_acceptance, drawn, 0.951),
    "lenience of one half": Mutant(lenience, drawn, 0.580),
    "token rule, unlikely draft dropped": Mutant(token_rule, unlikely_draft_is_dropped, 0.283),
    "block rule, unlikely draft dropped": Mutant(block_rule, unlikely_draft_is_dropped, 0.283),
    "token rule, forbidden draft dropped": Mutant(token_rule, forbidden_draft_is_dropped, 0.184),
    "block rule, forbidden draft dropped": Mutant(block_rule, forbidden_draft_is_dropped, 0.184),
    "token rule, draft cut by its own masses": Mutant(token_rule, longest_mass_first, 0.267),
    "token rule, greedy draft with its softmax as q": Mutant(token_rule, greedy_draft_with_its_softmax, 0.863),
    "block rule, greedy draft with its softmax as q": Mutant(block_rule, greedy_draft_with_its_softmax, 0.863),
    "token rule, q of another temperature": Mutant(token_rule, raw_law_given_as_q, 0.288),
    "block rule, q of another temperature": Mutant(block_rule, raw_law_given_as_q, 0.288),
}
SHAPES = [(3, 1), (3, 2), (3, 3), (4, 2), (5, 2)]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_the_proof(name: str) -> None:
    mutant = MUTANTS[name]
    found = [case for kind in KINDS for case in cases(kind, SHAPES)]
    far = {case.name: distance(case, mutant.rule, mutant.drafting(case)) for case in found}
    worst = max(found, key=lambda case: far[case.name])
    with pytest.raises(AssertionError):
        prove(worst, mutant.rule, mutant.drafting(worst))
    assert far[worst.name] > 1e-3
    assert far[worst.name] == pytest.approx(mutant.distance, abs=0.005)


def test_a_number_of_drafts_that_looks_ahead_turns_seven_tenths_into_more() -> None:
    """p = 0.7/0.3, q = 0.5/0.5: where a drafted token 1 is dropped, 0.85/0.15 comes out; where it ends the draft, p."""
    case = Case("counterexample", [np.asarray([0.7, 0.3]), np.asarray([[0.7, 0.3]] * 2)], [np.asarray([0.5, 0.5])])
    drafts = drawn(case)
    for rule in (token_rule, block_rule):
        law, _ = sequence_law(case, rule, cut(drafts, 1 - drafts.drafts_NK[:, 0]))
        np.testing.assert_allclose(law.sum(axis=1), [0.85, 0.15], atol=1e-12)
        prove(case, rule, drafts)
    two = Case("with a second draft", [*case.p, np.full((2, 2, 2), [0.7, 0.3])], [*case.q, np.full((2, 2), 0.5)])
    drafts = drawn(two)
    for rule in (token_rule, block_rule):
        prove(two, rule, cut(drafts, np.where(drafts.drafts_NK[:, 0] == 1, 1, 2)))  # stop after it: kept
        with pytest.raises(AssertionError):
            prove(two, rule, cut(drafts, np.where(drafts.drafts_NK[:, 1] == 1, 1, 2)))  # stop before it: dropped
