"""Token embeddings: two twins. Packed heads can't be read by row, and a plain copy beside them would cost up to a
fifth of a small model's memory, so where the file's blocks are smaller they are kept and rows are dequantised on
demand, to the very numbers that the head was made of.

Shapes: N rows, D hidden size, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from forerun.models.tensorfile import RawTensor


class Embedding(Protocol):
    """Rows by token id, times the config's embed_scale."""

    nbytes: int

    def __call__(self, ids_N: Tensor) -> Tensor:
        """Return (N, D)."""


class PlainEmbedding:
    """A (V, D) table."""

    def __init__(self, weight_VD: Tensor, scale: float) -> None:
        self._weight_VD, self._scale = weight_VD, scale
        self.nbytes = weight_VD.nbytes

    def __call__(self, ids_N: Tensor) -> Tensor:
        x_ND = self._weight_VD.index_select(0, ids_N)
        return x_ND if self._scale == 1.0 else x_ND.mul_(self._scale)


class RawEmbedding:
    """The file's own blocks, on the host. A copy, so that the file need not stay mapped."""

    def __init__(self, raw_VD: RawTensor, scale: float, *, dtype: torch.dtype) -> None:
        self._raw_VD = RawTensor(raw_VD.data.copy(), raw_VD.kind, raw_VD.shape)
        self._scale, self._dtype = scale, dtype
        self.nbytes = raw_VD.data.nbytes

    def __call__(self, ids_N: Tensor) -> Tensor:
        kind, (_, width) = self._raw_VD.kind, self._raw_VD.shape
        rows = RawTensor(self._raw_VD.data[ids_N.numpy()], kind, (len(ids_N), width)).to_float32()
        x_ND = torch.from_numpy(rows).to(self._dtype)
        return x_ND if self._scale == 1.0 else x_ND.mul_(self._scale)
