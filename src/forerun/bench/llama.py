"""llama.cpp as a peer, through the functions of its C interface in `llama-cpp-python`, on the very file of the target.

Plain decoding is the smallest loop there is: decode one token, take the likeliest of its logits (or draw by llama.cpp's
own samplers), again. Drafts come from that package's own prompt lookup. A text ends where ours would.
"""

import ctypes
import logging
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from forerun.bench import machine
from forerun.bench.machine import Clock
from forerun.bench.measure import Contender, Ids, Passes
from forerun.bench.peer import PeerMissingError, PeerSetup
from forerun.bench.requantise import KINDS, write_gguf_like
from forerun.bench.stats import Run
from forerun.models.load import ForeignFolder
from forerun.models.store import default_cache_dir
from forerun.types import SamplingParams

INSTALL = "pip install --no-binary llama-cpp-python llama-cpp-python"
LOOKUP_TOKENS = 2  # drafts of prompt lookup: the number in that package's documentation for CPUs
_BATCH = 512  # tokens in one call of llama_decode
_FEATURES = {  # what the system calls it, what llama.cpp calls it
    "avx2": "AVX2", "fma": "FMA", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx_vnni": "AVX_VNNI",
    "asimddp": "DOTPROD",
}  # fmt: skip
Choose = Callable[[int], int]  # from a row of the last batch to a token


class LlamaCpp:
    """llama.cpp, plain and with prompt lookup."""

    def __init__(self, setup: PeerSetup) -> None:
        if find_spec("llama_cpp") is None:
            raise PeerMissingError(f"llama-cpp-python isn't installed; {INSTALL}")
        if setup.device != "cpu":
            raise PeerMissingError(f"it is measured on the cpu, forerun runs on {setup.device}; take --device cpu")
        path = model_file(setup)
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        lib = import_module("llama_cpp")
        model = LlamaModel(lib, path, threads=setup.threads, num_positions=setup.num_positions)
        name = f"llama.cpp:{setup.argument}" if setup.argument else "llama.cpp"
        ends = frozenset(setup.checkpoint.tokenizer.eos_ids)
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        plain = f"{name} plain"
        same = not setup.argument
        self.contenders: Sequence[Contender] = (
            _Decoding(plain, model, ends, has_our_weights=same),
            _Decoding(f"{name} prompt lookup", model, ends, lookup, plain, has_our_weights=same),
        )
        self.passes: Passes | None = model
        self.remarks: Sequence[str] = (
            f"llama-cpp-python {lib.__version__} on {path.name}" + ("" if same else ", other weights than ours"),
            build_remark(lib.llama_print_system_info().decode(), machine.cpu_flags()),
        )


def model_file(setup: PeerSetup) -> Path:
    """Return the file to run: the target's, that of the argument, or the target in other blocks, made once."""
    checkpoint = setup.checkpoint
    if setup.argument and setup.argument not in KINDS:
        return Path(setup.argument).expanduser()
    if isinstance(checkpoint, ForeignFolder) or checkpoint.source_kind != "gguf":
        raise PeerMissingError("the target is no GGUF file; name one as --target, or as --peer llama.cpp:FILE.gguf")
    if not setup.argument:
        return checkpoint.path
    folder = (setup.cache_dir or default_cache_dir()) / "bench"
    path = folder / f"{checkpoint.path.stem}.{checkpoint.fingerprint}.{setup.argument}.gguf"
    if not path.exists():
        try:
            write_gguf_like(checkpoint, path, setup.argument)
        except OSError as error:
            raise PeerMissingError(f"can't write {path}: {error.strerror or error}") from error
    return path


def build_remark(system_info: str, cpu_flags: Collection[str]) -> str:
    """Return whether llama.cpp was built for this processor, or what of it the build leaves unused."""
    parts = (part.rpartition(":")[2].split("=") for part in system_info.split("|"))
    built_with = {part[0].strip() for part in parts if len(part) == 2 and part[1].strip() == "1"}
    unused = [name for flag, name in _FEATURES.items() if flag in cpu_flags and name not in built_with]
    if unused:
        return f"UNFAIR: llama.cpp was built without {', '.join(unused)}, which this processor has; {INSTALL}"
    return f"llama.cpp was built natively ({', '.join(sorted(built_with)) or 'no instruction sets named'})"


