"""From logits to laws: the transforms of many sequences, each with settings of its own, on one array of rows.

    R  rows (positions of any sequences)     V  vocabulary
    logits_RV  raw logits of a network       p_RV  float32 laws, each row sums to 1

The same function makes the target's p and the drafter's q. Greedy is the one-hot limit. Nothing sorts the whole
vocabulary: top-p works on the largest values only, and takes more of them where they don't hold enough mass.

Ties: top-k and top-p keep every token that ties with the last one kept, so a law doesn't depend on an order among
equals (`transformers` does the same for top-k).
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import array_api_compat
import numpy as np

from forerun.errors import EngineError
from forerun.sampling import kernels
from forerun.sampling.arrays import Array, like, namespace, one_hot, top_values
from forerun.sampling.constraints import Constraint, Path, constraints_for
from forerun.sampling.streams import Stream
from forerun.types import SamplingParams

_TOP_P_PREFIXES = (64, 1024)  # how many of the largest values top-p looks at, before it goes over the row
_BIN_SHIFT = 18  # of float32 bits: sign, exponent and five bits of the fraction are left
_HOST = np.empty(0)


class Sampler:
    """The sampling settings of one sequence, with the state that they need. Shared by the target and its drafter."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int], *, seed: int, request: int = 0
    ) -> None:
        self.params = params
        self.stream = Stream(seed, request)
        self.constraints: list[Constraint] = constraints_for(params, prompt, end_ids)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    def within(self, position: int) -> "Sampler":
        """Return the same settings and state with the draws of `Stream.within`."""
        inner = copy(self)
        inner.stream = self.stream.within(position)
        return inner

    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens into account."""
        for constraint in self.constraints:
            constraint.advance(tokens)


class Row(NamedTuple):
    """Whose row of logits it is, and which drafted tokens lead to it."""

    sampler: Sampler
    path: Path = ()


def laws(logits_RV: Array, rows: Sequence[Row]) -> Array:
    """Return the law of each row after every transform of its sequence: (R, V) float32.

    Raises EngineError if a row has no token left.
    """
    xp = namespace(logits_RV)
    params = [row.sampler.params for row in rows]
    x_RV, highest_R = ready(logits_RV, rows)
    greedy = [p.temperature == 0.0 for p in params]
    if all(greedy):
        return one_hot(xp.argmax(x_RV, axis=-1), x_RV.shape[-1], x_RV)
    p_RV = (kernels.laws if kernels.usable(x_RV) else _sampled)(x_RV, highest_R, params)
    if any(greedy):
        greedy_R1 = like(greedy, x_RV)[:, None]
        p_RV = xp.where(greedy_R1, one_hot(xp.argmax(x_RV, axis=-1), x_RV.shape[-1], x_RV), p_RV)
    return p_RV


def greedy_choices(logits_RV: Array, rows: Sequence[Row]) -> Array:
    """Return the one token that the law of each row has where all sequences are greedy: (R,). Ties: lowest id.

    Raises EngineError if a row has no token left.
    """
    xp, x_RV = namespace(logits_RV), _shifted(logits_RV, rows)
    tokens_R = xp.argmax(x_RV, axis=-1)
    _check(xp.take_along_axis(x_RV, tokens_R[:, None], axis=1))
    return tokens_R


def ready(logits_RV: Array, rows: Sequence[Row]) -> tuple[Array, Array]:
    """Return the rows in float32 with all constraints applied (R, V), and the largest value of each (R,).

    Raises EngineError if a row has no token left.
    """
    x_RV = _shifted(logits_RV, rows)
    highest_R = namespace(x_RV).max(x_RV, axis=-1)
    _check(highest_R)
    return x_RV, highest_R


def _shifted(logits_RV: Array, rows: Sequence[Row]) -> Array:
    """Return the rows in float32 with all constraints applied."""
    is_free = not any(row.sampler.constraints for row in rows)
    if is_free and kernels.usable(logits_RV):  # the usual case: already what it should be
        return logits_RV
    xp = namespace(logits_RV)
    return _constrained(xp.astype(logits_RV, xp.float32, copy=not is_free), rows)


def _check(highest: Array) -> None:
    xp = namespace(highest)
    if not bool(xp.all(xp.isfinite(highest))):
        raise EngineError(
            "a row of logits has no finite largest value: every token is forbidden, or the model gave NaN"
        )


def log_softmax(logits_RV: Array) -> Array:
    """Return the log-probabilities of raw logits: (R, V) float32."""
    xp = namespace(logits_RV)
    x_RV = xp.astype(logits_RV, xp.float32)
    x_RV = x_RV - xp.max(x_RV, axis=-1, keepdims=True)
    return x_RV - xp.log(xp.sum(xp.exp(x_RV), axis=-1, keepdims=True))


def _constrained(x_RV: Array, rows: Sequence[Row]) -> Array:
    """Apply each sequence's constraints to its neighbouring rows."""
    start = 0
    while start < len(rows):
        sampler, end = rows[start].sampler, start + 1
        while end < len(rows) and rows[end].sampler is sampler:
            end += 1
        if sampler.constraints:
            part_RV = x_RV[start:end]
            for constraint in sampler.constraints:
                part_RV = constraint.shift(part_RV, [row.path for row in rows[start:end]])
            x_RV[start:end] = part_RV
        start = end
    return x_RV


