"""Verification in trees: which path of drafts stands, and the law of one more token. Pure functions.

    drafts  0 … N - 1, in topological order; `parents[i]` is the earlier draft that draft i follows, -1 the text
    rows    p_RV has R = N + 1 of them: row 0 is the target's law after the text, row i + 1 that after draft i
    offers  (draft, row of q or None): the candidates at each node in the order in which they were made. None is a
            point mass. Several from one row of q at one node were drawn without replacement: each from that row
            without what came before it
    accept  accept(i, chance) says whether draw i comes out, with that chance. Its draws are independent

Exactness belongs to the pair of how the candidates were made and how they are judged; the order of the candidates, and
which there are, was settled before the target's draw. Proofs by enumeration: tests/sampling/test_tree.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forerun.sampling.arrays import namespace

Array = Any
Accept = Callable[[int, float], bool]
Offers = Sequence[tuple[int, int | None]]


class TreeVerdict(NamedTuple):
    """What a rule says of one tree."""

    path: list[int]  # the drafts that stand, each following the one before
    law_V: Array  # the law of the token after them, not normalised


def walk(tokens: Sequence[int], parents: Sequence[int] | None, choices: Sequence[int]) -> list[int]:
    """Follow the target's own choices through the drafts: return the drafts that stand.

    `choices[r]` is the token that the target takes at row r. Exact whatever the drafts are, as long as they don't
    depend on these choices: the token after the path is `choices` at its end.
    """
    if parents is None:
        count = 0
        while count < len(tokens) and tokens[count] == choices[count]:
            count += 1
        return list(range(count))
    path: list[int] = []
    at = -1
    for draft, parent in enumerate(parents):  # topological: what follows comes later
        if parent == at and tokens[draft] == choices[at + 1]:
            path.append(draft)
            at = draft
    return path


def list_rule(
    p_RV: Array, tokens: Sequence[int], parents: Sequence[int], offers: Offers, q_MV: Array, accept: Accept
) -> TreeVerdict:
    """Judge the candidates of each node in their order, from the text downwards.

    Accept with chance min(1, p(x)/q(x)), else p becomes norm(max(p - q, 0)). Rejection sampling without replacement
    (Sequoia 2402.12374, RSD 2402.14160), for several candidates drawn from one law, and the walk over point masses are
    cases of it; two candidates may be the same draft. Draw i is that of offer i.
    """
    at, path, p_V = -1, list[int](), p_RV[0]
    by_node = _by_node(parents, offers)
    while True:
        for index, law_V in _laws(by_node.get(at, ()), tokens, offers, q_MV, p_V):
            draft = offers[index][0]
            if accept(index, _ratio(p_V, law_V, tokens[draft], 1.0)):
                path.append(draft)
                at, p_V = draft, p_RV[draft + 1]
                break
            p_V, _mass = _surplus(p_V, law_V, 1.0)
        else:
            return TreeVerdict(path, p_V)


def traversal_rule(
    p_RV: Array, tokens: Sequence[int], parents: Sequence[int], offers: Offers, q_MV: Array, accept: Accept
) -> TreeVerdict:
    """Judge whole paths, leaves first: block verification for trees (Weng et al. 2505.12398).

    A node is offered a mass, the capped product of the ratios on its path; what its children don't take stays with it,
    and it stands with the chance that is left. Draw i + 1 is that of draft i, draw 0 of the text. No draft may be
    offered twice.
    """
    by_node = _by_node(parents, offers)

    def visit(node: int, offered: float) -> TreeVerdict | None:
        mass, p_V = offered, p_RV[node + 1]
        for index, law_V in _laws(by_node.get(node, ()), tokens, offers, q_MV, p_V):
            draft = offers[index][0]
            found = visit(draft, _ratio(p_V, law_V, tokens[draft], mass))
            if found is not None:
                return TreeVerdict([draft, *found.path], found.law_V)
            p_V, left = _surplus(p_V, law_V, mass)
            mass = left / (left + 1.0 - mass) if left + 1.0 - mass > 0 else 1.0
        return TreeVerdict([], p_V) if node < 0 or accept(node + 1, mass) else None

    verdict = visit(-1, 1.0)
    assert verdict is not None
    return verdict


def _by_node(parents: Sequence[int], offers: Offers) -> dict[int, list[int]]:
    """Return the offers at each node, in order."""
    found: dict[int, list[int]] = {}
    for index, (draft, _law) in enumerate(offers):
        found.setdefault(parents[draft], []).append(index)
    return found


def _laws(indices: Sequence[int], tokens: Sequence[int], offers: Offers, q_MV: Array, like_V: Array) -> Any:
    """Yield each offer with the law that its token was made by, given the earlier ones of its node."""
    left: dict[int, Array] = {}
    for index in indices:
        draft, row = offers[index]
        if row is None:
            law_V = namespace(like_V).zeros_like(like_V)
            law_V[tokens[draft]] = 1.0
            yield index, law_V
            continue
        law_V = left.get(row, q_MV[row])
        yield index, law_V
        left[row] = without(law_V, tokens[draft])


def without(law_V: Array, token: int) -> Array:
    """Return a law without one token, normalised: what the next draw without replacement is made from."""
    xp = namespace(law_V)
    rest_V = xp.asarray(law_V, copy=True)
    rest_V[token] = 0.0
    mass = float(xp.sum(rest_V, dtype=xp.float64))
    return rest_V / mass if mass > 0 else rest_V


def _ratio(p_V: Array, q_V: Array, token: int, mass: float) -> float:
    p, q = float(p_V[token]), float(q_V[token])
    return min(1.0, mass * p / q) if q > 0 else 0.0


def _surplus(p_V: Array, q_V: Array, mass: float) -> tuple[Array, float]:
    """Return norm(max(mass·p - q, 0)) and what was left; p itself where rounding leaves nothing."""
    xp = namespace(p_V)
    left_V = xp.clip((p_V if mass == 1.0 else mass * p_V) - q_V, 0.0, None)
    left = float(xp.sum(left_V, dtype=xp.float64))
    return (left_V / left, left) if left > 0 else (p_V, left)
