"""Every family, from both formats: the canonical weights are those of the model that was saved."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from forerun.errors import ModelError
from forerun.models.config import LAYER_TENSORS
from forerun.models.load import load_checkpoint
from forerun.models.weights import Checkpoint
from tests.families import FAMILIES, VOCAB_SIZE, save_hf, tiny_model, write_gguf

HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def expected_weights(family: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The canonical weights, straight from the model's state, as float32."""
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    config: Any = model.config
    gemma = family.startswith("gemma")
    weights = {"embed": state["model.embed_tokens.weight"], "norm": state["model.norm.weight"] + gemma}
    if not config.tie_word_embeddings:
        weights["head"] = state["lm_head.weight"]
    names = dict(HF_NAMES)
    if gemma:
        names["post_attn_norm"] = "post_attention_layernorm.weight"
        names["mlp_norm"] = "pre_feedforward_layernorm.weight"
        names["post_mlp_norm"] = "post_feedforward_layernorm.weight"
    else:
        names["mlp_norm"] = "post_attention_layernorm.weight"
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for part, name in names.items():
            if prefix + name in state:
                weights[f"layers.{index}.{part}"] = state[prefix + name] + (gemma and part.endswith("norm"))
        if family == "phi3":
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            dim = config.hidden_size // heads
            cuts = np.cumsum([heads * dim, kv_heads * dim])
            for part, value in zip("qkv", np.split(state[prefix + "self_attn.qkv_proj.weight"], cuts), strict=True):
                weights[f"layers.{index}.{part}"] = value
            halves = np.split(state[prefix + "mlp.gate_up_proj.weight"], 2)
            weights[f"layers.{index}.gate"], weights[f"layers.{index}.up"] = halves
    return weights


