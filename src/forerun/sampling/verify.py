"""The theorem: how many drafts stand, and the law of one more token. Pure functions, nothing else.

    B  sequences                p_BLV  the target's laws; row i is the law after i drafts
    K  drafts, L = K + 1 rows   q_BLV  the drafter's laws; row i is the law that draft i was drawn from
    V  vocabulary               drafts_BK, num_drafts_B: the drafts and how many of them are real
                                u_BK   uniforms in [0, 1) for acceptance

Laws are *after* every sampling transform. Rows of q from num_drafts on are zero: with that, "bonus after full
acceptance" and "resample after a rejection" are one formula, the residual max(p - q, 0), since its value at q = 0 is
p itself. Rows of p past num_drafts are never chosen and may hold anything.

Each rule is exact for one way in which the drafts were drawn, which is why a `Proposal` names its own rule (see
`forerun.drafters.base`). Proofs by enumeration: tests/sampling/.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from array_api_compat import device

from forerun.sampling import kernels
from forerun.sampling.arrays import namespace
from forerun.sampling.streams import Role, Stream

Array = Any

_PART = 256  # tokens


class Verdict(NamedTuple):
    """What a rule says of one round."""

    num_accepted_B: Array  # the first so many drafts stand
    law_BV: Array  # the law of the token after them, not normalised; draw it by `draw`


def token_rule(p_BLV: Array, q_BLV: Array, drafts_BK: Array, num_drafts_B: Array, u_BK: Array) -> Verdict:
    """Token verification (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318): drafts drawn from q.

    Draft i stands if all before it stand and u < p(x)/q(x). At the first failure the law is norm(max(p - q, 0)).
    """
    p_BK, q_BK = _at(p_BLV, drafts_BK), _at(q_BLV, drafts_BK)
    stands_BK = (u_BK * q_BK < p_BK) & (q_BK > 0) & _real(drafts_BK, num_drafts_B)
    n_B = _first_failure(stands_BK)
    return Verdict(n_B, residual(_row(p_BLV, n_B), _row(q_BLV, n_B)))


def block_rule(p_BLV: Array, q_BLV: Array, drafts_BK: Array, num_drafts_B: Array, u_BK: Array) -> Verdict:
    """Block verification (Sun et al. 2403.10444, algorithm 2): drafts drawn from q, judged as a block.

    The longest prefix i with u_i < h_i stands, also where an earlier one failed. With P_i the capped product of the
    ratios and A_i the mass of max(P_i p - q, 0) at the row after draft i, h_i = A_i / (A_i + 1 - P_i). On average it
    accepts at least as many drafts as any other rule for one chain.
    """
    xp = namespace(p_BLV)
    num_rows = p_BLV.shape[1]
    p_BK = xp.astype(_at(p_BLV, drafts_BK), xp.float64)
    q_BK = xp.astype(_at(q_BLV, drafts_BK), xp.float64)
    real_BK = _real(drafts_BK, num_drafts_B)
    usable_BK = real_BK & (q_BK > 0)
    ratio_BK = xp.where(usable_BK, p_BK / xp.where(usable_BK, q_BK, 1.0), 0.0)
    prefix_BL = [xp.ones(p_BLV.shape[:1], dtype=xp.float64, device=device(p_BLV))]
    for i in range(num_rows - 1):
        prefix_BL.append(xp.clip(prefix_BL[-1] * ratio_BK[:, i], 0.0, 1.0))
    P_BL = xp.stack(prefix_BL, axis=1)
    A_BL = (kernels.surplus if kernels.usable(p_BLV, q_BLV) else surplus)(p_BLV, q_BLV, P_BL)
    denominator_BL = A_BL + 1.0 - P_BL
    last_BL = xp.arange(num_rows, device=device(P_BL))[None, :] == num_drafts_B[:, None]
    h_BL = xp.where(denominator_BL > 0, A_BL / xp.where(denominator_BL > 0, denominator_BL, 1.0), 1.0)
    h_BL = xp.where(last_BL, P_BL, h_BL)  # there q is zero and A = P·Σp, equal to P but for rounding
    stands_BK = (u_BK < h_BL[:, 1:]) & (P_BL[:, 1:] > 0) & real_BK
    lengths_K = xp.arange(1, num_rows, device=device(P_BL))
    n_B = xp.max(xp.concat([xp.zeros_like(num_drafts_B)[:, None], stands_BK * lengths_K[None, :]], axis=1), axis=1)
    P_B = xp.astype(_row(P_BL, n_B), p_BLV.dtype)
    return Verdict(n_B, residual(_row(p_BLV, n_B), _row(q_BLV, n_B), P_B))


def fastest(p: Array, noise: Array) -> Array:
    """Return argmax over the last axis of p / E, lowest id first: (…,). Tokens with p = 0 never win."""
    return namespace(p).argmax(p / noise, axis=-1)


def race(p_RV: Array, draws: Sequence[tuple[Stream, int]]) -> Array:
    """Return the fastest token of each row, E keyed by a stream and a position: (R,)."""
    if kernels.usable(p_RV):
        return kernels.race(p_RV, [stream.key(position, Role.COUPLED) for stream, position in draws])
    noise = [stream.exponentials(position, p_RV.shape[-1], p_RV) for stream, position in draws]
    return fastest(p_RV, namespace(p_RV).stack(noise))


def surplus(p_BLV: Array, q_BLV: Array, scale_BL: Array) -> Array:
    """Return the mass of max(scale·p - q, 0) in each row: (B, L) float64."""
    xp = namespace(p_BLV)
    left_BLV = xp.clip(xp.astype(scale_BL, p_BLV.dtype)[..., None] * p_BLV - q_BLV, 0.0, None)
    return xp.sum(left_BLV, axis=-1, dtype=xp.float64)


def residual(p_BV: Array, q_BV: Array, scale_B: Array | None = None) -> Array:
    """Return max(scale·p - q, 0), not normalised; where rounding leaves no mass, p itself: (B, V)."""
    xp = namespace(p_BV)
    left_BV = xp.clip((p_BV if scale_B is None else scale_B[:, None] * p_BV) - q_BV, 0.0, None)
    return xp.where(xp.sum(left_BV, axis=-1, keepdims=True) > 0, left_BV, p_BV)


def draw(law_BV: Array, u_B: Array) -> Array:
    """Draw one token from each row by inverse CDF: (B,). A token without mass is never drawn.

    The rows need not be normalised. Sums are float64; u in [0, 1) float64. Two levels: first a part of the
    vocabulary, by the sums of all parts, then a token in it.
    """
    if kernels.usable(law_BV):
        return kernels.draw(law_BV, u_B)
    xp, num_rows, vocab_size = namespace(law_BV), law_BV.shape[0], law_BV.shape[1]
    num_parts = -(-vocab_size // _PART)
    if vocab_size % _PART:
        padding = xp.zeros((num_rows, num_parts * _PART - vocab_size), dtype=law_BV.dtype, device=device(law_BV))
        law_BV = xp.concat([law_BV, padding], axis=1)
    law_BPX = law_BV.reshape(num_rows, num_parts, _PART)
    cdf_BP = xp.cumulative_sum(xp.sum(law_BPX, axis=-1, dtype=xp.float64), axis=-1)
    threshold_B = u_B * cdf_BP[:, -1]
    part_B = _first_above(cdf_BP, threshold_B)
    before_B = xp.where(part_B > 0, _row(cdf_BP, xp.clip(part_B - 1, 0, None)), 0.0)
    cdf_BX = xp.cumulative_sum(xp.astype(_row(law_BPX, part_B), xp.float64), axis=-1)
    return part_B * _PART + _first_above(cdf_BX, threshold_B - before_B)


def _first_above(cdf: Array, threshold_B: Array) -> Array:
    """Return the first place of each row where the sum exceeds the threshold, or, where rounding leaves none, the last
    place that has mass: (B,).
    """
    xp = namespace(cdf)
    below_B = xp.sum(xp.astype(cdf <= threshold_B[:, None], xp.int64), axis=-1)
    full_B = xp.sum(xp.astype(cdf < cdf[:, -1:], xp.int64), axis=-1)
    return xp.where(below_B < full_B, below_B, full_B)


def _at(rows_BLV: Array, drafts_BK: Array) -> Array:
    """Return the mass of each draft in its own row: (B, K)."""
    xp = namespace(rows_BLV)
    return xp.take_along_axis(rows_BLV[:, : drafts_BK.shape[1]], drafts_BK[..., None], axis=-1)[..., 0]


def _row(rows: Array, n_B: Array) -> Array:
    """Return row n of each sequence, a copy: (B, …)."""
    xp = namespace(rows)
    return rows[xp.arange(n_B.shape[0], device=device(rows)), n_B]


def _real(drafts_BK: Array, num_drafts_B: Array) -> Array:
    xp = namespace(drafts_BK)
    return xp.arange(drafts_BK.shape[1], device=device(drafts_BK))[None, :] < num_drafts_B[:, None]


def _first_failure(stands_BK: Array) -> Array:
    """Return how many leading entries are true: (B,)."""
    xp = namespace(stands_BK)
    fails_BK = xp.astype(~stands_BK, xp.int64)
    end_B1 = xp.ones((stands_BK.shape[0], 1), dtype=xp.int64, device=device(stands_BK))
    return xp.argmax(xp.concat([fails_BK, end_B1], axis=1), axis=1)
