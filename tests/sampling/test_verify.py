"""The rules for one chain of drafts are exact: all drafts and all outcomes enumerated, no sampling, to 1e-9."""

import itertools
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
import pytest
import torch

from forerun.sampling.streams import Stream
from forerun.sampling.tree import walk
from forerun.sampling.verify import Verdict, block_rule, draw, fastest, residual, token_rule
from tests.sampling.enumeration import (
    KINDS,
    SHAPES,
    TOP,
    Case,
    Drafting,
    Rule,
    cases,
    check_cells,
    cut,
    drawn,
    prove,
    prove_each,
    sequence_law,
)  # fmt: skip

Array = Any
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}
CHAIN_RULES = {"token": token_rule, "block": block_rule}
SMALL = [(3, 2), (3, 3), (4, 2), (5, 1)]


def on(library: str, rule: Callable[..., Verdict]) -> Rule:
    """Let a rule run on arrays of a library."""
    make = LIBRARIES[library]

    def run(*arrays: np.ndarray) -> Verdict:
        verdict = rule(*(make(np.ascontiguousarray(array)) for array in arrays))
        assert array_api_compat.is_torch_array(verdict.law_BV) == (library == "torch")
        return verdict

    return run


def shapes(library: str) -> list[tuple[int, int]]:
    """V of 3 to 6 with K of 1 to 3; torch runs the same code on fewer of them."""
    return SHAPES if library == "numpy" else SMALL


