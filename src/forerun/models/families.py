"""The families as data: what a `config.json` or the metadata of a GGUF file means as a `DecoderConfig`.

Which keys a family reads, what they default to when absent, and what is refused by name because no field of
`DecoderConfig` could honour it. Where the tensors of a family lie is in `layout.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.errors import CorruptModelError, ModelError, UnsupportedModelError
from forerun.models.config import DecoderConfig, Layer, Rope

Json = Mapping[str, Any]
_MAX_LAYERS = 1000
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """What all models of a family share."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json keys, where not as in _DEFAULTS
    activation_key: str = "hidden_act"
    qk_norm: bool = False
    gemma: bool = False  # norms store w for 1 + w, norms after each half, scaled embeddings, soft caps
    fused: bool = False  # q, k, v in one matrix; gate and up in another
    qkv_bias: bool = False  # always, whatever the config says
    gguf_interleaved: bool = False  # GGUF files hold the rows of Q and K in the order of the original Llama code


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "sliding_window": None,
}  # fmt: skip
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
_GEMMA3_DEFAULTS = {"rope_theta": 1e6, "max_position_embeddings": 131072, "vocab_size": 262208}

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf_interleaved=True),
    "mistral": Family({"sliding_window": 4096}, gguf_interleaved=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family({"head_dim": 128}, qk_norm=True),
    "smollm3": Family({"rope_theta": 2e6, "tie_word_embeddings": True}, gguf_interleaved=True),
    "gemma2": Family(_GEMMA_DEFAULTS | _GEMMA2_DEFAULTS, "hidden_activation", gemma=True),
    "gemma3": Family(_GEMMA_DEFAULTS | _GEMMA3_DEFAULTS, "hidden_activation", gemma=True, qk_norm=True),
    "phi3": Family({"rms_norm_eps": 1e-5}, fused=True),
}
_HF_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")


def _supported() -> str:
    return "forerun runs " + ", ".join(FAMILIES)


class _Settings:
    """A config.json with the defaults of its family; a missing or odd value becomes a ModelError that names it."""

    def __init__(self, raw: Json, defaults: Json) -> None:
        self._values = {**_DEFAULTS, **defaults, **raw}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def number(self, key: str) -> float:
        return _as_number(self._values.get(key), key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        return _as_count(default if value is None else value, key)

    def optional(self, key: str) -> float | None:
        return None if self._values.get(key) is None else self.number(key)


def _as_number(value: Any, key: str) -> float:
    """Return `value` as a finite float or raise CorruptModelError naming `key`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        raise CorruptModelError(f"the model's configuration has {key} = {value!r:.80}, expected a number")
    return float(value)


def _as_count(value: Any, key: str) -> int:
    """Return `value` as a positive int or raise CorruptModelError naming `key`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 48:
        raise CorruptModelError(
            f"the model's configuration has {key} = {value!r:.80}, expected a positive whole number"
        )
    return value


# config.json


def config_from_hf(raw: Json) -> DecoderConfig:
    """Return what a `config.json` describes, as transformers 4 or 5 write it.

    Raises UnsupportedModelError, by name, for what we don't run, and CorruptModelError for values that can't be.
    """
    _refuse_hf(raw)
    family = _HF_TYPES[raw["model_type"]]
    if isinstance(raw.get("text_config"), Mapping):
        text = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {**text, **raw["text_config"], "model_type": raw["model_type"]}
        _refuse_hf(raw)
    traits = FAMILIES[family]
    settings = _Settings(raw, traits.defaults)
    heads = settings.count("num_attention_heads")
    hidden = settings.count("hidden_size")
    head_dim = settings.count("head_dim", hidden // heads)
    max_len = settings.count("max_position_embeddings")
    num_layers = _depth(settings.count("num_hidden_layers"))
    kinds = _layer_kinds(family, settings, num_layers)
    ropes = _hf_ropes(family, settings, head_dim, max_len)
    max_len = max(max_len, *(_stretched(rope) for rope in ropes))
    scale = settings.number("query_pre_attn_scalar") if traits.gemma else float(head_dim)
    if scale <= 0:
        raise CorruptModelError(f"the model's configuration has query_pre_attn_scalar = {scale}, expected more than 0")
    config = DecoderConfig(
        family=family,
        vocab_size=settings.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=settings.count("num_key_value_heads", heads),
        head_dim=head_dim,
        max_len=max_len,
        norm_eps=settings.number("rms_norm_eps"),
        layers=_layers(family, kinds, _window(settings), max_len, _rotated(family, settings, num_layers)),
        ropes=ropes,
        attention_scale=scale**-0.5,
        activation=_activation(settings.get(traits.activation_key)),
        tied_head=bool(settings.get("tie_word_embeddings")),
        qk_norm=traits.qk_norm,
        post_norms=traits.gemma,
        attention_softcap=settings.optional("attn_logit_softcapping") if traits.gemma else None,
        logit_softcap=settings.optional("final_logit_softcapping") if traits.gemma else None,
        embed_scale=math.sqrt(hidden) if traits.gemma else 1.0,
    )
    return _checked(config)


def hf_biases(raw: Json) -> tuple[str, ...]:
    """Return the canonical names of the biases that each layer of a `config.json` has."""
    if FAMILIES[_HF_TYPES[raw["model_type"]]].qkv_bias:
        return ("q_bias", "k_bias", "v_bias")
    attention = ("q_bias", "k_bias", "v_bias", "o_bias") if raw.get("attention_bias") else ()
    return (*attention, *(("gate_bias", "up_bias", "down_bias") if raw.get("mlp_bias") else ()))


def _refuse_hf(raw: Json) -> None:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"config.json has no model_type; {_supported()}")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"the weights are quantised with {method}, which forerun doesn't read: take the original weights or a GGUF"
        )
    if "moe" in model_type or model_type == "mixtral" or any(raw.get(key) for key in _MOE_KEYS):
        raise UnsupportedModelError(f"{model_type} is a mixture of experts, which forerun doesn't run; {_supported()}")
    if model_type not in _HF_TYPES:
        remote = " with code of its own (auto_map)" if raw.get("auto_map") else ""
        raise UnsupportedModelError(f"model type {model_type}{remote} is unknown; {_supported()}")
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{model_type} with use_bidirectional_attention is not a left-to-right model")


