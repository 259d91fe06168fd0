"""A double of the module `llama_cpp`: a table of logits behind its C functions, as strict as the original."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "9.9"
VOCAB_SIZE = 11
TABLE = np.random.default_rng(5).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
TABLE[:, 0] -= 100.0  # the end
SYSTEM_INFO = b"CPU : AVX2 = 1 | FMA = 1 | AVX512 = 1 | AVX512_VNNI = 1 | AVX_VNNI = 1 | DOTPROD = 1 | REPACK = 1 | "


class FakeLlama:
    """The functions, and what was asked of them."""

    __version__ = __version__

    def __init__(self) -> None:
        self.limits: Any = None
        self.path = b""
        self.widths: list[tuple[int, int]] = []  # (tokens, logits) of each call
        self.chains: list[list[tuple[Any, ...]]] = []
        self.num_freed = 0
        self._tokens: list[int] = []
        self._rows: dict[int, Any] = {}
        self._row = 0

    def llama_backend_init(self) -> None: ...

    def llama_print_system_info(self) -> bytes:
        return SYSTEM_INFO

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace(n_ctx=512)

    def llama_model_load_from_file(self, path: bytes, _settings: Any) -> int | None:
        self.path = path
        return None if b"broken" in path else 1

    def llama_init_from_model(self, _model: int, limits: Any) -> int:
        self.limits = limits
        return 2

    def llama_model_get_vocab(self, _model: int) -> int:
        return 3

    def llama_vocab_n_tokens(self, _vocab: int) -> int:
        return VOCAB_SIZE

    def llama_get_memory(self, _context: int) -> int:
        return 4

    def llama_batch_init(self, size: int, _embd: int, _num_seqs: int) -> Any:
        empty = [None] * size
        seqs = [[None] for _ in range(size)]
        return SimpleNamespace(
            n_tokens=0, token=[*empty], pos=[*empty], n_seq_id=[*empty], seq_id=seqs, logits=[*empty]
        )

    def llama_decode(self, _context: int, batch: Any) -> int:
        if len(self._tokens) + batch.n_tokens > self.limits.n_ctx:
            return 1
        assert [*batch.pos[: batch.n_tokens]] == [len(self._tokens) + i for i in range(batch.n_tokens)]
        assert {*batch.n_seq_id[: batch.n_tokens]} == {1}
        self._tokens += batch.token[: batch.n_tokens]
        wanted = [i for i in range(batch.n_tokens) if batch.logits[i]]
        self._rows = {i: (ctypes.c_float * VOCAB_SIZE)(*TABLE[batch.token[i]]) for i in wanted}
        self.widths.append((batch.n_tokens, len(wanted)))
        return 0

    def llama_get_logits_ith(self, _context: int, row: int) -> Any:
        return ctypes.cast(self._rows[row], ctypes.POINTER(ctypes.c_float))

    def llama_synchronize(self, _context: int) -> None: ...

    def llama_memory_seq_rm(self, _memory: int, _seq: int, start: int, end: int) -> bool:
        assert end == -1
        del self._tokens[start:]
        return True

    def llama_sampler_chain_default_params(self) -> None: ...

    def llama_sampler_chain_init(self, _params: None) -> list[tuple[Any, ...]]:
        self.chains.append([])
        return self.chains[-1]

    def llama_sampler_chain_add(self, chain: list[Any], part: tuple[Any, ...]) -> None:
        chain.append(part)

    def llama_sampler_init_temp(self, temperature: float) -> tuple[Any, ...]:
        return ("temp", temperature)

    def llama_sampler_init_top_p(self, mass: float, least: int) -> tuple[Any, ...]:
        return ("top_p", mass, least)

    def llama_sampler_init_dist(self, seed: int) -> tuple[Any, ...]:
        return ("dist", np.random.default_rng(seed))

    def llama_sampler_sample(self, chain: list[Any], _context: int, row: int) -> int:
        law = np.exp(np.array(self._rows[row]) / chain[0][1])
        return int(chain[-1][1].choice(VOCAB_SIZE, p=law / law.sum()))

    def llama_sampler_free(self, _chain: Any) -> None:
        self.num_freed += 1


class FakeLookup:
    """Drafts what came after the last token when it came first."""

    def __init__(self, num_pred_tokens: int) -> None:
        self._most = num_pred_tokens

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        found = [*map(int, ids)]
        begin = found.index(found[-1]) + 1
        return np.array(found[begin : begin + self._most], dtype=np.intc)
