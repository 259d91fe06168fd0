"""Any causal language model that `transformers` can load, as a `Session`: the way in for families that we don't run.

Each sequence's keys and values are kept apart; a pass lays them side by side, padded on the left before what is cached
and on the right after what is new, under a mask that hides both. That copies the caches of all that take part, so this
backend is for what the others can't run. Trees are taken where the model takes a mask of four dimensions as it is:
that is tried out when it is loaded.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.backends.base import Feed, Scores, depths, lineage
from forerun.backends.torch.device import DTYPES, resolve_device, resolve_dtype
from forerun.config import total_memory
from forerun.errors import OptionError, RequestError, UnsupportedModelError

_TREE_TOLERANCE = 0.02  # of the largest logit: rounding, not another model


class _HasVocabSize(Protocol):
    @property
    def vocab_size(self) -> int: ...


class Source(Protocol):
    """A folder in Hugging Face format with its tokenizer."""

    @property
    def path(self) -> Path: ...

    @property
    def tokenizer(self) -> _HasVocabSize: ...


class _Piece(NamedTuple):
    """One feed's place in the padded pass."""

    feed: Feed
    start: int  # positions cached before it
    depths: list[int]  # of its rows below `start`


class TransformersSession:
    """A model of the `transformers` library on a CPU or a CUDA device; see `forerun.backends.base.Session`.

    Rows of one text agree over passes of different widths up to rounding, not to the bit.
    """

    backend = "transformers"

    def __init__(
        self,
        checkpoint: Source,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_threads: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """Load the weights of a folder. Raises OptionError and UnsupportedModelError."""
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.num_threads = num_threads
        self._device = torch.device(self.device)
        self._model = _load(checkpoint.path, DTYPES[self.dtype]).to(self._device)
        config = self._model.config.get_text_config()
        self.vocab_size = min(config.vocab_size, checkpoint.tokenizer.vocab_size)
        self.num_layers = config.num_hidden_layers
        self.max_len = int(getattr(config, "max_position_embeddings", None) or 2048)
        self.weight_bytes = self.held_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self._cache_name = (
            "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        )
        self._caches: dict[int, list[tuple[Tensor, Tensor]]] = {}  # a layer: keys and values (1, H, T, C)
        self._lengths: dict[int, int] = {}
        self._next_handle = 0
        self.can_branch = False
        self.cache_tokens = cache_tokens or self.max_len
        row_bytes = self._try_out()
        if cache_tokens is None:
            self.cache_tokens = max(self.max_len, _free_bytes(self._device) // 2 // row_bytes)

    def open(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._caches[handle], self._lengths[handle] = [], 0
        return handle

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def room(self) -> int:
        return max(0, self.cache_tokens - sum(self._lengths.values()))

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        assert 0 <= length <= self._lengths[seq] - len(path)
        rows = [*range(length), *(length + row for row in path)]
        if len(rows) == self._lengths[seq] == (rows[-1] + 1 if rows else 0):
            return
        self._lengths[seq] = len(rows)
        if not path:
            self._caches[seq] = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._caches[seq]]
            return
        index = torch.tensor(rows, device=self._device)
        self._caches[seq] = [(keys[:, :, index], values[:, :, index]) for keys, values in self._caches[seq]]

    def fork(self, seq: int, length: int) -> int:
        assert 0 <= length <= self._lengths[seq]
        handle = self.open()
        # no tensor of a cache is ever written to, so the two may share
        self._caches[handle] = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._caches[seq]]
        self._lengths[handle] = length
        return handle

    def release(self, seq: int) -> None:
        del self._caches[seq], self._lengths[seq]

    def subset(self, layers: Sequence[int]) -> "TransformersSession":
        """Raises OptionError: how layers hang together is the library's own affair."""
        raise OptionError(f"layers {list(layers)} alone can't run on the transformers backend; take another drafter")

    @torch.inference_mode()
    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        self._check(feeds, taps)
        if not feeds:
            return Scores(torch.empty(0, self.vocab_size, device=self._device))
        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        pieces = [
            _Piece(
                feed,
                self._lengths[feed.seq],
                list(range(len(feed.tokens))) if feed.parents is None else depths(feed.parents),
            )
            for feed in feeds
        ]
        before, width = max(piece.start for piece in pieces), max(len(feed.tokens) for feed in feeds)
        ids_BW = torch.zeros(len(feeds), width, dtype=torch.int64)
        positions_BW = torch.zeros_like(ids_BW)
        for b, piece in enumerate(pieces):
            count = len(piece.feed.tokens)
            ids_BW[b, :count] = torch.tensor(list(piece.feed.tokens))
            positions_BW[b, :count] = piece.start + torch.tensor(piece.depths)
        cache = self._laid_out(pieces, before)
        is_tree = any(feed.parents is not None for feed in feeds)
        output = self._model(
            input_ids=ids_BW.to(self._device),
            attention_mask=(_tree_mask if is_tree else _mask)(pieces, before, width, self._model.dtype).to(
                self._device
            ),
            position_ids=positions_BW.to(self._device),
            use_cache=True,
            output_hidden_states=bool(taps),
            **{self._cache_name: cache},
        )
        self._take_back(pieces, cache, before)
        logits = [
            output.logits[b, len(feed.tokens) - feed.num_logits : len(feed.tokens), : self.vocab_size]
            for b, feed in enumerate(feeds)
        ]
        tapped = {
            tap: torch.cat([output.hidden_states[tap + 1][b, : len(feed.tokens)] for b, feed in enumerate(feeds)])
            for tap in taps
        }
        return Scores(torch.cat(logits), tapped)

    def _laid_out(self, pieces: Sequence[_Piece], before: int) -> Any:
        """Return the library's cache with what is cached of each sequence, ending at the same place."""
        from transformers import DynamicCache

        cache = DynamicCache()
        filled = next((self._caches[piece.feed.seq] for piece in pieces if piece.start), None)
        for layer in range(self.num_layers if filled else 0):
            assert filled is not None
            padded = []
            for which in (0, 1):
                like = filled[layer][which]
                if len(pieces) == 1:
                    padded.append(like)
                    continue
                rows = like.new_zeros(len(pieces), like.shape[1], before, like.shape[3])
                for b, piece in enumerate(pieces):
                    if piece.start:
                        rows[b, :, before - piece.start :] = self._caches[piece.feed.seq][layer][which][0]
                padded.append(rows)
            cache.update(*padded, layer)
        return cache

    def _take_back(self, pieces: Sequence[_Piece], cache: Any, before: int) -> None:
        """Keep each sequence's part of the library's cache."""
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        for b, piece in enumerate(pieces):
            end = before + len(piece.feed.tokens)
            rows = slice(before - piece.start, end)
            own = [(keys[b : b + 1, :, rows], values[b : b + 1, :, rows]) for keys, values in layers]
            # a view would keep the whole batch alive
            self._caches[piece.feed.seq] = own if len(pieces) == 1 else [(k.clone(), v.clone()) for k, v in own]
            self._lengths[piece.feed.seq] = piece.start + len(piece.feed.tokens)

    def _check(self, feeds: Sequence[Feed], taps: Sequence[int]) -> None:
        """Raises RequestError; nothing is changed."""
        assert len({feed.seq for feed in feeds}) == len(feeds), "a sequence appears twice in a pass"
        assert all(0 <= tap < self.num_layers for tap in taps), f"taps {taps} of {self.num_layers} layers"
        for feed in feeds:
            count = len(feed.tokens)
            assert 0 <= feed.num_logits <= count > 0, f"{count} tokens, {feed.num_logits} logits wanted"
            assert feed.parents is None or self.can_branch
            start = self._lengths[feed.seq]
            depth = count if feed.parents is None else max(depths(feed.parents)) + 1
            if start + depth > self.max_len:
                raise RequestError(
                    f"a sequence of {start} + {depth} tokens doesn't fit the model's context of {self.max_len}; "
                    "shorten it"
                )
            if not 0 <= min(feed.tokens) <= max(feed.tokens) < self.vocab_size:
                raise RequestError(
                    f"token ids {min(feed.tokens)} … {max(feed.tokens)}, the model has 0 … {self.vocab_size - 1}"
                )
        num_rows = sum(len(feed.tokens) for feed in feeds)
        if num_rows > self.room():
            raise RequestError(
                f"{num_rows} more tokens don't fit the cache, which has room for {self.room()} of {self.cache_tokens}; "
                "release sequences or raise cache_tokens"
            )

    def _try_out(self) -> int:
        """See that the model has a cache such as ours, and whether it takes trees; return the bytes of a position.

        Raises UnsupportedModelError.
        """
        # logits must not depend on whether tokens were read at once, one by one beside a longer text, or in a tree
        tokens = [i % self.vocab_size for i in (3, 1, 4, 1, 5)]
        seq, longer, tree = self.open(), self.open(), self.open()
        name = type(self._model).__name__
        try:
            expected = self.extend([Feed(seq, tokens, 3)]).logits
            keys, values = self._caches[seq][0]
            is_ours = len(self._caches[seq]) == self.num_layers and keys.ndim == 4 and keys.shape[2] == len(tokens)
        except Exception as error:  # whatever a model makes of a cache that it doesn't know
            raise UnsupportedModelError(f"{name} doesn't run on a cache of keys and values: {error}") from error
        if not is_ours:
            raise UnsupportedModelError(f"{name} has no cache of keys and values for each token")
        self.extend([Feed(longer, tokens[:4] * 2, 0)])
        self.extend([Feed(tree, tokens[:2], 0)])
        again = [self.extend([Feed(longer, tokens[:1], 1), Feed(tree, [token], 1)]).logits[1] for token in tokens[2:]]
        self._check_same(torch.stack(again), expected, "read in a batch")
        self.keep(tree, 2)
        self.can_branch = True
        try:
            # two paths: the text's own tokens, each after a stranger
            drafts = [tokens[0], tokens[2], tokens[1], tokens[3], tokens[0], tokens[4]]
            rows = self.extend([Feed(longer, tokens[:2], 0), Feed(tree, drafts, 6, [-1, -1, 1, 1, 3, 3])]).logits
            self._check_same(rows[[1, 3, 5]], expected, "read as a tree")
            self.keep(tree, 2, [1, 3])
            last = self.extend([Feed(tree, tokens[4:], 1)]).logits
            self._check_same(last, expected[2:], "read after a tree")
        except Exception:  # whatever a model makes of a mask that it doesn't know
            self.can_branch = False
        for handle in (seq, longer, tree):
            self.release(handle)
        return int(self.num_layers * (keys[0, :, 0].nbytes + values[0, :, 0].nbytes))

    def _check_same(self, got: Tensor, expected: Tensor, how: str) -> None:
        off = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not off < _TREE_TOLERANCE * (1 if self.dtype == "fp32" else 5):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} gives other logits for a text {how}: off by {off:.3f} of the largest"
            )


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, use_safetensors=True)
    except (ValueError, KeyError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"{path} is no causal model that transformers loads: {reason:.300}") from error
    return model.eval()


