"""The cpu backend's Session: Python plans a pass, C++ computes it in one call, without the interpreter's lock."""

import os
from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from forerun.backends.base import Feed, Scores, checked_layers, depths, lineage
from forerun.backends.cpu.native import load_native
from forerun.backends.cpu.packing import TILE, Arena, Kind, Matrix, choose_kind, pack_matrix
from forerun.backends.cpu.pages import PageTable
from forerun.config import available_cores, total_memory
from forerun.errors import OptionError, RequestError
from forerun.models.config import DecoderConfig
from forerun.models.rope import cos_and_sin
from forerun.models.weights import Checkpoint

DTYPES = ("auto", "q8", "q4", "bf16")
_DTYPE_OF = {Kind.Q4_0: "q4", Kind.Q4_1: "q4", Kind.Q8_0: "q8", Kind.BF16: "bf16"}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_VECTORS = (
    "attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm",
    "o_bias", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip


class CpuSession:
    """A model of any of our families on this processor; see `forerun.backends.base.Session`.

    A row of logits doesn't depend on the other rows of its pass, on the number of threads or on the instruction set:
    every output is one chain of operations in a fixed order. Logits are float32 numpy arrays, fresh for each pass.

    `weight_bytes`: what a pass over one row reads. `instruction_set`: the kernels in use.
    """

    backend, device = "cpu", "cpu"
    can_branch = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "auto",
        num_threads: int | None = None,
        cache_tokens: int | None = None,
        instruction_set: str | None = None,
    ) -> None:
        """Load and pack the weights. `instruction_set` (or FORERUN_ISA) forces the kernels. Raises OptionError."""
        if dtype not in DTYPES:
            raise OptionError(f"dtype is {dtype!r}; the cpu backend has {', '.join(DTYPES)}")
        config = checkpoint.config
        native = self._native = load_native()
        self.dtype = dtype if dtype != "auto" else _main_kind(checkpoint)
        self.num_threads = num_threads or available_cores()
        self.max_len = config.max_len
        self.vocab_size = min(config.vocab_size, checkpoint.tokenizer.vocab_size)
        self.instruction_set = _instruction_set(native, instruction_set)
        self._hidden_size = config.hidden_size
        self._native_config = _native_config(config, self.vocab_size)
        self._ropes = config.ropes
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        self._open_model(_pack_weights(native, checkpoint, dtype, self.vocab_size, self.num_threads), cache_tokens)

    def _open_model(self, weights: "_Weights", cache_tokens: int | None) -> None:
        self._weights = weights
        self.num_layers = len(weights.layers)
        self.weight_bytes = sum(matrix.nbytes for matrix in weights.read_in_a_pass)
        self._model = self._native.Model(self.instruction_set, self._native_config, *weights, self.num_threads)
        self._table = PageTable(self._model, self._native.PAGE)
        position_bytes = self._model.page_bytes // self._native.PAGE
        self.cache_tokens = cache_tokens or max(self.max_len, total_memory() // 2 // position_bytes)

    def subset(self, layers: Sequence[int]) -> "CpuSession":
        chosen = checked_layers(layers, self.num_layers)
        session = copy(self)
        session._open_model(self._weights._replace(layers=[self._weights.layers[layer] for layer in chosen]), None)
        return session

    def open(self) -> int:
        return self._table.open()

    def length(self, seq: int) -> int:
        return self._table.length(seq)

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        assert 0 <= length <= self.length(seq) - len(path), f"keep {length} of {self.length(seq)} rows"
        self._table.keep(seq, length, path)

    def fork(self, seq: int, length: int) -> int:
        assert 0 <= length <= self.length(seq), f"fork {length} of {self.length(seq)} rows"
        return self._table.fork(seq, length)

    def release(self, seq: int) -> None:
        self._table.release(seq)

    def room(self) -> int:
        return max(0, self.cache_tokens - self._table.num_positions)

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        self._check(feeds, taps)
        num_rows = sum(len(feed.tokens) for feed in feeds)
        if not num_rows:
            return Scores(np.empty((0, self.vocab_size), dtype=np.float32))
        tokens = np.fromiter((token for feed in feeds for token in feed.tokens), dtype=np.int32, count=num_rows)
        positions, plan, pages, trees, wanted, first = [], [], [], [np.empty(0, dtype=bool)], [], 0
        for feed in feeds:
            start, count = self.length(feed.seq), len(feed.tokens)
            self._table.grow(feed.seq, count)
            if feed.parents is None:
                positions.append(np.arange(start, start + count, dtype=np.int32))
            else:
                positions.append(np.asarray(depths(feed.parents), dtype=np.int32) + np.int32(start))
                trees.append(lineage(feed.parents).reshape(-1))
            plan.append((first, count, start, feed.parents is not None))
            pages += self._table.pages(feed.seq)
            first += count
            wanted.append(np.arange(first - feed.num_logits, first, dtype=np.int32))
        positions_N = np.concatenate(positions)
        wanted_W = np.concatenate(wanted)
        tables = self._rotations(positions_N)
        logits = np.empty((len(wanted_W), self.vocab_size), dtype=np.float32)
        tapped = np.empty((len(taps), num_rows, self._hidden_size), dtype=np.float32)
        self._model.run(
            tokens,
            positions_N,
            [cosines for cosines, _sines in tables],
            [sines for _cosines, sines in tables],
            np.asarray(plan, dtype=np.int32),
            np.asarray(pages, dtype=np.int64),
            np.concatenate(trees).view(np.uint8),
            wanted_W,
            logits,
            np.asarray(taps, dtype=np.int32),
            tapped,
        )
        return Scores(logits, dict(zip(taps, tapped, strict=True)))

    def _check(self, feeds: Sequence[Feed], taps: Sequence[int]) -> None:
        """Raise RequestError for what can't be done, before anything is changed."""
        assert len({feed.seq for feed in feeds}) == len(feeds), "a sequence appears twice in a pass"
        assert all(0 <= tap < self.num_layers for tap in taps), f"taps {taps} of {self.num_layers} layers"
        for feed in feeds:
            start, count = self.length(feed.seq), len(feed.tokens)
            assert 0 <= feed.num_logits <= count > 0, f"{count} tokens, {feed.num_logits} logits wanted"
            depth = count if feed.parents is None else max(depths(feed.parents)) + 1
            if start + depth > self.max_len:
                raise RequestError(
                    f"a sequence of {start} + {depth} tokens doesn't fit the model's context of {self.max_len}; "
                    "shorten it"
                )
            if not 0 <= min(feed.tokens) <= max(feed.tokens) < self.vocab_size:
                raise RequestError(f"a token id is out of range; the model has 0 … {self.vocab_size - 1}")
        num_rows = sum(len(feed.tokens) for feed in feeds)
        if num_rows > self.room():
            raise RequestError(
                f"{num_rows} more tokens don't fit the cache, which has room for {self.room()} of {self.cache_tokens}; "
                "release sequences or raise cache_tokens"
            )

    def _rotations(self, positions_N: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the rows of each rope's tables at `positions_N`; the tables grow on demand."""
        end = int(positions_N.max()) + 1
        if not self._tables or end > len(self._tables[0][0]):
            num_positions = max(1024, 1 << (end - 1).bit_length())
            self._tables = [cos_and_sin(rope, num_positions) for rope in self._ropes]
        return [(cosines[positions_N], sines[positions_N]) for cosines, sines in self._tables]


class _Weights(NamedTuple):
    layers: list[dict[str, Any]]
    embed: Matrix
    head: Matrix
    norm: np.ndarray

    @property
    def read_in_a_pass(self) -> list[Matrix]:
        return [m for layer in self.layers for m in layer.values() if isinstance(m, Matrix)] + [self.head]


def _pack_weights(native: Any, checkpoint: Checkpoint, dtype: str, vocab_size: int, num_threads: int) -> _Weights:
    config = checkpoint.config
    head_dim = -(-config.head_dim // TILE) * TILE
    q_map = _padded_heads(config.num_heads, config.head_dim, head_dim)
    kv_map = _padded_heads(config.num_kv_heads, config.head_dim, head_dim)
    outputs = {"q": q_map, "k": kv_map, "v": kv_map}
    arena = Arena()

    def matrix(name: str, *, num_rows: int | None = None) -> Matrix:
        short = name.rpartition(".")[2]
        tensor = checkpoint.tensor(name)
        rows = outputs.get(short, np.arange(num_rows or tensor.shape[0]))
        columns = q_map if short == "o" else np.arange(tensor.shape[1])
        return pack_matrix(
            native,
            tensor,
            choose_kind(tensor.kind, dtype),
            row_map=rows,
            column_map=columns,
            arena=arena,
            num_threads=num_threads,
            release=checkpoint.release_pages,
        )

    names = set(checkpoint.names())
    layers = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        weights: dict[str, Any] = {n: matrix(prefix + n) for n in ("q", "k", "v", "o", "gate", "up", "down")}
        for name in _VECTORS:
            if prefix + name in names:
                weights[name] = _vector(checkpoint.tensor(prefix + name).to_float32())
        for name, where in (("q_bias", q_map), ("k_bias", kv_map), ("v_bias", kv_map)):
            if prefix + name in names:
                bias = checkpoint.tensor(prefix + name).to_float32()
                weights[name] = _vector(np.where(where >= 0, bias[where], np.float32(0)))
        weights["window"] = layer.window or 0
        weights["rope"] = -1 if layer.rope is None else layer.rope
        layers.append(weights)
    embed = matrix("embed", num_rows=vocab_size)
    head = matrix("head", num_rows=vocab_size) if "head" in names else embed
    return _Weights(layers, embed, head, _vector(checkpoint.tensor("norm").to_float32()))


def _padded_heads(num_heads: int, head_dim: int, padded_dim: int) -> np.ndarray:
    """Return for each output of padded heads the row that it is, -1 for padding."""
    rows = np.full((num_heads, padded_dim), -1, dtype=np.int64)
    rows[:, :head_dim] = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    return rows.reshape(-1)


def _vector(values: np.ndarray) -> np.ndarray:
    return np.array(values, dtype=np.float32)  # a copy: the file may be let go


def _native_config(config: DecoderConfig, vocab_size: int) -> dict[str, Any]:
    rotary_dims = {rope.rotary_dim for rope in config.ropes}
    assert len(rotary_dims) == 1, rotary_dims
    return {
        "vocab_size": vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rotary_dim": rotary_dims.pop(),
        "norm_eps": config.norm_eps,
        "attention_scale": config.attention_scale,
        "attention_softcap": config.attention_softcap or 0.0,
        "logit_softcap": config.logit_softcap or 0.0,
        "embed_scale": config.embed_scale,
        "activation": _ACTIVATIONS[config.activation],
    }


def _main_kind(checkpoint: Checkpoint) -> str:
    """Return what most matrices become under "auto": q4, q8 or bf16."""
    counts: Counter[str] = Counter()
    for stored, count in checkpoint.kinds.items():
        counts[_DTYPE_OF[choose_kind(stored, "auto")]] += (
            0 if stored == "F32" and checkpoint.source_kind == "gguf" else count
        )
    return counts.most_common(1)[0][0]


def _instruction_set(native: Any, wanted: str | None) -> str:
    available: list[str] = native.instruction_sets()
    wanted = wanted or os.environ.get("FORERUN_ISA") or available[0]
    if wanted not in available:
        raise OptionError(f"the instruction set {wanted!r} can't be used here; this machine has {', '.join(available)}")
    return wanted