def expected_tokens(case: Case) -> dict[str, float]:
    """Mean tokens of a round in theory. Token: 1 + sum over l of E[prod min(1, p/q)]. Block: 1 + sum over l of E[P_l].

    No rule passes the bound of a chain, 1 + the sum over l and prefixes of min(P, Q).
    """
    drafts = drawn(case)
    at = drafts.drafts_NK[..., None]
    p = np.take_along_axis(case.rows(case.p[:-1], drafts.drafts_NK), at, axis=2)[..., 0]
    q = np.take_along_axis(drafts.q_NLV[:, :-1], at, axis=2)[..., 0]
    likely = drafts.weight_N > 0  # elsewhere q may be 0
    weight, ratio = drafts.weight_N[likely], p[likely] / q[likely]
    capped, token, block = np.ones(len(weight)), 1.0, 1.0
    for i in range(case.num_drafts):
        capped = np.minimum(capped * ratio[:, i], 1.0)
        block += weight @ capped
        token += weight @ np.minimum(ratio[:, : i + 1], 1.0).prod(axis=1)
    bound, joint_p, joint_q = 1.0, np.ones(()), np.ones(())
    for law_p, law_q in zip(case.p, case.q, strict=False):
        joint_p, joint_q = joint_p[..., None] * law_p, joint_q[..., None] * law_q
        bound += np.minimum(joint_p, joint_q).sum()
    return {"token": token, "block": block, "bound": bound}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_leave_the_targets_law_and_stand_as_often_as_theory_says(kind: str, library: str) -> None:
    for case in cases(kind, shapes(library)):
        expected = expected_tokens(case)
        for name, rule in CHAIN_RULES.items():
            tokens = prove(case, on(library, rule), drawn(case))
            assert tokens == pytest.approx(expected[name], abs=1e-11), case.name
        assert expected["token"] - 1e-12 <= expected["block"] <= expected["bound"] + 1e-12, case.name


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_draft_stands_with_probability_one_minus_the_distance_of_the_laws(kind: str) -> None:
    for case in cases(kind, [(size, 1) for size in (3, 4, 5, 6)]):
        alpha = 1 - abs(case.p[0] - case.q[0]).sum() / 2
        for rule in CHAIN_RULES.values():  # with a single draft the two are one rule
            assert sequence_law(case, rule, drawn(case))[1] == pytest.approx(1 + alpha, abs=1e-12)


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_mass_is_a_draft_drawn_from_a_one_hot_law(kind: str, rule: str) -> None:
    for case in cases(kind, SMALL):
        drafts = drawn(case).drafts_NK
        q = np.zeros_like(case.rows(case.p, drafts))
        np.put_along_axis(q[:, :-1], drafts[..., None], 1.0, axis=2)
        count = np.full(len(drafts), case.num_drafts)
        prove_each(case, CHAIN_RULES[rule], Drafting(np.ones(len(drafts)), drafts, count, q))


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_the_cells_of_the_enumeration_are_right(rule: str) -> None:
    rng = np.random.default_rng(2)
    for kind in KINDS:
        for case in cases(kind, SMALL):
            check_cells(CHAIN_RULES[rule], case, drawn(case), rng)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_laws_leave_the_targets_law_to_their_precision(kind: str) -> None:
    def single(rule: Callable[..., Verdict]) -> Rule:
        return lambda p, q, *rest: rule(p.astype(np.float32), q.astype(np.float32), *rest)

    for case in cases(kind, SMALL):
        for rule in CHAIN_RULES.values():
            prove(case, single(rule), drawn(case), tolerance=2e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_fewer_drafts_than_the_batch_has_columns_leave_the_targets_law(library: str) -> None:
    """Columns from num_drafts on hold any token, rows of p any law, and uniforms any number."""
    rng = np.random.default_rng(3)
    for case in cases("mixed", SMALL):

        def padded(rule: Callable[..., Verdict], case: Case = case) -> Rule:
            def run(p: Array, q: Array, drafts: Array, num_drafts: Array, u: Array) -> Verdict:
                num, size, more = len(p), case.vocab_size, 2
                p = np.concatenate([p, rng.random((num, more, size)) * 3], axis=1)
                q = np.concatenate([q, np.zeros((num, more, size))], axis=1)
                drafts = np.concatenate([drafts, rng.integers(size, size=(num, more))], axis=1)
                return rule(p, q, drafts, num_drafts, np.concatenate([u, rng.random((num, more))], axis=1))

            return run

        for rule in CHAIN_RULES.values():
            prove(case, padded(on(library, rule)), drawn(case))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_without_drafts_the_law_is_the_targets_own(library: str, rule: Callable[..., Verdict]) -> None:
    p = np.asarray([[[0.25, 0.75, 0.0]], [[0.0, 0.5, 0.5]]])
    none, zero = np.empty((2, 0), dtype=np.int64), np.zeros(2, dtype=np.int64)
    verdict = on(library, rule)(p, np.zeros_like(p), none, zero, np.empty((2, 0)))
    assert np.asarray(verdict.num_accepted_B).tolist() == [0, 0]
    assert np.array_equal(np.asarray(verdict.law_BV), p[:, 0])


def ragged_batch(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sequences with 0 to 3 drafts over one vocabulary, of all kinds of laws."""
    parts = []
    for kind, depth in itertools.product(KINDS, (0, 1, 2, 3)):
        case = cases(kind, [(5, 3)])[0]
        drafts = rng.integers(5, size=(1, 3))
        p, q = case.rows(case.p, drafts), case.rows(case.q, drafts)
        q = np.concatenate([q[:, :depth], np.zeros((1, 4 - depth, 5))], axis=1)
        parts.append((p, q, drafts, np.asarray([depth]), rng.random((1, 3)) ** 2))
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_a_ragged_batch_is_judged_as_each_sequence_alone(library: str, rule: Callable[..., Verdict]) -> None:
    rng, seen = np.random.default_rng(7), set()
    for _ in range(20):
        batch = ragged_batch(rng)
        together = on(library, rule)(*batch)
        for b, depth in enumerate(batch[3]):
            p, q, drafts, count, u = (array[b : b + 1] for array in batch)
            alone = on(library, rule)(p[:, : depth + 1], q[:, : depth + 1], drafts[:, :depth], count, u[:, :depth])
            assert int(together.num_accepted_B[b]) == int(alone.num_accepted_B[0])
            assert np.array_equal(np.asarray(together.law_BV[b]), np.asarray(alone.law_BV[0]))
            seen.add((int(depth), int(alone.num_accepted_B[0])))
    assert len(seen) == 1 + 2 + 3 + 4  # each number of drafts with each number that stand


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_numpy_and_torch_give_the_same_verdicts(rule: Callable[..., Verdict]) -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        batch = ragged_batch(rng)
        a, b = on("numpy", rule)(*batch), on("torch", rule)(*batch)
        assert np.array_equal(a.num_accepted_B, b.num_accepted_B)
        np.testing.assert_allclose(a.law_BV, b.law_BV, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_token_that_the_target_forbids_is_never_kept_even_at_uniform_zero(library: str) -> None:
    for kind in KINDS:
        for case in cases(kind, SMALL):
            drafts = drawn(case)
            p = case.rows(case.p, drafts.drafts_NK)
            mass = np.take_along_axis(p[:, :-1], drafts.drafts_NK[..., None], axis=2)[..., 0]
            for rule in (token_rule, block_rule):
                verdict = on(library, rule)(p, *drafts[3:], *drafts[1:3], np.zeros(mass.shape))
                for n, row, law in zip(verdict.num_accepted_B, mass, np.asarray(verdict.law_BV), strict=True):
                    assert (row[: int(n)] > 0).all()
                    assert law.sum() > 0


def test_a_residual_without_mass_gives_the_targets_law() -> None:
    p = np.asarray([[0.25, 0.75], [0.5, 0.5]])
    assert np.array_equal(residual(p, p), p)
    assert np.array_equal(residual(p, np.zeros_like(p)), p)
    assert np.array_equal(residual(p, np.asarray([[0.5, 0.5], [0.0, 1.0]])), [[0.0, 0.25], [0.5, 0.0]])


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_rules_leave_their_arguments_alone(rule: Callable[..., Verdict]) -> None:
    batch = ragged_batch(np.random.default_rng(9))
    before = [array.copy() for array in batch]
    rule(*batch)
    assert all(np.array_equal(a, b) for a, b in zip(batch, before, strict=True))


# ---- coupled mode


@pytest.mark.parametrize("library", LIBRARIES)
def test_coupled_output_is_the_race_of_the_target_whatever_was_drafted(library: str) -> None:
    """Every draft of every case, with keyed noise: the block is a prefix of what the target would write alone."""
    make = LIBRARIES[library]
    for kind in KINDS:
        for case in cases(kind, SMALL):
            size, depth = case.vocab_size, case.num_drafts
            for seed in range(5):
                like = make(np.zeros(1, dtype=np.float32))
                noise = np.stack(
                    [np.asarray(Stream(seed).exponentials(position, size, like)) for position in range(depth + 1)]
                )
                text: list[int] = []
                for d in range(depth + 1):
                    law = case.p[d][tuple(text)]
                    text.append(max(range(size), key=lambda x, law=law, d=d: (law[x] / noise[d, x], -x)))
                drafts = case.paths()
                rows = np.broadcast_to(noise, (len(drafts), depth + 1, size)).copy()
                choices = fastest(make(case.rows(case.p, drafts)), make(rows))
                for draft, own in zip(drafts.tolist(), choices.tolist(), strict=True):
                    for count in range(depth + 1):
                        path = walk(draft[:count], None, own)
                        emitted = [*draft[: len(path)], own[len(path)]]
                        assert emitted == text[: len(emitted)]
                        assert len(path) == count or draft[len(path)] != text[len(path)]


@pytest.mark.parametrize("p", [(0.3, 0.7), (0.05, 0.95), (0.2, 0.5, 0.3), (0.0, 0.6, 0.4)])
def test_the_race_has_the_law_of_the_target_by_integration(p: tuple[float, ...]) -> None:
    """A midpoint rule over the cube of uniforms: the border between winners is a surface, so the error is O(1/n)."""
    n = 1500 if len(p) == 2 else 130
    exponentials = -np.log((np.arange(n) + 0.5) / n)
    noise = np.stack(np.meshgrid(*[exponentials] * len(p), indexing="ij"), axis=-1).reshape(-1, len(p))
    won = np.bincount(fastest(np.broadcast_to(np.asarray(p), noise.shape), noise), minlength=len(p)) / len(noise)
    np.testing.assert_allclose(won, p, atol=1.5 / n)


def test_the_race_over_keyed_noise_has_the_law_of_the_target() -> None:
    """Chi-square over 10 000 keys; false-alarm rate 1e-6."""
    from scipy.stats import chi2

    p = np.asarray([0.02, 0.4, 0.0, 0.08, 0.3, 0.2])
    keys = [(seed, position) for seed in range(100) for position in range(100)]
    noise = np.stack([Stream(seed).exponentials(position, len(p), p) for seed, position in keys])
    seen = np.bincount(fastest(np.broadcast_to(p, noise.shape), noise), minlength=len(p))
    assert seen[2] == 0
    expected = len(keys) * p[p > 0]
    assert chi2.sf(((seen[p > 0] - expected) ** 2 / expected).sum(), len(expected) - 1) > 1e-6


# ---- draw


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draw_has_the_law_of_its_row_by_enumeration_of_its_breakpoints(library: str, dtype: type) -> None:
    """Rows that aren't normalised, with zeros at both ends and inside, and laws of one token."""
    make, rng = LIBRARIES[library], np.random.default_rng(11)
    for size in (1, 2, 3, 5, 11, 255, 256, 257, 600, 1031):
        for zeros in (0.0, 0.4, 0.4, 0.99) if size > 11 else [0.4] * 30:
            law = np.where(rng.random(size) < zeros, 0.0, rng.random(size)).astype(dtype)
            law[rng.integers(size)] = 1.0
            law = (law * rng.choice([1e-3, 1.0, 7.0])).astype(dtype)
            cdf = np.cumsum(law.astype(np.float64)) / law.astype(np.float64).sum()
            edges = np.unique(np.concatenate([[0.0], cdf, [1.0]]))
            middles, lengths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
            rows = make(np.broadcast_to(law, (len(middles), size)).copy())
            tokens = np.asarray(draw(rows, make(middles)))
            found = np.bincount(tokens, weights=lengths, minlength=size)
            np.testing.assert_allclose(found, law.astype(np.float64) / law.astype(np.float64).sum(), atol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, TOP])
def test_draw_never_returns_a_token_without_mass(library: str, u: float) -> None:
    make, tiny = LIBRARIES[library], 1e-45  # the smallest float32
    rows = [
        [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0.3, 0, 0], [0, 0.1, 0.2, 0], [tiny, 0, 0, 0], [0, tiny, 0, tiny],
        [0, 0, tiny, 0], [tiny, 0, 1, 0], [0, 1, tiny, 0], [0, 3e38, 3e38, 0], [0.1, 0.2, 0.7, 0], [0, 1 / 3, 1 / 3, 0],
    ]  # fmt: skip
    law = np.asarray(rows, dtype=np.float32)
    tokens = np.asarray(draw(make(law), make(np.full(len(law), u))))
    assert (law[np.arange(len(law)), tokens] > 0).all()
    rng = np.random.default_rng(13)
    wide = np.where(rng.random((50, 1000)) < 0.9, 0.0, rng.random((50, 1000)) ** 20).astype(np.float32)
    tokens = np.asarray(draw(make(wide), make(np.full(50, u))))
    assert (wide[np.arange(50), tokens] > 0).all()
    if u == 0.0:
        assert np.array_equal(tokens, (wide > 0).argmax(axis=1))
    lonely = np.zeros((6, 1031), dtype=np.float32)
    lonely[range(6), [0, 255, 256, 512, 1023, 1030]] = [1.0, tiny, 0.3, 3e38, 1.0, tiny]
    assert np.asarray(draw(make(lonely), make(np.full(6, u)))).tolist() == [0, 255, 256, 512, 1023, 1030]


def test_a_block_is_cut_by_what_is_known_before_a_draft_and_stays_exact() -> None:
    """Stop where q is flat: known before the draft is drawn. And after a kept draft of low mass: it stays in."""
    for kind in KINDS:
        for case in cases(kind, [*SMALL, (6, 2)]):
            drafts = drawn(case)
            mass = np.take_along_axis(drafts.q_NLV[:, :-1], drafts.drafts_NK[..., None], axis=2)[..., 0]
            flat = drafts.q_NLV[:, :-1].max(axis=-1) < 0.6
            low = mass < 0.3
            for stops, kept in ((flat, 0), (low, 1)):
                count = np.where(stops.any(axis=1), stops.argmax(axis=1) + kept, case.num_drafts)
                for rule in CHAIN_RULES.values():
                    prove(case, rule, cut(drafts, count))
