"""Attention of folded query rows over a view of the cache: two twins, chosen once per net.

Shapes: S slots, K key heads, R folded rows, L keys, C head dimension.
"""

import torch
from torch import Tensor


def attend_fused(
    query_SKRC: Tensor, key_SKLC: Tensor, value_SKLC: Tensor, mask_S1RL: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """Return softmax(scale·q·kᵀ + mask)·v, (S, K, R, C), by the library's fused kernel; it knows no soft cap."""
    assert softcap is None
    return torch.nn.functional.scaled_dot_product_attention(
        query_SKRC, key_SKLC, value_SKLC, attn_mask=mask_S1RL, scale=scale
    )


def attend_plain(
    query_SKRC: Tensor, key_SKLC: Tensor, value_SKLC: Tensor, mask_S1RL: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """Return softmax(cap·tanh(scale·q·kᵀ / cap) + mask)·v, (S, K, R, C); without a cap, of the scores themselves."""
    scores_SKRL = query_SKRC @ key_SKLC.transpose(-1, -2)
    if softcap is None:
        scores_SKRL = scores_SKRL.mul_(scale)
    else:
        scores_SKRL = scores_SKRL.mul_(scale / softcap).tanh_().mul_(softcap)
    return torch.softmax(scores_SKRL.add_(mask_S1RL), -1) @ value_SKLC