class LlamaModel:
    """A model in llama.cpp with one sequence of tokens."""

    def __init__(self, lib: Any, path: Path, *, threads: int, num_positions: int) -> None:
        self.lib = lib
        self.length = 0
        self._context_len = 0
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise PeerMissingError(f"llama.cpp can't load {path}")
        limits = lib.llama_context_default_params()
        limits.n_ctx = -(-num_positions // 256) * 256
        limits.n_batch = limits.n_ubatch = _BATCH
        limits.n_threads = limits.n_threads_batch = threads
        limits.swa_full = True  # else rows can't be taken back
        self.context = lib.llama_init_from_model(self._model, limits)
        if not self.context:
            raise PeerMissingError(f"llama.cpp can't make room for {num_positions} tokens of {path}")
        self._num_tokens = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._memory = lib.llama_get_memory(self.context)
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)

    def close(self) -> None:
        """Free it all."""
        self.lib.llama_batch_free(self._batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self._model)

    def decode(self, tokens: Ids, *, num_logits: int) -> None:
        """Append tokens and compute the logits of the last `num_logits`, which end up in one batch."""
        first_wanted = len(tokens) - num_logits
        for begin in range(0, len(tokens), _BATCH):
            part = tokens[begin : begin + _BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = self.length + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = begin + i >= first_wanted
            status = self.lib.llama_decode(self.context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode failed with {status} at position {self.length}")
            self.length += len(part)

    def keep(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not self.lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp can't go back to {length} tokens")
        self.length = length

    def likeliest(self, row: int) -> int:
        """Return the likeliest token after row `row` of the last batch."""
        pointer = self.lib.llama_get_logits_ith(self.context, row)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address is not None, row
        logits = np.frombuffer((ctypes.c_float * self._num_tokens).from_address(address), dtype=np.float32)
        return int(logits.argmax())

    def begin(self, context: Ids) -> None:
        self.keep(0)
        self.decode(context, num_logits=1)
        self._context_len = len(context)

    def step(self, tokens: Ids) -> None:
        self.decode(tokens, num_logits=len(tokens))
        self.lib.llama_synchronize(self.context)

    def back(self) -> None:
        self.keep(self._context_len)

    def end(self) -> None:
        self.keep(0)


class _Sampler:
    """llama.cpp's own samplers for our law: temperature, then top-p, then a draw. Greedy needs none of them."""

    def __init__(self, model: LlamaModel, params: SamplingParams) -> None:
        self._model, self._chain = model, None
        if params.temperature > 0:
            lib = model.lib
            self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            parts = [lib.llama_sampler_init_temp(params.temperature)]
            if params.top_p < 1:
                parts.append(lib.llama_sampler_init_top_p(params.top_p, 1))
            parts.append(lib.llama_sampler_init_dist((params.seed or 0) & 0xFFFFFFFF))
            for part in parts:
                lib.llama_sampler_chain_add(self._chain, part)

    def __call__(self, row: int) -> int:
        if self._chain is None:
            return self._model.likeliest(row)
        return int(self._model.lib.llama_sampler_sample(self._chain, self._model.context, row))

    def close(self) -> None:
        if self._chain is not None:
            self._model.lib.llama_sampler_free(self._chain)


class _Decoding:
    """One way to decode: with drafts of `drafter`, or plain."""

    def __init__(
        self,
        name: str,
        model: LlamaModel,
        end_ids: Collection[int],
        drafter: Callable[[np.ndarray], np.ndarray] | None = None,
        baseline: str | None = None,
        *,
        has_our_weights: bool,
        clock: Clock = perf_counter,
    ) -> None:
        self.name = name
        self.baseline = baseline
        self.has_our_weights = has_our_weights
        self._model, self._end_ids, self._drafter, self._clock = model, end_ids, drafter, clock

    def run(self, prompt_ids: Ids, params: SamplingParams) -> Run:
        assert params.max_tokens is not None
        choose = _Sampler(self._model, params)
        try:
            return self._run(prompt_ids, params.max_tokens, choose)
        finally:
            choose.close()

    def _run(self, prompt_ids: Ids, max_tokens: int, choose: Choose) -> Run:
        model, clock = self._model, self._clock
        model.keep(0)
        start = clock()
        model.decode(prompt_ids, num_logits=1)
        tokens = [choose((len(prompt_ids) - 1) % _BATCH)]
        first_s = last_s = clock()
        while len(tokens) < max_tokens and tokens[-1] not in self._end_ids:
            drafts = self._drafts(prompt_ids, tokens, most=max_tokens - len(tokens) - 1)
            model.decode([tokens[-1], *drafts], num_logits=1 + len(drafts))
            for row, draft in enumerate([*drafts, -1]):
                tokens.append(choose(row))
                if tokens[-1] != draft or draft in self._end_ids:
                    break
            if drafts:
                model.keep(len(prompt_ids) + len(tokens) - 1)
            last_s = clock()
        return Run(tuple(tokens), 1, first_s - start, last_s - first_s)

    def _drafts(self, prompt_ids: Ids, tokens: Ids, *, most: int) -> list[int]:
        if self._drafter is None or most < 1:
            return []
        found: list[int] = self._drafter(np.array([*prompt_ids, *tokens], dtype=np.intc)).tolist()
        return found[:most]
