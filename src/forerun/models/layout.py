"""Where the canonical weights of a `DecoderConfig` lie in a file: names, shapes, and what is done to the rows.

Two naming schemes, Hugging Face's and GGUF's; which parts a net has follows from its config alone.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forerun.models.config import DecoderConfig
from forerun.models.families import FAMILIES


class Source(NamedTuple):
    """How a canonical weight is made from a tensor of the file."""

    name: str  # in the file
    stored: tuple[int, ...]  # the shape there
    first: int = 0  # of the rows taken
    last: int = 0  # one past it; 0: all rows
    interleaved_heads: int = 0  # rows to be put back in Hugging Face's order, head by head
    plus_one: bool = False  # stored as w, used as 1 + w


_HF_PARTS = {
    "attn_norm": "input_layernorm.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight", "qkv": "self_attn.qkv_proj.weight", "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight", "post_mlp_norm": "post_feedforward_layernorm.weight",
}  # fmt: skip
_HF_GEMMA = {"mlp_norm": "pre_feedforward_layernorm.weight", "post_attn_norm": "post_attention_layernorm.weight"}
_GGUF_PARTS = {
    "attn_norm": "attn_norm.weight", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "qkv": "attn_qkv.weight", "post_attn_norm": "post_attention_norm.weight", "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight", "up": "ffn_up.weight", "gate_up": "ffn_up.weight", "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}  # fmt: skip
_HF_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
_HF_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
_IGNORED_PARTS = ("vision_tower.", "multi_modal_projector.")  # of models that also see: we run their text half


def layer_shapes(config: DecoderConfig, biases: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each canonical weight of a layer."""
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden),
        "o": (hidden, q_rows), "mlp_norm": (hidden,), "gate": (inter, hidden), "up": (inter, hidden),
        "down": (hidden, inter),
    }  # fmt: skip
    if config.qk_norm:
        shapes |= {"q_norm": (dim,), "k_norm": (dim,)}
    if config.post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    return shapes | {bias: shapes[bias.removesuffix("_bias")][:1] for bias in biases}


def hf_sources(config: DecoderConfig, biases: tuple[str, ...], names: Mapping[str, object]) -> dict[str, Source]:
    """Return, by canonical name, where the weights of a Hugging Face folder with tensors `names` lie."""
    prefix = next((prefix for prefix in _HF_PREFIXES if f"{prefix}embed_tokens.weight" in names), "model.")
    head = next((name for name in _HF_HEADS if name in names), _HF_HEADS[0])
    gemma = FAMILIES[config.family].gemma
    parts = _HF_PARTS | (_HF_GEMMA if gemma else {})
    sources = {"embed": Source(f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))}
    sources["norm"] = Source(f"{prefix}norm.weight", (config.hidden_size,), plus_one=gemma)
    if not config.tied_head:
        sources["head"] = Source(head, (config.vocab_size, config.hidden_size))
    for index in range(config.num_layers):
        for part, source in _layer_sources(config, biases, parts, f"{prefix}layers.{index}."):
            sources[f"layers.{index}.{part}"] = source._replace(plus_one=gemma and part.endswith("norm"))
    return sources


def gguf_sources(config: DecoderConfig, biases: tuple[str, ...]) -> dict[str, Source]:
    """Return, by canonical name, where the weights of a GGUF file lie."""
    sources = {"embed": Source("token_embd.weight", (config.vocab_size, config.hidden_size))}
    sources["norm"] = Source("output_norm.weight", (config.hidden_size,))
    if not config.tied_head:
        sources["head"] = Source("output.weight", (config.vocab_size, config.hidden_size))
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "q_bias": config.num_heads, "k_bias": config.num_kv_heads}
    interleaved = heads if FAMILIES[config.family].gguf_interleaved else {}
    for index in range(config.num_layers):
        for part, source in _layer_sources(config, biases, _GGUF_PARTS, f"blk.{index}."):
            sources[f"layers.{index}.{part}"] = source._replace(interleaved_heads=interleaved.get(part, 0))
    return sources


def _layer_sources(
    config: DecoderConfig, biases: tuple[str, ...], parts: Mapping[str, str], prefix: str
) -> Iterator[tuple[str, Source]]:
    shapes = layer_shapes(config, biases)
    fused = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")} if FAMILIES[config.family].fused else {}
    for whole, members in fused.items():
        ends = [sum(shapes[part][0] for part in members[: count + 1]) for count in range(len(members))]
        for part, last in zip(members, ends, strict=True):
            stored = (ends[-1], *shapes[part][1:])
            yield part, Source(prefix + parts[whole], stored, last - shapes[part][0], last)
    for part, shape in shapes.items():
        if not any(part in members for members in fused.values()):
            name = parts[part.removesuffix("_bias")]
            name = name.removesuffix("weight") + "bias" if part.endswith("_bias") else name
            yield part, Source(prefix + name, shape)


def gguf_biases(names: Mapping[str, object]) -> tuple[str, ...]:
    """Return the canonical names of the biases that the first layer of a GGUF file has."""
    parts = ("q", "k", "v", "o", "gate", "up", "down")
    return tuple(
        f"{part}_bias" for part in parts if "blk.0." + _GGUF_PARTS[part].removesuffix("weight") + "bias" in names
    )


def is_harmless(name: str, config: DecoderConfig) -> bool:
    """Tell whether a tensor of a file that no weight is made from may be left out."""
    if name.endswith(_IGNORED_ENDINGS) or any(part in name for part in _IGNORED_PARTS) or name == "rope_freqs.weight":
        return True
    return config.tied_head and name in _HF_HEADS
