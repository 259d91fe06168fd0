"""A decoder family as data: everything in which the networks that we run differ.

One `DecoderConfig` describes Llama, Mistral, Qwen2, Qwen3, SmolLM, Gemma 2, Gemma 3 and Phi-3 alike; a backend that
honours each of its fields runs them all. Sizes are counts, positions are tokens.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the frequencies at each position.

    `kind` names the scaling: none, linear (divide by factor), dynamic (the base grows with the *row's own* position
    once that is past original_max_len, so a row never depends on how wide its pass was), llama3, yarn, or `factors`
    (each inverse frequency divided by an explicit number, as GGUF stores llama3 scaling).
    """

    theta: float = 10000.0
    rotary_dim: int = 0  # how many leading dimensions of a head are rotated
    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "factors"] = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: cos and sin are multiplied by it; None: 0.1·ln(factor) + 1
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # kind "factors": rotary_dim / 2 divisors


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer."""

    window: int | None = None  # sliding window: a row sees itself and the window - 1 positions before it
    rope: int | None = 0  # index into DecoderConfig.ropes; None: no rotation in this layer


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder-only transformer with gated MLPs and rotary positions."""

    family: str  # llama, mistral, qwen2, qwen3, smollm3, gemma2, gemma3, phi3
    vocab_size: int  # rows of the embedding and the head, padding included
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int  # positions
    norm_eps: float
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float  # scores are q·k times this
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_head: bool = False
    qk_norm: bool = False  # RMS norm over head_dim on queries and keys, before rotation
    post_norms: bool = False  # Gemma: a norm after attention and one after the MLP, before each residual sum
    attention_softcap: float | None = None  # scores become cap·tanh(scores / cap)
    logit_softcap: float | None = None
    embed_scale: float = 1.0  # embeddings are multiplied by it

    @property
    def num_layers(self) -> int:
        return len(self.layers)


LAYER_TENSORS = (  # canonical names inside `layers.{i}.`; those a family lacks are simply absent
    "attn_norm", "q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "post_attn_norm",
    "mlp_norm", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "post_mlp_norm",
)  # fmt: skip
"""Weights by canonical name: `embed`, `norm`, `head` (absent if tied) and, per layer, the names above.

Matrices are (out, in). Norm weights are the factor itself: where a family stores w and computes 1 + w, loading adds
the 1. Q and K rows are in the order of Hugging Face (the two halves of a head rotate together).
"""