def _mask(pieces: Sequence[_Piece], before: int, width: int, _dtype: torch.dtype) -> Tensor:
    """Return which places of the padded pass hold tokens: (B, before + W)."""
    mask_BT = torch.zeros(len(pieces), before + width, dtype=torch.int64)
    for b, piece in enumerate(pieces):
        mask_BT[b, before - piece.start : before + len(piece.feed.tokens)] = 1
    return mask_BT


def _tree_mask(pieces: Sequence[_Piece], before: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of attention: 0 where a row sees a place, a huge negative number elsewhere.

    (B, 1, W, before + W). Rows of padding see themselves, for a softmax over nothing is not a number.
    """
    sees_BWT = torch.zeros(len(pieces), width, before + width, dtype=torch.bool)
    for b, piece in enumerate(pieces):
        count = len(piece.feed.tokens)
        parents = piece.feed.parents if piece.feed.parents is not None else range(-1, count - 1)
        sees_BWT[b, :count, before - piece.start : before] = True
        sees_BWT[b, :count, before : before + count] = torch.from_numpy(lineage(parents))
        sees_BWT[b, range(count, width), range(before + count, before + width)] = True
    mask_BWT = torch.zeros(sees_BWT.shape, dtype=dtype).masked_fill_(~sees_BWT, torch.finfo(dtype).min)
    return mask_BWT[:, None]


def _free_bytes(device: torch.device) -> int:
    """Memory that a cache could take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return total_memory()
