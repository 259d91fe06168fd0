"""The compiled twins of what touches a whole vocabulary: laws, masses of residuals, draws. For float32 numpy arrays.

The reference is the array code beside each caller; without the compiled module, on a GPU, or in float64, that runs.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from forerun.types import SamplingParams

_native: Any
try:
    _native = import_module("forerun._native")
except ImportError:  # installed without a compiler
    _native = None

num_threads = 1  # over which rows are spread; whoever loads a model for the cpu sets it
_SET: str = _native.instruction_sets()[0] if _native is not None else ""


def usable(*arrays: Any) -> bool:
    """Return whether the compiled twins take these arrays."""
    return _native is not None and all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in arrays)


def laws(x_RV: np.ndarray, highest_R: np.ndarray, params: Sequence[SamplingParams]) -> np.ndarray:
    """Return the laws after temperature, top-k, top-p and min-p: (R, V) float32."""
    p_RV = np.empty_like(x_RV, order="C")
    _native.laws(_SET, *_transforms(x_RV, highest_R, params, greedy=1.0), p_RV, num_threads)
    return p_RV


def choose(
    x_RV: np.ndarray, highest_R: np.ndarray, params: Sequence[SamplingParams], u_R: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token from each such law: (R,) int64, and its mass (R,) float32."""
    tokens_R, masses_R = np.empty(len(x_RV), dtype=np.int64), np.empty(len(x_RV), dtype=np.float32)
    uniforms_R = np.asarray(u_R, dtype=np.float64)
    _native.choose(_SET, *_transforms(x_RV, highest_R, params, greedy=0.0), uniforms_R, tokens_R, masses_R, num_threads)
    return tokens_R, masses_R


def _transforms(
    x_RV: np.ndarray, highest_R: np.ndarray, params: Sequence[SamplingParams], *, greedy: float
) -> list[np.ndarray]:
    return [
        np.ascontiguousarray(x_RV),
        np.ascontiguousarray(highest_R),
        np.asarray([divisor(p.temperature) or greedy for p in params], dtype=np.float32),
        np.asarray([min(p.top_k, x_RV.shape[-1]) for p in params], dtype=np.int32),
        np.asarray([p.top_p for p in params], dtype=np.float64),
        np.asarray([p.min_p for p in params], dtype=np.float32),
    ]


def divisor(temperature: float) -> float:
    """Return the temperature within the range of float32, beyond which it makes no difference; 0 stays 0."""
    return min(max(temperature, 1e-30), 1e30) if temperature else 0.0


def race(p_RV: np.ndarray, keys: Sequence[int]) -> np.ndarray:
    """Return argmax p / E of each row, E keyed as in `Stream.exponentials`: (R,) int64."""
    out = np.empty(len(p_RV), dtype=np.int64)
    _native.race(np.ascontiguousarray(p_RV), np.asarray(keys, dtype=np.uint64), out, num_threads)
    return out


def top_ids(x_RV: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the k largest values of each row, largest first: (R, k) int64."""
    out = np.empty((len(x_RV), k), dtype=np.int64)
    _native.top_ids(np.ascontiguousarray(x_RV), out, num_threads)
    return out


def surplus(p_BLV: np.ndarray, q_BLV: np.ndarray, scale_BL: np.ndarray) -> np.ndarray:
    """Return the mass of max(scale·p - q, 0) in each row: (B, L) float64."""
    vocab_size = p_BLV.shape[-1]
    out = np.empty(scale_BL.size, dtype=np.float64)
    _native.surplus(
        _SET,
        np.ascontiguousarray(p_BLV).reshape(-1, vocab_size),
        np.ascontiguousarray(q_BLV).reshape(-1, vocab_size),
        np.ascontiguousarray(scale_BL, dtype=np.float32).reshape(-1),
        out,
        num_threads,
    )
    return out.reshape(scale_BL.shape)


def draw(law_BV: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Draw one token from each row by inverse CDF: (B,) int64."""
    out = np.empty(len(law_BV), dtype=np.int64)
    _native.draw(_SET, np.ascontiguousarray(law_BV), np.ascontiguousarray(u_B, dtype=np.float64), out, num_threads)
    return out