def _activation(name: Any) -> Any:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r:.80} is unknown; forerun has {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _window(settings: _Settings) -> int | None:
    return None if settings.get("sliding_window") is None else settings.count("sliding_window")


def _layer_kinds(family: str, settings: _Settings, num_layers: int) -> tuple[str, ...]:
    """Return full_attention or sliding_attention for each layer."""
    if family in ("mistral", "phi3"):
        return (_SLIDING,) * num_layers
    if family == "llama" or (family in ("qwen2", "qwen3", "smollm3") and not settings.get("use_sliding_window")):
        return (_FULL,) * num_layers
    explicit = settings.get("layer_types")
    if explicit is None:
        return _default_kinds(family, settings, num_layers)
    if not isinstance(explicit, Sequence) or len(explicit) != num_layers:
        raise CorruptModelError(f"the model's configuration has layer_types that don't name {num_layers} layers")
    unknown = [kind for kind in explicit if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is unknown; forerun runs {_FULL} and {_SLIDING}")
    return tuple(explicit)


def _default_kinds(family: str, settings: _Settings, num_layers: int) -> tuple[str, ...]:
    if family in ("gemma2", "gemma3"):
        key = "sliding_window_pattern" if settings.get("sliding_window_pattern") else "_sliding_window_pattern"
        period = 2 if family == "gemma2" else settings.count(key, 6)
        return _periodic_kinds(period, num_layers)
    if family == "smollm3":
        rotated = _rotated(family, settings, num_layers)
        return tuple(_FULL if rotates else _SLIDING for rotates in rotated)
    first = settings.get("max_window_layers")
    first = 28 if first is None else int(_as_number(first, "max_window_layers"))
    return tuple(_SLIDING if index >= first else _FULL for index in range(num_layers))


def _periodic_kinds(period: int, num_layers: int) -> tuple[str, ...]:
    """Return layer kinds in which each `period`-th layer has full attention."""
    return tuple(_SLIDING if (index + 1) % period else _FULL for index in range(num_layers))


def _rotated(family: str, settings: _Settings, num_layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it rotates queries and keys."""
    if family != "smollm3":
        return (True,) * num_layers
    explicit = settings.get("no_rope_layers")  # despite its name, 1 is a layer that rotates
    if explicit is None:
        return _periodic_rotation(settings.count("no_rope_layer_interval", 4), num_layers)
    if not isinstance(explicit, Sequence) or len(explicit) < num_layers:
        raise CorruptModelError(f"the model's configuration has no_rope_layers that don't name {num_layers} layers")
    return tuple(bool(flag) for flag in explicit[:num_layers])


def _periodic_rotation(period: int, num_layers: int) -> tuple[bool, ...]:
    """Return flags in which each `period`-th layer doesn't rotate."""
    return tuple((index + 1) % period != 0 for index in range(num_layers))


def _layers(
    family: str, kinds: Sequence[str], window: int | None, max_len: int, rotated: Sequence[bool]
) -> tuple[Layer, ...]:
    """Build the layers; a window that no sequence can outgrow is left out."""
    window = window if window is not None and window < max_len else None
    layers = []
    for kind, rotates in zip(kinds, rotated, strict=True):
        rope = int(family == "gemma3" and kind == _SLIDING) if rotates else None
        layers.append(Layer(window if kind == _SLIDING else None, rope))
    return tuple(layers)


def _hf_ropes(family: str, settings: _Settings, head_dim: int, max_len: int) -> tuple[Rope, ...]:
    """Return the ropes of a model: one, or for Gemma 3 that of full and that of sliding layers."""
    modern = settings.get("rope_parameters")
    modern = modern if isinstance(modern, Mapping) else {}
    scaling = settings.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    if family == "gemma3":
        nested = _FULL in modern or _SLIDING in modern
        full = {**scaling, **(modern.get(_FULL) or {} if nested else modern)}
        local = {"rope_theta": settings.get("rope_local_base_freq") or 10000.0, **(modern.get(_SLIDING) or {})}
        return _hf_rope(family, settings, full, head_dim, max_len), _hf_rope(family, settings, local, head_dim, max_len)
    return (_hf_rope(family, settings, {**scaling, **modern}, head_dim, max_len),)


def _hf_rope(family: str, settings: _Settings, given: Json, head_dim: int, max_len: int) -> Rope:
    original = settings.get("original_max_position_embeddings") or max_len
    values = {
        "rope_theta": settings.get("rope_theta"),
        "partial_rotary_factor": settings.get("partial_rotary_factor"),
        "original_max_position_embeddings": original,
        **{key: value for key, value in given.items() if value is not None},
    }
    kind = values.get("rope_type", values.get("type", "default"))
    rotary_dim = _rotary_dim(family, values["partial_rotary_factor"], head_dim)
    theta = _as_number(values["rope_theta"], "rope_theta")
    if kind == "default":
        return Rope(theta, rotary_dim)
    known = ("linear", "dynamic", "llama3", "yarn") if family != "phi3" else ()  # phi3 says yarn and means longrope
    if kind not in known:
        raise UnsupportedModelError(
            f"{family} with rope type {kind!r} is unknown; forerun has {', '.join(('default', *known))} there"
        )
    factor = _as_number(values.get("factor"), f"factor of {kind} rope")
    if kind == "dynamic":
        return Rope(theta, rotary_dim, kind, factor, original_max_len=max_len)
    if kind == "linear":
        return Rope(theta, rotary_dim, kind, factor)
    original = _as_count(values["original_max_position_embeddings"], "original_max_position_embeddings")
    if kind == "yarn":
        return _yarn(theta, rotary_dim, factor, original, values)
    low, high = (_as_number(values.get(key), key) for key in ("low_freq_factor", "high_freq_factor"))
    return Rope(theta, rotary_dim, kind, factor, original, low, high)


def _yarn(theta: float, rotary_dim: int, factor: float, original: int, values: Json) -> Rope:
    attention = values.get("attention_factor")
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    if attention is None and mscale and mscale_all:
        attention = _magnitude(factor, _as_number(mscale, "mscale")) / _magnitude(
            factor, _as_number(mscale_all, "mscale_all_dim")
        )
    return Rope(
        theta,
        rotary_dim,
        "yarn",
        factor,
        original,
        beta_fast=_as_number(values.get("beta_fast") or 32.0, "beta_fast"),
        beta_slow=_as_number(values.get("beta_slow") or 1.0, "beta_slow"),
        attention_factor=_magnitude(factor, 1.0) if attention is None else _as_number(attention, "attention_factor"),
        truncate=bool(values.get("truncate", True)),
    )


def _magnitude(factor: float, mscale: float) -> float:
    """The factor of cos and sin that YaRN uses (Peng et al. 2023, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _stretched(rope: Rope) -> int:
    """Return the positions that a rope's scaling was made for, 0 if it says nothing about that."""
    return int(rope.factor * rope.original_max_len) if rope.kind in ("yarn", "dynamic") else 0


def _rotary_dim(family: str, partial: Any, head_dim: int) -> int:
    share = 1.0 if partial is None else _as_number(partial, "partial_rotary_factor")
    if not 0.0 < share <= 1.0:
        raise CorruptModelError(f"the model's configuration has partial_rotary_factor = {share}, expected 0 to 1")
    if share != 1.0 and family != "phi3":
        raise UnsupportedModelError(f"{family} with partial_rotary_factor {share} is unknown; only phi3 has one")
    return int(head_dim * share)


def _depth(num_layers: int) -> int:
    """Return `num_layers` if there can be such a net: a damaged number must not become a list of that length."""
    if num_layers > _MAX_LAYERS:
        raise CorruptModelError(f"the model's configuration has {num_layers} layers, expected at most {_MAX_LAYERS}")
    return num_layers


def _checked(config: DecoderConfig) -> DecoderConfig:
    """Return `config` if its sizes fit together, else raise CorruptModelError."""
    if config.num_heads % config.num_kv_heads:
        raise CorruptModelError(f"{config.num_heads} heads can't share {config.num_kv_heads} key-value heads")
    if any(rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= config.head_dim for rope in config.ropes):
        raise CorruptModelError(f"a head of {config.head_dim} can't be rotated in pairs as the configuration says")
    if any(rope.theta <= 0 or rope.factor <= 0 for rope in config.ropes):
        raise CorruptModelError("the model's configuration has a rope with a base or factor that is not positive")
    return config


# GGUF


class _Metadata:
    """The metadata of one architecture; values are checked as they are taken."""

    def __init__(self, values: Json, arch: str) -> None:
        self._values, self._arch = values, arch

    def get(self, key: str) -> Any:
        value = self._values.get(f"{self._arch}.{key}")
        if isinstance(value, np.ndarray) and key != "attention.sliding_window_pattern":
            return self._uniform(value, key)
        return value

    def _uniform(self, value: np.ndarray, key: str) -> Any:
        """Per-layer lists are fine as long as all layers agree."""
        if value.size == 0 or (value != value[0]).any():
            raise UnsupportedModelError(f"{self._arch}.{key} differs from layer to layer, which forerun doesn't run")
        return value[0].item()

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        return _as_count(default if value is None else value, f"{self._arch}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        return _as_number(default if value is None else value, f"{self._arch}.{key}")


def config_from_gguf(values: Json, *, vocab_size: int, tied_head: bool, factors: Sequence[float] = ()) -> DecoderConfig:
    """Return what the metadata of a GGUF file describes.

    `vocab_size` is the rows of the embedding; `factors` the values of `rope_freqs.weight`, if the file has it.
    Raises UnsupportedModelError, by name, for what we don't run, and CorruptModelError for values that can't be.
    """
    family = _gguf_family(values)
    traits, meta = FAMILIES[family], _Metadata(values, family)
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    if meta.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{family} with keys and values of different length is unknown to forerun")
    num_layers = _depth(meta.count("block_count"))
    ropes = _gguf_ropes(family, meta, head_dim, factors)
    max_len = max(meta.count("context_length"), *(_stretched(rope) for rope in ropes))
    window = meta.count("attention.sliding_window") if meta.get("attention.sliding_window") else None
    rotated = _periodic_rotation(4, num_layers) if family == "smollm3" else (True,) * num_layers
    config = DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=meta.count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=meta.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_len=max_len,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        layers=_layers(family, _gguf_kinds(family, meta, num_layers), window, max_len, rotated),
        ropes=ropes,
        attention_scale=_gguf_scale(family, num_layers, hidden // heads, head_dim),
        activation="gelu_tanh" if traits.gemma else "silu",
        tied_head=tied_head,
        qk_norm=traits.qk_norm,
        post_norms=traits.gemma,
        attention_softcap=_softcap(meta, "attn_logit_softcapping", 50.0 if family == "gemma2" else None),
        logit_softcap=_softcap(meta, "final_logit_softcapping", 30.0 if family == "gemma2" else None),
        embed_scale=math.sqrt(hidden) if traits.gemma else 1.0,
    )
    return _checked(config)


def _gguf_family(values: Json) -> str:
    arch = values.get("general.architecture")
    if not isinstance(arch, str):
        raise CorruptModelError("the GGUF file has no general.architecture; fetch the file again")
    kind, parts, experts = (values.get(key) for key in ("general.type", "split.count", f"{arch}.expert_count"))
    if isinstance(kind, str) and kind != "model":
        raise UnsupportedModelError(f"the GGUF file is of type {kind}, not a whole model; name the model's own file")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(f"the GGUF file is one of {parts} parts; join them with llama-gguf-split --merge")
    if "moe" in arch or (isinstance(experts, int) and experts > 0):
        raise UnsupportedModelError(f"{arch} is a mixture of experts, which forerun doesn't run; {_supported()}")
    if arch not in FAMILIES:
        raise UnsupportedModelError(f"architecture {arch} is unknown; {_supported()}")
    return arch


def _gguf_kinds(family: str, meta: _Metadata, num_layers: int) -> tuple[str, ...]:
    """Return the layers' kinds; files seldom say, the pattern belongs to the family."""
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.size != num_layers:
            raise CorruptModelError(f"sliding_window_pattern names {pattern.size} layers, the model has {num_layers}")
        return tuple(_SLIDING if slides else _FULL for slides in pattern)
    if family in ("gemma2", "gemma3"):
        return _periodic_kinds(
            _as_count(pattern or (2 if family == "gemma2" else 6), "sliding_window_pattern"), num_layers
        )
    return ((_SLIDING if family in ("llama", "mistral", "phi3") else _FULL),) * num_layers


def _gguf_scale(family: str, num_layers: int, heads_share: int, head_dim: int) -> float:
    """Return the attention scale. Files don't hold it: the 27B models of Gemma, told by their depth, differ."""
    deep = {"gemma2": 46, "gemma3": 62}.get(family) == num_layers
    scale: float = (heads_share if deep else head_dim) ** -0.5
    return scale


def _softcap(meta: _Metadata, key: str, default: float | None) -> float | None:
    return default if meta.get(key) is None else meta.number(key)


def _gguf_ropes(family: str, meta: _Metadata, head_dim: int, factors: Sequence[float]) -> tuple[Rope, ...]:
    theta = meta.number("rope.freq_base", 10000.0)
    rotary_dim = meta.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and family != "phi3":
        raise UnsupportedModelError(f"{family} that rotates {rotary_dim} of {head_dim} is unknown; only phi3 does so")
    main = _gguf_rope(meta, theta, rotary_dim, factors)
    if family != "gemma3":
        return (main,)
    return main, Rope(meta.number("rope.freq_base_swa", 10000.0), rotary_dim)


def _gguf_rope(meta: _Metadata, theta: float, rotary_dim: int, factors: Sequence[float]) -> Rope:
    kind = meta.get("rope.scaling.type") or ("linear" if meta.get("rope.scale_linear") else "none")
    if len(factors):
        if len(factors) * 2 != rotary_dim or not all(value > 0 for value in factors):
            raise CorruptModelError(f"rope_freqs.weight has {len(factors)} values, expected {rotary_dim // 2} above 0")
        return Rope(theta, rotary_dim, "factors", factors=tuple(float(value) for value in factors))
    if kind == "none":
        return Rope(theta, rotary_dim)
    factor = meta.number("rope.scaling.factor", meta.get("rope.scale_linear"))
    if kind == "linear":
        return Rope(theta, rotary_dim, "linear", factor)
    if kind != "yarn":
        raise UnsupportedModelError(f"rope scaling {kind!r} is unknown; forerun has linear, yarn and llama3 in GGUF")
    original = meta.count("rope.scaling.original_context_length")
    return Rope(
        theta,
        rotary_dim,
        "yarn",
        factor,
        original,
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_magnitude(factor, 1.0) * meta.number("rope.scaling.attn_factor", 1.0),
    )
