"""Exact laws of what a round emits, by enumeration of all drafts and all outcomes of the uniforms.

A rule reads its uniforms through comparisons only, so the unit cube falls into finitely many cells in which its
verdict is constant. The cells are found by bisection of the rule itself, to 1e-13: nothing here knows a formula
of any rule. Each cell is entered once, at its middle, and weighs as much as it is large; `check_cells` looks at more
points of each.

    N  drafts that are enumerated      K  their length, L = K + 1 rows      V  vocabulary

A round emits a block of 1 to L tokens. Continued by the target's own law to L tokens it must have the target's joint
law: then the law of whole sequences is right, round after round, not only that of the first token.
"""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from forerun.sampling.verify import Verdict

Array = Any
Rule = Callable[[Array, Array, Array, Array, Array], Verdict]  # p, q, drafts, num_drafts, u
TOP = 1.0 - 2.0**-53  # the largest uniform
TOLERANCE = 1e-9


class Case(NamedTuple):
    """Laws over prefixes: `p[d]` and `q[d]` have one axis for each of d tokens before, then V."""

    name: str
    p: list[np.ndarray]  # K + 1 of them
    q: list[np.ndarray]  # K of them

    @property
    def vocab_size(self) -> int:
        return self.p[0].shape[0]

    @property
    def num_drafts(self) -> int:
        return len(self.q)

    def joint(self) -> np.ndarray:
        """The target's law of L tokens: (V, …, V)."""
        joint = self.p[0]
        for law in self.p[1:]:
            joint = joint[..., None] * law
        return joint

    def paths(self) -> np.ndarray:
        """All drafts: (N, K)."""
        found = list(itertools.product(range(self.vocab_size), repeat=self.num_drafts))
        return np.asarray(found, dtype=np.int64).reshape(len(found), self.num_drafts)

    def rows(self, tables: list[np.ndarray], drafts_NK: np.ndarray) -> np.ndarray:
        """The laws that each draft meets: (N, number of tables, V)."""
        found = [
            np.broadcast_to(table[tuple(drafts_NK[:, :depth].T)], (len(drafts_NK), self.vocab_size))
            for depth, table in enumerate(tables)
        ]
        return np.stack(found, axis=1)


class Drafting(NamedTuple):
    """A way to make drafts, enumerated: how likely each is, and what a rule is told of it."""

    weight_N: np.ndarray
    drafts_NK: np.ndarray
    num_drafts_N: np.ndarray
    q_NLV: np.ndarray  # zero from num_drafts on


class Blocks(NamedTuple):
    """What a round emits, for each draft that is enumerated."""

    joint: np.ndarray  # (N, V, …, V): law of L tokens, the block continued by the target
    tokens_N: np.ndarray  # mean length of the block


def drawn(case: Case) -> Drafting:
    """Each draft is drawn from q; all K of them are judged."""
    drafts = case.paths()
    q = case.rows([*case.q, np.zeros((case.vocab_size,) * (case.num_drafts + 1))], drafts)
    weight = np.prod(np.take_along_axis(q[:, :-1], drafts[..., None], axis=2)[..., 0], axis=1)
    return Drafting(weight, drafts, np.full(len(drafts), case.num_drafts), q)


def cut(drafting: Drafting, num_drafts_N: np.ndarray) -> Drafting:
    """The same drafts, of which only the first few are judged."""
    beyond_NL = np.arange(drafting.q_NLV.shape[1])[None] >= num_drafts_N[:, None]
    return drafting._replace(num_drafts_N=num_drafts_N, q_NLV=np.where(beyond_NL[..., None], 0.0, drafting.q_NLV))


def blocks(case: Case, rule: Rule, drafting: Drafting) -> Blocks:
    """Enumerate what `rule` lets a round emit."""
    size, length = case.vocab_size, case.num_drafts + 1
    p = case.rows(case.p, drafting.drafts_NK)
    owner, u, volume = cells(rule, p, drafting)
    verdict = _call(rule, p, drafting, owner, u)
    law = verdict.law_BV / verdict.law_BV.sum(axis=-1, keepdims=True)
    n, drafts = verdict.num_accepted_B, drafting.drafts_NK[owner]
    joint = np.zeros((len(drafting.drafts_NK),) + (size,) * length)
    for accepted in range(length):
        mine = n == accepted
        block = np.zeros((len(drafting.drafts_NK),) + (size,) * (accepted + 1))
        np.add.at(block, (owner[mine], *drafts[mine, :accepted].T), volume[mine, None] * law[mine])
        for table in case.p[accepted + 1 :]:
            block = block[..., None] * table
        joint += block
    return Blocks(joint, np.bincount(owner, volume * (n + 1), minlength=len(drafting.drafts_NK)))


