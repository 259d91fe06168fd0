"""Rotary position embedding as tables of cos and sin, one pair per Rope of a config.

Rotation of a head x = [a, b, rest] at angle t (Su et al., RoFormer, in the half-split form of Hugging Face):
[a·cos − b·sin, b·cos + a·sin, rest] = x·cos + roll(x)·sin with the signs folded into sin.

Shapes: P positions, R rotated dimensions.
"""

import math

import torch
from torch import Tensor

from forerun.models.config import Rope

_FIRST_LEN = 1024  # positions


class RopeTable:
    """cos and signed sin at positions 0 … P - 1, in the net's dtype; P grows on demand."""

    def __init__(self, rope: Rope, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self.rotary_dim = rope.rotary_dim
        self._cos_PR = self._sin_PR = torch.empty(0, rope.rotary_dim, dtype=dtype, device=device)

    def at(self, positions_N: Tensor, *, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (N, 1, R), at `positions_N`, all of which are below `end`."""
        if end > len(self._cos_PR):
            num_positions = max(_FIRST_LEN, 1 << (end - 1).bit_length())
            cos_PR, sin_PR = cos_and_sin(self._rope, num_positions)
            self._cos_PR = cos_PR.to(self._device, self._dtype)
            self._sin_PR = sin_PR.to(self._device, self._dtype)
        return self._cos_PR[positions_N].unsqueeze(1), self._sin_PR[positions_N].unsqueeze(1)


def cos_and_sin(rope: Rope, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin, each (P, R) in fp32, at positions 0 … num_positions - 1."""
    positions_P1 = torch.arange(num_positions, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        angles = positions_P1 * _dynamic_frequencies(rope, positions_P1)
    else:
        angles = positions_P1 * _frequencies(rope)
    factor = _attention_factor(rope)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _base_frequencies(rope: Rope, theta: Tensor | float) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / theta**exponents  # (R / 2,), or (P, R / 2) where theta is (P, 1)


def _frequencies(rope: Rope) -> Tensor:
    frequencies = _base_frequencies(rope, rope.theta)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "factors":
        return frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    assert rope.kind == "none", rope.kind
    return frequencies


def _dynamic_frequencies(rope: Rope, positions_P1: Tensor) -> Tensor:
    """NTK scaling with the length that each row itself sees: position + 1."""
    lengths = (positions_P1 + 1).clamp(min=rope.original_max_len)
    growth = rope.factor * lengths / rope.original_max_len - (rope.factor - 1)
    return _base_frequencies(rope, rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Long waves divided by factor, short ones kept, a linear blend between (Llama 3.1)."""
    turns = frequencies * (rope.original_max_len / (2 * math.pi))  # how often each wave turns over the first context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, frequencies: Tensor) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, a ramp between (Peng et al., YaRN)."""

    def dimension(turns: float) -> float:
        waves = math.log(rope.original_max_len / (turns * 2 * math.pi))
        return rope.rotary_dim * waves / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0, 1)
    return frequencies * (1 - interpolated + interpolated / rope.factor)


def _attention_factor(rope: Rope) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