def assert_weights(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert sorted(checkpoint.names()) == sorted(expected)
    assert {name.split(".")[-1] for name in expected} <= {"embed", "norm", "head", *LAYER_TENSORS}
    for name, value in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == value.shape, name
        np.testing.assert_array_equal(tensor.to_float32(), value, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_folder_are_those_of_the_saved_model(family: str, tmp_path: Path, cache_dir: Path) -> None:
    model = save_hf(family, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), cache_dir=cache_dir)
    assert checkpoint.config.family == family
    assert checkpoint.source_kind == "safetensors"
    assert_weights(checkpoint, expected_weights(family, model))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_config_of_a_gguf_are_those_of_the_folder(family: str, tmp_path: Path, cache_dir: Path) -> None:
    model = save_hf(family, tmp_path)
    write_gguf(family, model, tmp_path / "tiny.gguf")
    checkpoint = load_checkpoint(str(tmp_path / "tiny.gguf"), cache_dir=cache_dir)
    folder = load_checkpoint(str(tmp_path), cache_dir=cache_dir)
    assert_weights(checkpoint, expected_weights(family, model))
    family_seen = "llama" if family == "mistral" else family  # the file doesn't tell the two apart
    wanted = vars(folder.config) | {"family": family_seen}
    assert {**vars(checkpoint.config), "norm_eps": 0} == {**wanted, "norm_eps": 0}
    assert checkpoint.config.norm_eps == pytest.approx(folder.config.norm_eps)
    assert checkpoint.tokenizer.same_vocabulary(folder.tokenizer) is None


@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen3"])
def test_biases_are_loaded_where_the_config_has_them(family: str, tmp_path: Path, cache_dir: Path) -> None:
    settings = {"attention_bias": True} | ({} if family == "qwen3" else {"mlp_bias": True})
    model = save_hf(family, tmp_path, **settings)
    write_gguf(family, model, tmp_path / "tiny.gguf")
    for path in (tmp_path, tmp_path / "tiny.gguf"):
        assert_weights(load_checkpoint(str(path), cache_dir=cache_dir), expected_weights(family, model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_folders_keep_their_kind(family: str, dtype: str, tmp_path: Path, cache_dir: Path) -> None:
    model = save_hf(family, tmp_path, dtype=dtype)
    checkpoint = load_checkpoint(str(tmp_path), cache_dir=cache_dir)
    kind, stored = {"bfloat16": ("BF16", np.uint16), "float16": ("F16", np.float16)}[dtype]
    assert set(checkpoint.kinds) == {kind}
    tensor = checkpoint.tensor("layers.1.down")
    assert (tensor.kind, tensor.data.dtype, tensor.data.shape) == (kind, stored, tensor.shape)
    assert_weights(checkpoint, expected_weights(family, model))


def test_sharded_folders_are_read_through_their_index(tmp_path: Path, cache_dir: Path) -> None:
    model = save_hf("llama", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_weights(load_checkpoint(str(tmp_path), cache_dir=cache_dir), expected_weights("llama", model))


def test_nbytes_is_the_size_of_the_weights_as_stored(llama_folder: Path, cache_dir: Path) -> None:
    checkpoint = load_checkpoint(str(llama_folder), cache_dir=cache_dir)
    assert checkpoint.nbytes == sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names())


def test_weights_are_views_of_the_mapped_file(llama_gguf: Path, cache_dir: Path) -> None:
    checkpoint = load_checkpoint(str(llama_gguf), cache_dir=cache_dir)
    assert not checkpoint.tensor("layers.0.down").data.flags.owndata
    assert not checkpoint.tensor("layers.0.down").data.flags.writeable


def test_fingerprint_depends_on_content_alone(tmp_path: Path, cache_dir: Path) -> None:
    prints = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_hf("llama", tmp_path / name, seed=seed)
        prints.append(load_checkpoint(str(tmp_path / name), cache_dir=cache_dir).fingerprint)
    assert prints[0] == prints[1] != prints[2]


# Quantised kinds


def _can_quantise(kind: gguf.GGMLQuantizationType) -> bool:
    block_len, _ = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.quantize(np.zeros((1, block_len), np.float32), kind)
    except NotImplementedError:
        return False
    return True


FLOATS = ("F32", "F64")
ALL_KINDS = [kind for kind in gguf.GGML_QUANT_SIZES if kind.name[0] != "I" or kind.name[1] == "Q"]
WRITABLE = [kind.name for kind in ALL_KINDS if kind.name not in FLOATS and _can_quantise(kind)]
READABLE = [kind.name for kind in ALL_KINDS if kind in gguf.quants._type_traits and kind.name not in WRITABLE]


def test_kinds_to_be_tested_are_found() -> None:
    assert {"F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"} <= set(WRITABLE)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ1_M"} <= set(READABLE)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("kind", WRITABLE)
def test_quantised_files_give_the_values_that_were_quantised(
    kind: str, family: str, tmp_path: Path, cache_dir: Path
) -> None:
    model = tiny_model(family, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    write_gguf(family, model, tmp_path / "q.gguf", quant=kind)
    checkpoint = load_checkpoint(str(tmp_path / "q.gguf"), cache_dir=cache_dir)
    number = gguf.GGMLQuantizationType[kind]
    expected = expected_weights(family, model)
    for name, value in expected.items():
        if value.ndim == 2:
            expected[name] = gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
    assert_weights(checkpoint, expected)
    tensor = checkpoint.tensor("layers.0.q")
    assert tensor.kind == kind
    if kind not in ("F16", "BF16"):
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[number]
        assert tensor.data.dtype == np.uint8
        assert tensor.data.shape == (tensor.shape[0], tensor.shape[1] // block_len * block_bytes)


@pytest.mark.parametrize("kind", READABLE)
def test_blocks_of_kinds_without_a_quantiser_are_dequantised_as_gguf_does(
    kind: str, tmp_path: Path, cache_dir: Path
) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 128, (VOCAB_SIZE, 256 // block_len * block_bytes), dtype=np.uint8)
    blocks %= 60  # no exponent of a float16 scale becomes that of infinity
    model = tiny_model("llama", hidden_size=256, num_hidden_layers=1)
    write_gguf("llama", model, tmp_path / "plain.gguf", replace={"output.weight": (blocks, number)})
    checkpoint = load_checkpoint(str(tmp_path / "plain.gguf"), cache_dir=cache_dir)
    tensor = checkpoint.tensor("head")
    assert (tensor.kind, tensor.shape) == (kind, (VOCAB_SIZE, 256))
    np.testing.assert_array_equal(tensor.data, blocks)
    np.testing.assert_array_equal(tensor.to_float32(), gguf.quants.dequantize(blocks, number))


# What doesn't fit


def _edited(path: Path, edit: str) -> str:
    """Write a folder whose weights are changed by `edit`; return the tensor that the error must name."""
    from safetensors.torch import load_file, save_file

    save_hf("llama", path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if edit == "missing":
        del tensors[name]
    elif edit == "wrong shape":
        tensors[name] = tensors[name].T.contiguous()
    elif edit == "wrong kind":
        tensors[name] = tensors[name].to(torch.float64)
    else:
        name = "model.layers.1.mlp.extra.weight"
        tensors[name] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors")
    return name


@pytest.mark.parametrize("edit", ["missing", "wrong shape", "wrong kind", "extra"])
def test_a_weight_that_does_not_fit_the_config_is_named(edit: str, tmp_path: Path, cache_dir: Path) -> None:
    name = _edited(tmp_path, edit)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_checkpoint(str(tmp_path), cache_dir=cache_dir)


def test_rotary_buffers_and_a_tied_head_are_ignored(tmp_path: Path, cache_dir: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_hf("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_weights(load_checkpoint(str(tmp_path), cache_dir=cache_dir), expected_weights("qwen2", model))
