"""x·Wᵀ + b, the seam between the net and the library's matrix products: two twins, chosen once per session.

`PlainLinear` is the reference and runs everywhere. `PackedLinear` keeps the weight in the order in which oneDNN reads
it, packed once: flat over 1 to 16 rows, and a row's bits don't depend on how many rows go with it.

Shapes: N rows, I inputs, O outputs.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

_ROWS_HINT = 16  # the width that the packed order is made for: verification of drafts
_MAX_LONE_INPUTS = 1024  # above it oneDNN sums a lone row in another order: such a row goes with a copy of itself


class Linear(Protocol):
    """A matrix product with weights of its own."""

    nbytes: int  # of weights and bias

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return (N, O)."""


class PlainLinear:
    """The library's own product."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI.contiguous()
        self._bias_O = bias_O
        self.nbytes = weight_OI.nbytes + (bias_O.nbytes if bias_O is not None else 0)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_NI, self._weight_OI, self._bias_O)


class PackedLinear:
    """oneDNN's product with a weight packed once (CPU, fp32 or bf16). The given weight is not kept."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _ROWS_HINT)
        self._bias_O, self._num_outputs = bias_O, len(weight_OI)
        self._min_rows = 2 if weight_OI.shape[1] > _MAX_LONE_INPUTS else 1
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.nbytes = weight_OI.nbytes + (bias_O.nbytes if bias_O is not None else 0)

    def __call__(self, x_NI: Tensor) -> Tensor:
        num_rows = len(x_NI)
        if num_rows == 0:
            return x_NI.new_empty(0, self._num_outputs)
        if num_rows < self._min_rows:
            return self(x_NI.expand(self._min_rows, -1))[:num_rows]
        return self._product(x_NI, self._weight, self._bias_O, "none", [], "")  # type: ignore[no-any-return]


def has_onednn() -> bool:
    """Return whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Return whether PackedLinear works for this type on this machine."""
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not has_onednn():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        with torch.inference_mode():
            PackedLinear(torch.ones(32, 32, dtype=dtype))(torch.ones(2, 32, dtype=dtype))
    except (RuntimeError, AttributeError):  # a build of torch without these operators
        return False
    return True


def linear_type(dtype: torch.dtype, device: torch.device) -> type[PlainLinear] | type[PackedLinear]:
    """Return the twin to use for weights of `dtype` on `device`."""
    return PackedLinear if can_pack(dtype, device.type) else PlainLinear
