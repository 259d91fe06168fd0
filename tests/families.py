"""Tiny random models of every family, saved as `transformers` saves them and as llama.cpp's converter does.

Shared by the tests of loading and by the parity tests of the backends. Weights are random but large enough that each
part of a net moves the logits. The tokenizer has fewer tokens than the nets have rows: padding is part of each test.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320  # rows of the nets; the tokenizer has NUM_TOKENS
NUM_TOKENS = 287
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip

_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # family -> config class, model class, settings
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 5}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 8}),
}
FAMILIES = tuple(_FAMILIES)

_GGUF_ARCH = {"mistral": "llama"}  # the others are called as the family
_PERMUTED = ("llama", "mistral", "smollm3")
_UNIT_OFFSET = ("gemma2", "gemma3")


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Return the tiny `transformers` config of `family`; `overrides` are settings of that config class."""
    config_class, _, settings = _FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_COMMON, **settings, **overrides})
    config._attn_implementation = "eager"
    return config


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """Return a random fp32 model of `family` in evaluation mode, eager attention (soft caps need it)."""
    model = getattr(transformers, _FAMILIES[family][1])(tiny_config(family, **overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(noise if "embed" in name else noise * (1.5 / math.sqrt(weight.shape[1])))
            elif name.endswith("bias"):
                weight.copy_(noise * 0.3)
            else:
                weight.copy_(noise * 0.2 + (0.0 if family in _UNIT_OFFSET else 1.0))
    return model


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and then the hat ran to another land"] * 3, trainer)
    return str(tokenizer.to_str())


def tiny_tokenizer() -> Tokenizer:
    """Return the byte-level BPE tokenizer of all tiny models (GPT-2 pre-tokeniser, no added BOS)."""
    return Tokenizer.from_str(_tokenizer_json())


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files as a Hugging Face folder has them."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_hf(
    family: str, folder: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "5GB", **overrides: Any
) -> torch.nn.Module:
    """Save a tiny model with its tokenizer in Hugging Face format and return it, in `dtype`."""
    model = tiny_model(family, seed=seed, **overrides).to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return model


def write_gguf(
    family: str,
    model: torch.nn.Module,
    path: Path,
    *,
    quant: str | None = None,
    replace: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write `model` as a GGUF file: names, row order and norms as llama.cpp's converter leaves them.

    `quant` names the kind of all matrices whose rows it divides (default F32); `replace` gives tensors by GGUF name as
    blocks of a kind; `metadata` may add keys; `tokenizer` writes another tokenizer than the tiny one.
    """
    arch = _GGUF_ARCH.get(family, family)
    writer = gguf.GGUFWriter(path, arch)
    _write_hparams(writer, family, model.config)
    (tokenizer or _write_tokenizer)(writer)
    if metadata is not None:
        metadata(writer)
    names = gguf.get_tensor_name_map(_model_arch(arch), model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for hf_name, weight in model.state_dict().items():
        if tied and hf_name == "lm_head.weight":
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        if name in (replace or {}):
            blocks, kind = (replace or {})[name]
            writer.add_tensor(name, blocks, raw_dtype=kind)
        else:
            data = _gguf_rows(family, hf_name, weight.float().numpy(), model.config)
            _add_tensor(writer, name, data, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _model_arch(arch: str) -> gguf.MODEL_ARCH:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def _add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray, quant: str | None) -> None:
    kind = gguf.GGMLQuantizationType[quant or "F32"]
    block_len, _ = gguf.GGML_QUANT_SIZES[kind]
    if data.ndim == 2 and quant is not None and data.shape[1] % block_len == 0:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))


def _gguf_rows(family: str, hf_name: str, data: np.ndarray, config: Any) -> np.ndarray:
    """Return the tensor as the converter stores it: Q and K rows interleaved for llama, Gemma's norms plus 1."""
    if family in _UNIT_OFFSET and hf_name.endswith("norm.weight"):
        return data + 1.0
    for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if family in _PERMUTED and part in hf_name:
            halves = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
            return halves.swapaxes(1, 2).reshape(data.shape)
    return data


def _write_hparams(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if family in ("mistral", "gemma2", "gemma3", "phi3") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _write_rope(writer, family, config, head_dim)


def _write_rope(writer: gguf.GGUFWriter, family: str, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope["full_attention"] if family == "gemma3" else rope
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor(
            gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight", llama3_divisors(rope, rotary_dim)
        )


def llama3_divisors(rope: dict[str, Any], rotary_dim: int) -> np.ndarray:
    """Return, for each frequency, what llama3 scaling divides it by. Shape (rotary_dim / 2,)."""
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    spec = json.loads(_tokenizer_json())
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    padding = range(len(tokens), VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED for _ in padding])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
