"""Rotary position embedding as tables: cosines and sines of the angles at each position, in numpy.

A head x = [a, b, rest] at angle t becomes [a·cos - b·sin, b·cos + a·sin, rest] (Su et al., RoFormer 2104.09864, in
the half-split form of Hugging Face).

Shapes: P positions, H = rotary_dim / 2 angles.
"""

import math

import numpy as np

from forerun.models.config import Rope


def cos_and_sin(rope: Rope, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines, each (P, H) float32, at positions 0 … num_positions - 1."""
    positions_P1 = np.arange(num_positions, dtype=np.float32)[:, None]
    if rope.kind == "dynamic":
        angles_PH = positions_P1 * _dynamic_frequencies(rope, positions_P1)
    else:
        angles_PH = positions_P1 * _frequencies(rope)
    factor = np.float32(_attention_factor(rope))
    return np.cos(angles_PH) * factor, np.sin(angles_PH) * factor


def _base_frequencies(rope: Rope, theta: np.ndarray | float) -> np.ndarray:
    exponents_H = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    frequencies_H: np.ndarray = np.float32(1.0) / np.power(np.asarray(theta, dtype=np.float32), exponents_H)
    return frequencies_H


def _frequencies(rope: Rope) -> np.ndarray:
    frequencies_H = _base_frequencies(rope, rope.theta)
    if rope.kind == "linear":
        frequencies_H = frequencies_H / np.float32(rope.factor)
    if rope.kind == "factors":
        frequencies_H = frequencies_H / np.asarray(rope.factors, dtype=np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies_H)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies_H)
    return frequencies_H


def _dynamic_frequencies(rope: Rope, positions_P1: np.ndarray) -> np.ndarray:
    """NTK scaling with the length that each row itself sees: position + 1."""
    lengths_P1 = np.maximum(positions_P1 + 1, np.float32(rope.original_max_len))
    growth_P1 = np.float32(rope.factor) * lengths_P1 / np.float32(rope.original_max_len) - np.float32(rope.factor - 1)
    return _base_frequencies(rope, rope.theta * growth_P1 ** np.float32(rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: Rope, frequencies_H: np.ndarray) -> np.ndarray:
    """Long waves divided by factor, short ones kept, a linear blend between (Llama 3.1)."""
    turns_H = frequencies_H * np.float32(rope.original_max_len / (2 * math.pi))  # over the first context
    kept_H = (turns_H - rope.low_freq_factor) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    kept_H = np.clip(kept_H, 0, 1).astype(np.float32)
    scaled_H: np.ndarray = frequencies_H * (kept_H + (1 - kept_H) / np.float32(rope.factor))
    return scaled_H


def _yarn(rope: Rope, frequencies_H: np.ndarray) -> np.ndarray:
    """Interpolate slow dimensions, keep fast ones, a ramp between (Peng et al., YaRN 2309.00071)."""

    def dimension(turns: float) -> float:
        waves = math.log(rope.original_max_len / (turns * 2 * math.pi))
        return rope.rotary_dim * waves / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp_H = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / (high - low)
    ramp_H = np.clip(ramp_H, 0, 1).astype(np.float32)
    scaled_H: np.ndarray = frequencies_H * (1 - ramp_H + ramp_H / np.float32(rope.factor))
    return scaled_H


def _attention_factor(rope: Rope) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
