"""The compiled twins of what touches a whole vocabulary: laws, masses of residuals, draws. For float32 numpy arrays.

The reference is the array code beside each caller; without the compiled module, on a GPU, or in float64, that runs.
"""

from importlib import import_module
from typing import Any

import numpy as np

_native: Any
try:
    _native = import_module("forerun._native")
except ImportError:  # installed without a compiler
    _native = None

_SET: str = _native.instruction_sets()[0] if _native is not None else ""


def usable(*arrays: Any) -> bool:
    """Return whether the compiled twins take these arrays."""
    return _native is not None and all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in arrays)


def laws(
    x_RV: np.ndarray,
    highest_R: np.ndarray,
    temperatures: list[float],
    top_ks: list[int],
    top_ps: list[float],
    min_ps: list[float],
) -> np.ndarray:
    """Return the laws after temperature, top-k, top-p and min-p: (R, V) float32."""
    p_RV = np.empty_like(x_RV, order="C")
    _native.laws(
        _SET,
        np.ascontiguousarray(x_RV),
        np.ascontiguousarray(highest_R),
        np.asarray(temperatures, dtype=np.float32),
        np.asarray(top_ks, dtype=np.int32),
        np.asarray(top_ps, dtype=np.float64),
        np.asarray(min_ps, dtype=np.float32),
        p_RV,
    )
    return p_RV


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
    )
    return out.reshape(scale_BL.shape)


def draw(law_BV: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Draw one token from each row by inverse CDF: (B,) int64."""
    out = np.empty(len(law_BV), dtype=np.int64)
    _native.draw(_SET, np.ascontiguousarray(law_BV), np.ascontiguousarray(u_B, dtype=np.float64), out)
    return out
