"""The target's own choice at each row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.sampling.arrays import Array, like, namespace
from forerun.sampling.laws import Row, laws
from forerun.sampling.verify import draw
from forerun.sampling.verify import race as race_laws


class Choices(NamedTuple):
    tokens_R: Array
    masses_R: Array
    errors: dict[int, EngineError]


def _each(logits_RV, rows, pick):
    tokens, masses, errors = [], [], {}
    for r, row in enumerate(rows):
        try:
            p_1V = laws(logits_RV[r : r + 1], [row])
        except EngineError as error:
            errors[r] = error
            tokens.append(-1)
            masses.append(0.0)
            continue
        token = int(pick(p_1V, r)[0])
        tokens.append(token)
        masses.append(float(p_1V[0, token]))
    return Choices(np.asarray(tokens), np.asarray(masses), errors)


def choose(logits_RV: Array, rows: Sequence[Row], uniforms_R: Sequence[float]) -> Choices:
    xp = namespace(logits_RV)
    return _each(logits_RV, rows, lambda p, r: draw(p, like([uniforms_R[r]], p, xp.float64)))


def race(logits_RV: Array, rows: Sequence[Row], positions: Sequence[int]) -> Choices:
    return _each(
        logits_RV,
        rows,
        lambda p, r: race_laws(p, rows[r].sampler.stream.exponentials(positions[r], p.shape[-1], p)[None]),
    )
