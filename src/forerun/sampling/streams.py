"""Randomness as an argument: uniforms from a keyed counter, no generator with a state.

A number depends on its key alone: (seed, request, position, role, index). In the default mode the position is the
number of committed tokens at the start of a round and the index a node of the proposal, so no draw is met twice in
two rounds, and batch neighbours or the schedule change nothing. Where the target chooses a token whatever was drafted,
the position is the absolute one of that token: in coupled mode, with the token id as index, and for the target's own
choice in plain decoding and among drafts that were picked without chance.

The counter is hashed by SplitMix64 (Steele, Lea, Flood 2014): 53 random bits to a uniform.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

from forerun.sampling.arrays import namespace

Array = Any

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Role(IntEnum):
    """What a draw is for; each role has a stream of its own."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3
    COUPLED = 4
    CHOICE = 5
    WITHIN = 6


def _mix(x: int) -> int:
    for shift, factor in _MIX:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: Array) -> Array:
    """The same over an int64 array: products wrap, shifts are made logical by a mask."""
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * _signed(factor)
    return x ^ ((x >> 31) & (_MASK >> 31))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@dataclass(frozen=True)
class Stream:
    """The random numbers of one request."""

    seed: int
    request: int = 0

    def key(self, position: int, role: Role) -> int:
        """Return the 64-bit key of the draws at a position."""
        key = 0
        for field in (self.seed & _MASK, self.request & _MASK, position, int(role)):
            key = _mix(((key + _GOLDEN) & _MASK) ^ field)
        return key

    def within(self, position: int) -> "Stream":
        """Return a stream for what is drawn inside the drafting of the round that begins at this position.

        Two rounds may look at one place of the text; with streams of their own they never meet the same draw there.
        """
        return Stream(self.key(position, Role.WITHIN), self.request)

    def uniforms(self, position: int, role: Role, count: int) -> list[float]:
        """Return `count` uniforms in [0, 1), for nodes 0 … count - 1."""
        key = self.key(position, role)
        return [(_mix((key + (i + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53 for i in range(count)]

    def exponentials(self, position: int, vocab_size: int, x: Array) -> Array:
        """Return one exponential variate for each token id at an absolute position: (V,) float64, where `x` lives.

        -log(U) with U strictly inside (0, 1). The token argmax_x p(x) / E(x) is distributed as p: the same as adding
        Gumbel noise -log(-log U) to log p, with one logarithm fewer.
        """
        xp, device = namespace(x), array_api_compat.device(x)
        key = self.key(position, Role.COUPLED)
        hashed = _mix_array(xp.asarray(_signed(key), dtype=xp.int64, device=device) + _counter(xp, device, vocab_size))
        # 52 bits: with 53, adding a half would round, and the largest U would be 1
        uniforms = (xp.astype((hashed >> 12) & (_MASK >> 12), xp.float64) + 0.5) * 2.0**-52
        return -xp.log(uniforms)


@lru_cache(maxsize=8)
def _counter(xp: Any, device: Any, vocab_size: int) -> Array:
    """(1, 2, …, V) times the golden increment, modulo 2^64, as int64."""
    steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return xp.asarray(steps.view(np.int64), device=device)
