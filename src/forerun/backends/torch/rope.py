"""Rotary position embedding as tables on the device, one pair per Rope of a config; the angles are `models.rope`'s.

A head x = [a, b, rest] becomes [a·cos − b·sin, b·cos + a·sin, rest] = x·cos + roll(x)·sin with the signs folded into
sin.

Shapes: N rows of a pass, P positions, R rotated dimensions.
"""

import numpy as np
import torch
from torch import Tensor

from forerun.models.config import Rope
from forerun.models.rope import cos_and_sin

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
            cos_PH, sin_PH = cos_and_sin(self._rope, max(_FIRST_LEN, 1 << (end - 1).bit_length()))
            self._cos_PR = self._table(cos_PH, cos_PH)
            self._sin_PR = self._table(-sin_PH, sin_PH)
        return self._cos_PR[positions_N].unsqueeze(1), self._sin_PR[positions_N].unsqueeze(1)

    def _table(self, first_PH: np.ndarray, second_PH: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([first_PH, second_PH], axis=1)).to(self._device, self._dtype)
