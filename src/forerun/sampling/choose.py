"""The target's own choice at each row: what it would write there, whatever was drafted.

    R  rows      V  vocabulary

Drafts that were picked without chance are judged by following these choices, and so is everything in coupled mode. A
row without a law (every token forbidden, a processor that fails) doesn't trouble the others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.sampling import kernels, verify
from forerun.sampling.arrays import Array, like, namespace
from forerun.sampling.laws import Row, greedy_choices, laws, ready

Picked = tuple[Array, Array]  # tokens and masses


class Choices(NamedTuple):
    """One token for each row."""

    tokens_R: Array  # -1 where a row has no law
    masses_R: Array  # of the token, under the row's law after all transforms
    errors: dict[int, EngineError]  # by row, why it has none


def choose(logits_RV: Array, rows: Sequence[Row], uniforms_R: Sequence[float]) -> Choices:
    """Draw a token from the law of each row by inverse CDF; uniforms in [0, 1)."""

    def pick(logits_RV: Array, which: Sequence[int]) -> Picked:
        mine, u_R = [rows[r] for r in which], [uniforms_R[r] for r in which]
        if kernels.usable(logits_RV):
            return kernels.choose(*ready(logits_RV, mine), [row.sampler.params for row in mine], u_R)
        p_RV = laws(logits_RV, mine)
        return _with_masses(p_RV, verify.draw(p_RV, like(u_R, p_RV, namespace(p_RV).float64)))

    return _picked(logits_RV, rows, pick)


def race(logits_RV: Array, rows: Sequence[Row], positions: Sequence[int]) -> Choices:
    """Coupled mode (Daliri, Musco, Suresh 2408.07978): argmax p/E, E keyed by the position of the token in the text."""

    def pick(logits_RV: Array, which: Sequence[int]) -> Picked:
        p_RV = laws(logits_RV, [rows[r] for r in which])
        return _with_masses(p_RV, verify.race(p_RV, [(rows[r].sampler.stream, positions[r]) for r in which]))

    return _picked(logits_RV, rows, pick)


def _with_masses(p_RV: Array, tokens_R: Array) -> Picked:
    return tokens_R, namespace(p_RV).take_along_axis(p_RV, tokens_R[:, None], axis=1)[:, 0]


def _picked(logits_RV: Array, rows: Sequence[Row], pick: Callable[[Array, Sequence[int]], Picked]) -> Choices:
    try:
        if all(row.sampler.is_greedy for row in rows):
            return Choices(greedy_choices(logits_RV, rows), np.ones(len(rows)), {})
        return Choices(*pick(logits_RV, range(len(rows))), {})
    except EngineError:
        return _one_by_one(logits_RV, rows, pick)


def _one_by_one(logits_RV: Array, rows: Sequence[Row], pick: Callable[[Array, Sequence[int]], Picked]) -> Choices:
    tokens, masses, errors = [-1] * len(rows), [0.0] * len(rows), {}
    for r in range(len(rows)):
        try:
            token_1, mass_1 = pick(logits_RV[r : r + 1], [r])
        except EngineError as error:
            errors[r] = error
            continue
        tokens[r], masses[r] = int(token_1[0]), float(mass_1[0])
    return Choices(np.asarray(tokens), np.asarray(masses), errors)
