"""The target's own choice at each row: what it would write there, whatever was drafted.

    R  rows      V  vocabulary

Drafts that were picked without chance are judged by following these choices, and so is everything in coupled mode. A
row without a law (every token forbidden, a processor that fails) doesn't trouble the others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.sampling import verify
from forerun.sampling.arrays import Array, like, namespace
from forerun.sampling.laws import Row, greedy_choices, laws


class Choices(NamedTuple):
    """One token for each row."""

    tokens_R: Array  # -1 where a row has no law
    masses_R: Array  # of the token, under the row's law after all transforms
    errors: dict[int, EngineError]  # by row, why it has none


def choose(logits_RV: Array, rows: Sequence[Row], uniforms_R: Sequence[float]) -> Choices:
    """Draw a token from the law of each row by inverse CDF; uniforms in [0, 1)."""

    def pick(p_RV: Array, which: Sequence[int]) -> Array:
        return verify.draw(p_RV, like([uniforms_R[r] for r in which], p_RV, namespace(p_RV).float64))

    return _picked(logits_RV, rows, pick)


def race(logits_RV: Array, rows: Sequence[Row], positions: Sequence[int]) -> Choices:
    """Coupled mode (Daliri, Musco, Suresh 2408.07978): argmax p/E, E keyed by the position of the token in the text."""

    def pick(p_RV: Array, which: Sequence[int]) -> Array:
        noise = [rows[r].sampler.stream.exponentials(positions[r], p_RV.shape[-1], p_RV) for r in which]
        return verify.race(p_RV, namespace(p_RV).stack(noise))

    return _picked(logits_RV, rows, pick)


def _picked(logits_RV: Array, rows: Sequence[Row], pick: Callable[[Array, Sequence[int]], Array]) -> Choices:
    try:
        if all(row.sampler.is_greedy for row in rows):
            return Choices(greedy_choices(logits_RV, rows), np.ones(len(rows)), {})
        p_RV = laws(logits_RV, rows)
        tokens_R = pick(p_RV, range(len(rows)))
        xp = namespace(p_RV)
        return Choices(tokens_R, xp.take_along_axis(p_RV, tokens_R[:, None], axis=1)[:, 0], {})
    except EngineError:
        return _one_by_one(logits_RV, rows, pick)


def _one_by_one(logits_RV: Array, rows: Sequence[Row], pick: Callable[[Array, Sequence[int]], Array]) -> Choices:
    tokens, masses, errors = [-1] * len(rows), [0.0] * len(rows), {}
    for r, row in enumerate(rows):
        try:
            p_1V = laws(logits_RV[r : r + 1], [row])
        except EngineError as error:
            errors[r] = error
            continue
        tokens[r] = int(pick(p_1V, [r])[0])
        masses[r] = float(p_1V[0, tokens[r]])
    return Choices(np.asarray(tokens), np.asarray(masses), errors)
