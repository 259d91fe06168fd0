"""The torch backend's Session: handles, limits, and the way from feeds to a pass and back."""

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.backends.base import Feed, Scores, checked_layers, depths
from forerun.backends.torch.build import Weights, build_net
from forerun.backends.torch.cache import SlotCache
from forerun.backends.torch.device import DTYPES, resolve_device, resolve_dtype
from forerun.backends.torch.net import Net
from forerun.backends.torch.plan import Rows, make_plan
from forerun.config import total_memory
from forerun.errors import RequestError


class _HasVocabSize(Protocol):
    @property
    def vocab_size(self) -> int: ...


class Source(Weights, Protocol):
    """A checkpoint, as `forerun.models` loads it. The session doesn't keep it."""

    @property
    def tokenizer(self) -> _HasVocabSize: ...


class TorchSession:
    """A model of any of our families on a CPU or a CUDA device; see `forerun.backends.base.Session`.

    Logits come in the session's dtype. In bf16 on a CPU (and in fp32 up to rare last bits) a row's logits don't depend
    on the other rows of a pass, as long as each piece of a sequence has at most 256 rows. In a tree last bits differ.

    `weight_bytes`: what a pass over one row reads. `held_bytes`: what all weights take in memory.
    """

    backend = "torch"
    can_branch = True

    def __init__(
        self,
        checkpoint: Source,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_threads: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """Load the weights. `cache_tokens` limits the positions cached over all sequences; None: what memory allows.

        `num_threads` is for passes of this session; torch keeps it per thread of the caller. Raises OptionError.
        """
        config = checkpoint.config
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.num_threads = num_threads
        self.max_len = config.max_len
        self.vocab_size = min(config.vocab_size, checkpoint.tokenizer.vocab_size)
        self._device, self._dtype = torch.device(self.device), DTYPES[self.dtype]
        with torch.inference_mode():
            built = build_net(checkpoint, vocab_size=self.vocab_size, dtype=self._dtype, device=self._device)
        net, self.weight_bytes, self.held_bytes = built
        self._open_net(net, cache_tokens)

    def _open_net(self, net: Net, cache_tokens: int | None) -> None:
        config = self._config = net.config
        self._net, self.num_layers = net, config.num_layers
        with torch.inference_mode():
            self._cache = SlotCache(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=self._dtype,
                device=self._device,
            )
        row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self._dtype.itemsize
        self.cache_tokens = cache_tokens or max(config.max_len, _free_bytes(self._device) // 2 // row_bytes)
        self._slots: dict[int, int] = {}  # by handle
        self._next_handle = 0

    def subset(self, layers: Sequence[int]) -> "TorchSession":
        session = copy(self)
        session._open_net(self._net.subset(checked_layers(layers, self.num_layers)), None)
        left_out = self._net.layer_nbytes - session._net.layer_nbytes
        session.weight_bytes, session.held_bytes = self.weight_bytes - left_out, self.held_bytes - left_out
        return session

    def open(self) -> int:
        with torch.inference_mode():
            slot = self._cache.open()
        handle = self._next_handle
        self._next_handle += 1
        self._slots[handle] = slot
        return handle

    def length(self, seq: int) -> int:
        return self._cache.length(self._slots[seq])

    def room(self) -> int:
        return max(0, self.cache_tokens - self._cache.num_positions)

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        assert 0 <= length <= self.length(seq) - len(path), f"keep {length} of {self.length(seq)} rows"
        with torch.inference_mode():
            self._cache.gather(self._slots[seq], length, path)

    def fork(self, seq: int, length: int) -> int:
        assert 0 <= length <= self.length(seq), f"fork {length} of {self.length(seq)} rows"
        handle = self.open()
        with torch.inference_mode():
            self._cache.copy(self._slots[seq], self._slots[handle], length)
        return handle

    def release(self, seq: int) -> None:
        with torch.inference_mode():
            self._cache.release(self._slots.pop(seq))

    @torch.inference_mode()
    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        rows, ids = self._check(feeds, taps)
        if not rows:
            return Scores(torch.empty(0, self.vocab_size, dtype=self._dtype, device=self._device))
        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        cache = self._cache
        cache.reserve(max(row.start + row.num_rows for row in rows))
        plan = make_plan(
            rows,
            self._config,
            num_slots=cache.num_slots,
            capacity=cache.capacity,
            dtype=self._dtype,
            device=self._device,
        )
        for call in plan.calls:
            cache.clear_rows(call.first_slot, call.end_slot, max(keys.end for keys in call.keys.values()))
        ids_N = torch.from_numpy(ids).to(self._device, non_blocking=True)
        wanted_W = _wanted_rows(feeds, rows, self._device)
        logits, tapped = self._net.forward(ids_N, plan, cache.layers_2SKPC, wanted_W=wanted_W, taps=frozenset(taps))
        for row in rows:
            cache.set_length(row.slot, row.start + row.num_rows)
        return Scores(logits, tapped)

    def _check(self, feeds: Sequence[Feed], taps: Sequence[int]) -> tuple[list[Rows], np.ndarray]:
        """Return what `feeds` add to which slots, and all their ids. Raises RequestError; nothing is changed."""
        assert len({feed.seq for feed in feeds}) == len(feeds), "a sequence appears twice in a pass"
        assert all(0 <= tap < self.num_layers for tap in taps), f"taps {taps} of {self.num_layers} layers"
        rows, num_rows = [], 0
        for feed in feeds:
            count = len(feed.tokens)
            assert 0 <= feed.num_logits <= count > 0, f"{count} tokens, {feed.num_logits} logits wanted"
            start = self.length(feed.seq)
            depth = count if feed.parents is None else max(depths(feed.parents)) + 1
            if start + depth > self.max_len:
                raise RequestError(
                    f"a sequence of {start} + {depth} tokens doesn't fit the model's context of {self.max_len}; "
                    "shorten it"
                )
            rows.append(Rows(self._slots[feed.seq], start, count, num_rows, feed.parents))
            num_rows += count
        if num_rows > self.room():
            raise RequestError(
                f"{num_rows} more tokens don't fit the cache, which has room for {self.room()} of {self.cache_tokens}; "
                "release sequences or raise cache_tokens"
            )
        ids = np.fromiter((token for feed in feeds for token in feed.tokens), dtype=np.int64, count=num_rows)
        if num_rows and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise RequestError(f"token ids {ids.min()} … {ids.max()}, the model has 0 … {self.vocab_size - 1}")
        return rows, ids


def _wanted_rows(feeds: Sequence[Feed], rows: Sequence[Rows], device: torch.device) -> Tensor | None:
    """Return the rows of the pass whose logits are wanted, in order; None if all are."""
    if all(feed.num_logits == row.num_rows for feed, row in zip(feeds, rows, strict=True)):
        return None
    ends = [(row.first + row.num_rows, feed.num_logits) for feed, row in zip(feeds, rows, strict=True)]
    wanted = np.concatenate([np.arange(end - count, end) for end, count in ends])
    return torch.from_numpy(wanted).to(device, non_blocking=True)


def _free_bytes(device: torch.device) -> int:
    """Memory that a cache could take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return total_memory()