def _sampled(x_RV: Array, highest_R: Array, params: Sequence[SamplingParams]) -> Array:
    """Temperature, top-k, top-p, min-p, in this order."""
    xp, vocab_size = namespace(x_RV), x_RV.shape[-1]
    x_RV = x_RV - highest_R[:, None]
    if any(p.temperature not in (0.0, 1.0) for p in params):
        x_RV = x_RV / like([[kernels.divisor(p.temperature) or 1.0] for p in params], x_RV, xp.float32)
    w_RV = xp.exp(x_RV)  # not normalised; the largest of each row is 1
    if any(p.top_k for p in params):
        w_RV = _keep(w_RV, _top_k_threshold(w_RV, [min(p.top_k, vocab_size) for p in params]))
    if any(p.top_p < 1.0 for p in params):
        w_RV = _keep(w_RV, _top_p_threshold(w_RV, [p.top_p for p in params]))
    if any(p.min_p for p in params):
        w_RV = _keep(w_RV, like([p.min_p for p in params], w_RV, xp.float32))
    return w_RV / xp.sum(w_RV, axis=-1, keepdims=True)


def _keep(w_RV: Array, threshold_R: Array) -> Array:
    return w_RV * (w_RV >= threshold_R[:, None])  # several times faster than `where`; all are finite


def _top_k_threshold(w_RV: Array, ks: Sequence[int]) -> Array:
    """Return the k-th largest value of each row, 0 where top-k is off: (R,)."""
    xp = namespace(w_RV)
    top_RM = top_values(w_RV, max(ks))
    last_R = top_RM[xp.arange(len(ks), device=array_api_compat.device(w_RV)), like([max(k - 1, 0) for k in ks], w_RV)]
    return xp.where(like([k > 0 for k in ks], w_RV), last_R, 0.0)


def _top_p_threshold(w_RV: Array, top_ps: Sequence[float]) -> Array:
    """Return the smallest value that top-p keeps in each row, 0 where it is off: (R,).

    A token is kept if the mass of those above it is less than top_p, so the first is always kept.
    """
    xp, vocab_size = namespace(w_RV), w_RV.shape[-1]
    top_p_R = like(top_ps, w_RV, xp.float64)
    needed_R = top_p_R * xp.sum(w_RV, axis=-1, dtype=xp.float64)
    for size in _TOP_P_PREFIXES:
        size = min(size, vocab_size)
        top_RM = top_values(w_RV, size)
        mass_RM = xp.cumulative_sum(xp.astype(top_RM, xp.float64), axis=-1)
        if size == vocab_size or bool(xp.all((mass_RM[:, -1] >= needed_R) | (top_p_R >= 1.0))):
            num_above_R = xp.sum(xp.astype(mass_RM < needed_R[:, None], xp.int64), axis=-1)
            places_R = xp.clip(num_above_R, 0, size - 1)
            last_R = top_RM[xp.arange(len(top_ps), device=array_api_compat.device(w_RV)), places_R]
            return xp.where(top_p_R < 1.0, last_R, 0.0)
    rows = zip(like(w_RV, _HOST), needed_R.tolist(), top_ps, strict=True)
    return like([_last_kept(w_V, needed) if top_p < 1.0 else 0.0 for w_V, needed, top_p in rows], w_RV, xp.float32)


def _last_kept(w_V: np.ndarray, needed: float) -> float:
    """Return the smallest value that top-p keeps in a wide row: the largest ones whose sum first reaches `needed`.

    Positive floats are ordered like their bits, so the leading bits cut them into bins; only one bin has to be sorted.
    """
    bins_V = w_V.view(np.uint32) >> _BIN_SHIFT
    mass_above = np.cumsum(np.bincount(bins_V, weights=w_V)[::-1])
    place = min(int(np.searchsorted(mass_above, needed)), len(mass_above) - 1)
    inside = -np.sort(-w_V[bins_V == len(mass_above) - 1 - place])
    if not len(inside):  # rounding: the row's own sum falls short of `needed`
        return 0.0
    before = mass_above[place - 1] if place else 0.0
    mass = before + np.cumsum(inside, dtype=np.float64)
    return float(inside[min(int(np.searchsorted(mass, needed)), len(inside) - 1)])
