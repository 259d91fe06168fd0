"""Other engines on the same weights, in the same run. One class each, and a line in `PEERS`.

A peer is made from our own checkpoint: its weights, its token ids; so texts can be compared token by token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from forerun.bench.llama import LlamaCpp
from forerun.bench.machine import Clock
from forerun.bench.measure import Contender, Ids, Passes
from forerun.bench.peer import Peer, PeerMissingError, PeerSetup
from forerun.bench.requantise import KINDS
from forerun.bench.stats import Run
from forerun.errors import OptionError
from forerun.models.config import DecoderConfig, Rope
from forerun.models.layout import hf_sources
from forerun.models.load import ForeignFolder
from forerun.models.weights import Checkpoint
from forerun.types import SamplingParams

_HF_DTYPES = ("fp32", "bf16", "fp16")
LOOKUP_TOKENS = 10  # drafts of prompt lookup: the number in the documentation of `transformers`


def open_peer(name: str, setup: PeerSetup) -> Peer:
    """Load a peer. Raises PeerMissingError if it isn't installed or can't run this model."""
    base, _, argument = name.partition(":")
    return PEERS[base](setup._replace(argument=argument))


def check_peer(name: str) -> None:
    """Raise OptionError for a name that no peer has, or for a file that isn't there."""
    base, colon, argument = name.partition(":")
    if base not in PEERS or (colon and base != "llama.cpp"):
        raise OptionError(f"peer is {name!r}; expected one of {', '.join(PEERS)}")
    if colon and argument not in KINDS and not Path(argument).expanduser().is_file():
        raise OptionError(f"peer is {name!r}; expected {' or '.join(KINDS)} or a GGUF file that exists after the colon")


class Transformers:
    """The `transformers` library: `generate`, plain and with prompt lookup."""

    def __init__(self, setup: PeerSetup) -> None:
        if find_spec("transformers") is None or find_spec("torch") is None:
            raise PeerMissingError("transformers isn't installed; pip install 'forerun[torch]'")
        import torch

        torch.set_num_threads(setup.threads)
        dtype = setup.dtype if setup.dtype in _HF_DTYPES else "bf16"
        model = hf_model(setup.checkpoint, dtype).to(setup.device).eval()
        same = setup.checkpoint.source_kind == "gguf" or dtype == setup.dtype  # else we have rounded them ourselves
        eos_ids = list(setup.checkpoint.tokenizer.eos_ids)
        self.contenders: Sequence[Contender] = (
            _Generate("transformers plain", model, eos_ids, has_our_weights=same),
            _Generate(
                "transformers prompt lookup", model, eos_ids, LOOKUP_TOKENS, "transformers plain", has_our_weights=same
            ),
        )
        self.passes: Passes | None = None
        self.remarks: Sequence[str] = (
            [] if dtype == setup.dtype else [f"transformers has no {setup.dtype}: it runs the weights in {dtype}"]
        )


PEERS: dict[str, Callable[[PeerSetup], Peer]] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


@dataclass
class _Generate:
    """One way to call `generate`."""

    name: str
    model: Any
    eos_ids: Sequence[int]
    lookup_tokens: int | None = None
    baseline: str | None = None
    has_our_weights: bool = True
    clock: Clock = perf_counter

    def run(self, prompt_ids: Ids, params: SamplingParams) -> Run:
        import torch
        from transformers import GenerationConfig

        sampling = {}
        if params.temperature > 0:
            sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": 0}  # the default is 50
        settings = GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            eos_token_id=list(self.eos_ids) or None,
            pad_token_id=self.eos_ids[0] if self.eos_ids else 0,
            prompt_lookup_num_tokens=self.lookup_tokens,
            **sampling,
        )
        arrivals = _Arrivals(self.clock)
        ids = torch.tensor([list(prompt_ids)], device=self.model.device)
        torch.manual_seed(params.seed or 0)
        start = self.clock()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=arrivals
            )
        tokens = tuple(out[0, len(prompt_ids) :].tolist())
        first_s, last_s = arrivals.times[0], arrivals.times[-1]
        return Run(tokens, arrivals.num_first, first_s - start, last_s - first_s)


class _Arrivals:
    """A streamer that notes when tokens come. `generate` hands it the prompt first, then what each step wrote."""

    def __init__(self, clock: Clock) -> None:
        self.times: list[float] = []
        self.num_first = 0
        self._clock = clock
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if not self.times:
            self.num_first = value.numel()
        self.times.append(self._clock())

    def end(self) -> None:
        """Nothing is left to show."""


