"""The decoder: a DecoderConfig and weights become logits. It knows neither sequences nor where its rows come from.

Shapes: N rows of the pass, D hidden size, F intermediate size, V vocabulary, Q query heads, K key heads, C head
dimension, R rotated dimensions, W wanted rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.torch.attention import attend_fused, attend_plain
from forerun.backends.torch.embedding import Embedding
from forerun.backends.torch.linear import Linear
from forerun.backends.torch.plan import Plan
from forerun.backends.torch.rope import RopeTable
from forerun.models.config import DecoderConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Q, K and V are one matrix, as are gate and up."""

    attn_norm_D: Tensor
    qkv: Linear
    qk_norm_HC: Tensor | None  # of the Q query heads, then of the K key heads
    o: Linear
    post_attn_norm_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm_D: Tensor | None


class Net:
    """The weights and one function, `forward`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embed: Embedding,
        layers: tuple[LayerWeights, ...],
        norm_D: Tensor,
        head: Linear,
        ropes: tuple[RopeTable, ...],
    ) -> None:
        self.config = config
        self._embed, self._layers, self._norm_D, self._head, self._ropes = embed, layers, norm_D, head, ropes
        self._attend = attend_fused if config.attention_softcap is None else attend_plain
        used = {layer.rope for layer in config.layers if layer.rope is not None}
        self._used_ropes = {index: ropes[index] for index in used}

    @property
    def layer_nbytes(self) -> int:
        """Of the weights of all layers."""
        return sum(part.nbytes for layer in self._layers for part in vars(layer).values() if part is not None)

    def subset(self, layers: Sequence[int]) -> "Net":
        """Return a net of these layers alone; the weights are shared."""
        return Net(
            replace(self.config, layers=tuple(self.config.layers[index] for index in layers)),
            embed=self._embed,
            layers=tuple(self._layers[index] for index in layers),
            norm_D=self._norm_D,
            head=self._head,
            ropes=self._ropes,
        )

    def forward(
        self, ids_N: Tensor, plan: Plan, cache_2SKPC: list[Tensor], *, wanted_W: Tensor | None, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the logits (W, V) of the wanted rows (all if None) and the residual stream (N, D) after each tap.

        Writes the new keys and values into the cache.
        """
        tapped: dict[int, Tensor] = {}
        turns = {index: rope.at(plan.positions_N, end=plan.end) for index, rope in self._used_ropes.items()}
        x_ND = self._embed(ids_N)
        for index, layer in enumerate(self._layers):
            rope = self.config.layers[index].rope
            turn = turns[rope] if rope is not None else None
            attended = self._attention(index, layer, self._rms(x_ND, layer.attn_norm_D), plan, cache_2SKPC[index], turn)
            x_ND = x_ND + self._maybe_rms(attended, layer.post_attn_norm_D)
            mixed = self._mlp(layer, self._rms(x_ND, layer.mlp_norm_D))
            x_ND = x_ND + self._maybe_rms(mixed, layer.post_mlp_norm_D)
            if index in taps:
                tapped[index] = x_ND
        return self._logits(x_ND if wanted_W is None else x_ND[wanted_W]), tapped

    def _rms(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        return functional.rms_norm(x_ND, weight_D.shape, weight_D, self.config.norm_eps)

    def _maybe_rms(self, x_ND: Tensor, weight_D: Tensor | None) -> Tensor:
        return x_ND if weight_D is None else self._rms(x_ND, weight_D)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        h_ND: Tensor,
        plan: Plan,
        cache_2SKPC: Tensor,
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        config = self.config
        Q, K, C = config.num_heads, config.num_kv_heads, config.head_dim
        heads_NHC = layer.qkv(h_ND).view(-1, Q + 2 * K, C)
        qk_NHC = heads_NHC[:, : Q + K]
        if layer.qk_norm_HC is not None:
            normed = functional.rms_norm(qk_NHC, (C,), None, config.norm_eps)
            torch.mul(normed, layer.qk_norm_HC, out=qk_NHC)
        if turn is not None:
            rotate_(qk_NHC, *turn)
        cache_2SKPC.view(-1, C).index_put_((plan.write_index,), heads_NHC[:, Q:])

        query, results = heads_NHC.view(-1, C), []
        keys, values = cache_2SKPC[0], cache_2SKPC[1]
        for call in plan.calls:
            slots, seen = slice(call.first_slot, call.end_slot), call.keys[config.layers[index].window]
            result_SKRC = self._attend(
                query.index_select(0, call.query_index).view(call.end_slot - call.first_slot, K, -1, C),
                keys[slots, :, seen.begin : seen.end],
                values[slots, :, seen.begin : seen.end],
                seen.mask_S1RL,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
            )
            results.append(result_SKRC.reshape(-1, C))
        flat = results[0] if len(results) == 1 else torch.cat(results)
        return layer.o(flat.index_select(0, plan.output_index).view(-1, Q * C))

    def _mlp(self, layer: LayerWeights, h_ND: Tensor) -> Tensor:
        gate_NF, up_NF = layer.gate_up(h_ND).chunk(2, -1)
        if self.config.activation == "silu":
            return layer.down(functional.silu(gate_NF).mul_(up_NF))
        return layer.down(functional.gelu(gate_NF, approximate="tanh").mul_(up_NF))

    def _logits(self, x_WD: Tensor) -> Tensor:
        logits_WV = self._head(self._rms(x_WD, self._norm_D))
        cap = self.config.logit_softcap
        return logits_WV if cap is None else logits_WV.div_(cap).tanh_().mul_(cap)


def rotate_(heads_NHC: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> None:
    """Rotate the first R dimensions of each head in place."""
    part_NHR = heads_NHC[..., : cos_N1R.shape[-1]]
    swapped_NHR = part_NHR.roll(cos_N1R.shape[-1] // 2, -1)
    torch.addcmul(part_NHR * cos_N1R, swapped_NHR, sin_N1R, out=part_NHR)
