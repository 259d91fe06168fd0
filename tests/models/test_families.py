"""What config.json and GGUF metadata mean: both styles of transformers, scaled ropes, windows, refusals by name."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from forerun.errors import CorruptModelError, ModelError, UnsupportedModelError
from forerun.models.config import Rope
from forerun.models.families import config_from_gguf, config_from_hf
from forerun.models.load import load_checkpoint
from tests.families import FAMILIES, llama3_divisors, save_hf, tiny_config, tiny_model, write_gguf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def saved(raw: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 writes for a config.json that transformers 4 wrote."""
    config = transformers.AutoConfig.for_model(**raw)
    return dict(json.loads(config.to_json_string(use_diff=False)))


OLD_STYLE: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 24},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "attention_factor": 0.7}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}},
    {"model_type": "mistral"},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mistral", "sliding_window": 32},
    {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
    {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1},
    {"model_type": "qwen3", "head_dim": 32},
    {"model_type": "qwen3"},
    {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2},
    {"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16},
    {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 16, "query_pre_attn_scalar": 144},
    {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 16, "rope_local_base_freq": 5000.0},
    {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 16},
    {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"model_type": "phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0},
]


@pytest.mark.parametrize("changes", OLD_STYLE, ids=lambda changes: ",".join(map(str, changes)) or "plain")
def test_configs_of_both_styles_of_transformers_mean_the_same(changes: dict[str, Any]) -> None:
    raw = {**LLAMA, **changes}
    assert config_from_hf(raw) == config_from_hf(saved(raw))


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_follow_the_config(family: str) -> None:
    hf: Any = tiny_config(family)
    config = config_from_hf(json.loads(hf.to_json_string(use_diff=False)))
    gemma = family.startswith("gemma")
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (64, 4, 2)
    assert config.num_layers == hf.num_hidden_layers
    assert config.tied_head == hf.tie_word_embeddings
    assert config.qk_norm == (family in ("qwen3", "gemma3"))
    assert config.post_norms == gemma
    assert config.activation == ("gelu_tanh" if gemma else "silu")
    assert config.embed_scale == (8.0 if gemma else 1.0)
    assert config.attention_scale == pytest.approx(config.head_dim**-0.5)
    assert (config.attention_softcap, config.logit_softcap) == ((50.0, 30.0) if family == "gemma2" else (None, None))


def windows(raw: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in config_from_hf({**LLAMA, **raw}).layers]


def test_windows_alternate_as_each_family_says() -> None:
    assert windows({}) == [None, None]
    assert windows({"model_type": "mistral", "sliding_window": 32}) == [32, 32]
    gemma2 = {"model_type": "gemma2", "sliding_window": 8, "num_hidden_layers": 4}
    assert windows(gemma2) == [8, None, 8, None]
    gemma3 = {"model_type": "gemma3_text", "sliding_window": 8, "num_hidden_layers": 7}
    assert windows(gemma3) == [8, 8, 8, 8, 8, None, 8]
    assert windows({**gemma3, "layer_types": ["full_attention", *["sliding_attention"] * 6]}) == [None, *[8] * 6]
    qwen = {"model_type": "qwen2", "sliding_window": 8, "num_hidden_layers": 3, "max_window_layers": 1}
    assert windows(qwen) == [None] * 3
    assert windows({**qwen, "use_sliding_window": True}) == [None, 8, 8]


def test_a_window_that_no_sequence_outgrows_is_left_out() -> None:
    assert windows({"model_type": "mistral", "sliding_window": 256}) == [None, None]


def test_gemma3_rotates_sliding_layers_with_the_local_base() -> None:
    raw = {
        **LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"type": "linear", "factor": 8},
    }
    config = config_from_hf(raw)
    assert config.ropes == (Rope(1e6, 256, "linear", 8.0), Rope(10000.0, 256))
    assert [layer.rope for layer in config.layers] == [1, 1, 1, 1, 1, 0, 1]


def test_smollm3_leaves_each_fourth_layer_unrotated() -> None:
    config = config_from_hf({**LLAMA, "model_type": "smollm3", "num_hidden_layers": 5})
    assert [layer.rope for layer in config.layers] == [0, 0, 0, None, 0]


def test_a_model_that_also_sees_is_run_by_its_text_half(tmp_path: Path, cache_dir: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_hf("gemma3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["vision_tower.embeddings.weight"] = tensors["model.norm.weight"].clone()
    save_file(renamed, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(str(tmp_path), cache_dir=cache_dir)
    assert checkpoint.config == config_from_hf(text)
    assert checkpoint.tensor("norm").shape == (64,)


def test_contexts_are_as_long_as_the_scaling_was_made_for() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert config_from_hf({**LLAMA, "rope_scaling": yarn}).max_len == 1024
    dynamic = config_from_hf({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert (dynamic.max_len, dynamic.ropes[0].original_max_len) == (512, 256)


# Refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"model_type": "mixtral"}, "mixtral is a mixture of experts"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe is a mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "mamba"}, "mamba is unknown; forerun runs llama"),
        ({"model_type": "homemade", "auto_map": {"AutoModel": "x.Y"}}, "homemade with code of its own"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_act": ["silu"]}, "silu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "'su'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_kinds_that_we_do_not_run_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": 10**100}, "vocab_size"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 7}, "rotated in pairs"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "factor"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": 3}, "no_rope_layers"),
    ],
)
def test_values_that_cannot_be_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CorruptModelError, match=named):
        config_from_hf({**LLAMA, **changes})


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type"):
        config_from_hf({})


# GGUF


def gguf_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def gguf_config(arch: str = "llama", **changes: Any) -> Any:
    return config_from_gguf(gguf_metadata(arch, **changes), vocab_size=320, tied_head=True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (gguf_metadata("mamba"), "mamba is unknown; forerun runs llama"),
        (gguf_metadata("qwen3moe"), "qwen3moe is a mixture of experts"),
        (gguf_metadata(expert_count=8), "llama is a mixture of experts"),
        (gguf_metadata() | {"general.type": "adapter"}, "adapter"),
        (gguf_metadata() | {"general.type": "mmproj"}, "mmproj"),
        (gguf_metadata() | {"split.count": 3}, "one of 3 parts"),
        (gguf_metadata(rope__scaling__type="longrope", rope__scaling__factor=2.0), "longrope"),
        (gguf_metadata(rope__dimension_count=8), "rotates 8 of 16"),
        (gguf_metadata(attention__value_length=8), "keys and values"),
        (gguf_metadata(attention__head_count_kv=np.array([2, 1])), "layer to layer"),
    ],
)
def test_gguf_kinds_that_we_do_not_run_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_gguf(values, vocab_size=320, tied_head=True)


@pytest.mark.parametrize("key", ["block_count", "context_length", "attention.layer_norm_rms_epsilon"])
def test_gguf_keys_that_are_missing_are_named(key: str) -> None:
    values = gguf_metadata()
    del values[f"llama.{key}"]
    with pytest.raises(CorruptModelError, match=key):
        config_from_gguf(values, vocab_size=320, tied_head=True)


def test_per_layer_lists_that_agree_are_one_number() -> None:
    assert gguf_config(attention__head_count_kv=np.array([2, 2])).num_kv_heads == 2


def test_the_deepest_gemmas_scale_attention_by_the_width_of_a_head() -> None:
    assert gguf_config("gemma2", attention__key_length=32).attention_scale == pytest.approx(32**-0.5)
    assert gguf_config("gemma2", attention__key_length=32, block_count=46).attention_scale == 16**-0.5
    assert gguf_config("gemma3", attention__key_length=32, block_count=62).attention_scale == 16**-0.5


ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5000.0},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scaled_ropes_of_a_gguf_are_those_of_the_config(
    rope: dict[str, Any], family: str, tmp_path: Path, cache_dir: Path
) -> None:
    model = tiny_model(family, rope_parameters=rope)
    write_gguf(family, model, tmp_path / "tiny.gguf")
    raw = json.loads(model.config.to_json_string(use_diff=False))
    assert load_checkpoint(str(tmp_path / "tiny.gguf"), cache_dir=cache_dir).config.ropes == config_from_hf(raw).ropes


def test_llama3_scaling_of_a_gguf_is_a_list_of_divisors(tmp_path: Path, cache_dir: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    write_gguf("llama", tiny_model("llama", rope_parameters=rope), tmp_path / "tiny.gguf")
    (loaded,) = load_checkpoint(str(tmp_path / "tiny.gguf"), cache_dir=cache_dir).config.ropes
    assert (loaded.kind, loaded.theta) == ("factors", 500000.0)
    np.testing.assert_array_equal(np.float32(loaded.factors), llama3_divisors(rope, 16))


def test_partial_rotation_of_phi3_survives_both_formats(tmp_path: Path, cache_dir: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = save_hf("phi3", tmp_path, rope_parameters=rope)
    write_gguf("phi3", model, tmp_path / "tiny.gguf")
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        assert load_checkpoint(str(path), cache_dir=cache_dir).config.ropes == (Rope(10000.0, 8),)