def hf_model(checkpoint: Checkpoint | ForeignFolder, dtype: str) -> Any:
    """Return the `transformers` model with the very weights of `checkpoint`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    softcap = isinstance(checkpoint, Checkpoint) and checkpoint.config.attention_softcap
    eager = {"attn_implementation": "eager"} if softcap else {}
    if isinstance(checkpoint, ForeignFolder) or checkpoint.source_kind == "safetensors":
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch_dtype, **eager)
    else:
        class_name, settings = hf_settings(checkpoint.config, checkpoint.names())
        model_class = getattr(transformers, class_name + "ForCausalLM")
        config_class = getattr(transformers, class_name.replace("Gemma3", "Gemma3Text") + "Config")
        weights = _hf_weights(checkpoint, torch_dtype)
        config = config_class(**settings)
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch_dtype, **eager)
        _set_rope_factors(model, checkpoint.config)
    model.generation_config = transformers.GenerationConfig()  # the model's own would fill in what we leave open
    return model


def _hf_weights(checkpoint: Checkpoint, dtype: Any) -> dict[str, Any]:
    """Return the weights under the names of `transformers`, one at a time in float32, kept in `dtype`."""
    import torch

    weights: dict[str, Any] = {}
    first_layer = [name.removeprefix("layers.0.") for name in checkpoint.names() if name.startswith("layers.0.")]
    biases = tuple(name for name in first_layer if name.endswith("_bias"))
    for canonical, source in hf_sources(checkpoint.config, biases, {}).items():
        values = checkpoint.tensor(canonical).to_float32()
        tensor = torch.tensor(values - 1.0 if source.plus_one else values).to(dtype)
        if not source.last:
            weights[source.name] = tensor
            continue
        fused = weights.setdefault(source.name, torch.empty(source.stored, dtype=dtype))
        fused[source.first : source.last] = tensor
    return weights


def hf_settings(config: DecoderConfig, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the stem of the class names in `transformers`, and the settings of its configuration.

    Raises PeerMissingError for rotary scalings that can't be said back exactly.
    """
    windows = {layer.window for layer in config.layers if layer.window is not None}
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_len, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head, "sliding_window": next(iter(windows), None),
        "rope_parameters": _rope_parameters(config.ropes[0], config.head_dim), "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    stem = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
            "gemma2": "Gemma2", "gemma3": "Gemma3", "phi3": "Phi3"}[config.family]  # fmt: skip
    if config.family == "llama":
        settings |= {"attention_bias": "layers.0.o_bias" in names, "mlp_bias": "layers.0.up_bias" in names}
        if windows:
            stem = "Mistral"
    if config.family in ("qwen2", "qwen3", "smollm3", "gemma2", "gemma3"):
        kinds = ["sliding_attention" if layer.window is not None else "full_attention" for layer in config.layers]
        settings |= {"layer_types": kinds, "use_sliding_window": bool(windows)}
    if config.family == "smollm3":
        settings["no_rope_layers"] = [int(layer.rope is not None) for layer in config.layers]
    if config.family.startswith("gemma"):
        settings |= {
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap, "hidden_activation": "gelu_pytorch_tanh",
        }  # fmt: skip
    if config.family == "gemma3":
        full, local = (_rope_parameters(rope, config.head_dim) for rope in config.ropes)
        settings["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return stem, settings


def _rope_parameters(rope: Rope, head_dim: int) -> Mapping[str, Any]:
    shared: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.rotary_dim not in (0, head_dim):
        shared["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.kind in ("none", "factors"):  # factors are set on the built model
        return shared
    if rope.kind == "linear":
        return {**shared, "rope_type": "linear", "factor": rope.factor}
    if rope.kind == "yarn":
        attention = 0.1 * math.log(rope.factor) + 1.0 if rope.attention_factor is None else rope.attention_factor
        return {
            **shared, "rope_type": "yarn", "factor": rope.factor, "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow, "attention_factor": attention, "truncate": rope.truncate,
            "original_max_position_embeddings": rope.original_max_len,
        }  # fmt: skip
    raise PeerMissingError(f"{rope.kind} rotary scaling can't be handed over from GGUF; name the Hugging Face folder")


def _set_rope_factors(model: Any, config: DecoderConfig) -> None:
    """Divide the rotary frequencies by explicit factors, as GGUF stores the scaling of Llama 3."""
    rope = config.ropes[0]
    if rope.kind == "factors":
        import torch

        frequencies = model.model.rotary_emb.inv_freq
        frequencies /= torch.tensor(rope.factors, dtype=frequencies.dtype)