def cells(rule: Rule, p_NLV: np.ndarray, drafting: Drafting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cells of all drafts: whose each is, its middle (C, K) and its volume (C,)."""
    edges_NKE = _edges(rule, p_NLV, drafting)
    num, depth = drafting.drafts_NK.shape
    owner, middle, volume = np.arange(num), np.empty((num, 0)), np.ones(num)
    for k in range(depth):
        low, high = edges_NKE[owner, k, :-1], edges_NKE[owner, k, 1:]
        entry, cell = np.nonzero(high - low > 1e-15)
        middle = np.concatenate([middle[entry], ((low + high) / 2)[entry, cell][:, None]], axis=1)
        volume = volume[entry] * (high - low)[entry, cell]
        owner = owner[entry]
    return owner, middle, volume


def check_cells(rule: Rule, case: Case, drafting: Drafting, rng: np.random.Generator) -> None:
    """A random point of each cell has the verdict of its middle."""
    p = case.rows(case.p, drafting.drafts_NK)
    edges = _edges(rule, p, drafting)
    owner = np.repeat(np.arange(len(p)), 32)
    u = rng.random((len(owner), case.num_drafts))
    index = (edges[owner] <= u[..., None]).sum(axis=-1, keepdims=True) - 1
    low = np.take_along_axis(edges[owner], index, axis=-1)[..., 0]
    high = np.take_along_axis(edges[owner], index + 1, axis=-1)[..., 0]
    at_random, at_middle = (_call(rule, p, drafting, owner, point) for point in (u, (low + high) / 2))
    assert np.array_equal(at_random.num_accepted_B, at_middle.num_accepted_B)
    assert np.array_equal(at_random.law_BV, at_middle.law_BV)


def _edges(rule: Rule, p_NLV: np.ndarray, drafting: Drafting) -> np.ndarray:
    """Return where the verdict changes along each uniform, whatever the others are: (N, K, edges), from 0 to 1."""
    num, depth = drafting.drafts_NK.shape
    corners = np.asarray(list(itertools.product([0.0, TOP], repeat=depth)))  # the K - 1 others at an end of theirs
    corners_KCK = np.stack([corners[corners[:, k] == 0.0] for k in range(depth)]) if depth else np.empty((0, 0, 0))
    owner = np.repeat(np.arange(num), depth * corners_KCK.shape[1])
    axis = np.tile(np.repeat(np.arange(depth), corners_KCK.shape[1]), num)
    points = np.tile(corners_KCK.reshape(-1, depth), (num, 1))

    def verdict_at(values: np.ndarray, chosen: np.ndarray) -> Verdict:
        u = points[chosen].copy()
        u[np.arange(len(u)), axis[chosen]] = values
        return _call(rule, p_NLV, drafting, owner[chosen], u)

    def differ(a: Verdict, b: Verdict) -> np.ndarray:
        return (a.num_accepted_B != b.num_accepted_B) | (a.law_BV != b.law_BV).any(axis=-1)

    everywhere = np.arange(len(owner))
    at_low = verdict_at(np.zeros(len(owner)), everywhere)
    changing = np.nonzero(differ(at_low, verdict_at(np.full(len(owner), TOP), everywhere)))[0]
    at_low = Verdict(at_low.num_accepted_B[changing], at_low.law_BV[changing])
    low, high = np.zeros(len(changing)), np.ones(len(changing))
    for _ in range(44):
        middle = (low + high) / 2
        above = differ(at_low, verdict_at(middle, changing))
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    found = np.ones(len(owner))
    found[changing] = high
    found = np.sort(found.reshape(num, depth, -1), axis=-1)
    return np.concatenate([np.zeros((num, depth, 1)), found, np.ones((num, depth, 1))], axis=-1)


def round_edges(rule: Rule, p: np.ndarray, q: np.ndarray, drafts: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """Return where the verdict on these drafts changes along each uniform: (N, K, edges)."""
    return _edges(rule, p, Drafting(np.ones(len(drafts)), drafts, num_drafts, q))


def _call(rule: Rule, p_NLV: np.ndarray, drafting: Drafting, owner: np.ndarray, u: np.ndarray) -> Verdict:
    verdict = rule(p_NLV[owner], drafting.q_NLV[owner], drafting.drafts_NK[owner], drafting.num_drafts_N[owner], u)
    return Verdict(np.asarray(verdict.num_accepted_B), np.asarray(verdict.law_BV).astype(np.float64))


def sequence_law(case: Case, rule: Rule, drafting: Drafting) -> tuple[np.ndarray, float]:
    """Return the law of L tokens, and the mean number of tokens in a round."""
    emitted = blocks(case, rule, drafting)
    return np.tensordot(drafting.weight_N, emitted.joint, axes=1), float(drafting.weight_N @ emitted.tokens_N)


def distance(case: Case, rule: Rule, drafting: Drafting) -> float:
    """Return the total-variation distance between what is emitted and what the target would write."""
    return float(abs(sequence_law(case, rule, drafting)[0] - case.joint()).sum() / 2)


def prove(case: Case, rule: Rule, drafting: Drafting, *, tolerance: float = TOLERANCE) -> float:
    """Assert that the target's law of L tokens comes out, and return the mean number of tokens in a round."""
    law, tokens = sequence_law(case, rule, drafting)
    np.testing.assert_allclose(law, case.joint(), rtol=0, atol=tolerance, err_msg=case.name)
    return tokens


def prove_each(case: Case, rule: Rule, drafting: Drafting, *, tolerance: float = TOLERANCE) -> None:
    """Assert the same for every single draft: right for drafts that were chosen without chance, whatever they are."""
    law = blocks(case, rule, drafting).joint
    np.testing.assert_allclose(law, np.broadcast_to(case.joint(), law.shape), rtol=0, atol=tolerance, err_msg=case.name)


SHAPES = [(size, depth) for size in (3, 4, 5, 6) for depth in (1, 2, 3)]
KINDS = ("dense", "sparse", "equal", "near", "p one-hot", "q one-hot", "disjoint", "q full", "p full", "mixed")


def cases(kind: str, shapes: list[tuple[int, int]] = SHAPES) -> list[Case]:
    """Random laws of a kind, the same in each run, for each vocabulary size and number of drafts."""
    return [_case(kind, size, depth) for size, depth in shapes]


@cache
def _case(kind: str, size: int, depth: int) -> Case:
    rng = np.random.default_rng([KINDS.index(kind), size, depth])
    p, q = [], []
    for d in range(depth + 1):
        num = size**d
        pairs = [_pair(str(rng.choice(KINDS[:-1])) if kind == "mixed" else kind, size, rng) for _ in range(num)]
        p.append(np.stack([pair[0] for pair in pairs]).reshape((size,) * (d + 1)))
        q.append(np.stack([pair[1] for pair in pairs]).reshape((size,) * (d + 1)))
    return Case(f"{kind}, V = {size}, K = {depth}", p, q[:-1])


def _pair(kind: str, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One law p and one law q."""

    def dense() -> np.ndarray:
        return rng.dirichlet(np.full(size, 0.8))

    def sparse() -> np.ndarray:
        law = np.where(rng.permutation(size) < rng.integers(1, size), rng.random(size) + 0.05, 0.0)
        return law / law.sum()

    def one_hot() -> np.ndarray:
        return np.eye(size)[rng.integers(size)]

    p, q = dense(), dense()
    if kind == "sparse":
        p, q = sparse(), sparse()
    elif kind == "equal":
        p = q = sparse()
    elif kind == "near":
        q = p * (1 + 1e-7 * rng.normal(size=size))
        q /= q.sum()
    elif kind == "p one-hot":
        p = one_hot()
    elif kind == "q one-hot":
        q = one_hot()
    elif kind == "disjoint":
        of_p = rng.permutation(size) < rng.integers(1, size)
        p, q = np.where(of_p, p, 0.0) / p[of_p].sum(), np.where(of_p, 0.0, q) / q[~of_p].sum()
    elif kind == "q full":
        p = sparse()
    elif kind == "p full":
        q = sparse()
    return p, q
