"""An exact table model: the law of a token depends on the last few tokens alone. For tests, docs and experiments."""

from collections.abc import Sequence

import numpy as np

from forerun.backends.base import Feed, Scores, checked_layers, depths
from forerun.errors import RequestError


class ToySession:
    """A `Session` over a table of logits (V, …, V): one axis for each of the last `order` tokens, oldest first, then V.

    At the start of a text missing tokens count as id 0. Rows are exact and independent of each other by construction.
    """

    num_layers = 1
    can_branch = True

    def __init__(self, logits: np.ndarray, *, max_len: int = 1 << 20, cache_tokens: int = 1 << 30) -> None:
        self._logits = np.asarray(logits)
        self._order = self._logits.ndim - 1
        self.vocab_size = self._logits.shape[-1]
        self.max_len = max_len
        self._cache_tokens = cache_tokens
        self._tokens: dict[int, list[int]] = {}
        self._next = 0

    @classmethod
    def random(
        cls, vocab_size: int, *, order: int = 2, spread: float = 2.0, seed: int = 0, max_len: int = 1 << 20
    ) -> "ToySession":
        """Return a random table; a larger `spread` makes sharper laws."""
        shape = (vocab_size,) * (order + 1)
        logits = np.random.default_rng(seed).normal(scale=spread, size=shape).astype(np.float32)
        return cls(logits, max_len=max_len)

    def open(self) -> int:
        self._next += 1
        self._tokens[self._next] = []
        return self._next

    def length(self, seq: int) -> int:
        return len(self._tokens[seq])

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        assert len({feed.seq for feed in feeds}) == len(feeds)
        for feed in feeds:
            assert len(feed.tokens) > 0
            assert feed.num_logits <= len(feed.tokens)
            depth = len(feed.tokens) if feed.parents is None else max(depths(feed.parents)) + 1
            length = self.length(feed.seq) + depth
            if length > self.max_len:
                raise RequestError(f"a sequence of {length} tokens doesn't fit into a context of {self.max_len}")
        rows, fed = [np.empty((0, self.vocab_size), self._logits.dtype)], list[int]()
        for feed in feeds:
            tokens = self._tokens[feed.seq]
            paths = list[list[int]]()
            for row, token in enumerate(feed.tokens):
                parent = row - 1 if feed.parents is None else feed.parents[row]
                paths.append([*(paths[parent] if parent >= 0 else ()), token])
            rows += [self._row(tokens + path)[None] for path in paths[len(paths) - feed.num_logits :]]
            tokens += feed.tokens
            fed += feed.tokens
        hidden = np.eye(self.vocab_size, dtype=np.float32)[np.asarray(fed, dtype=np.int64)] if taps else None
        return Scores(np.concatenate(rows), dict.fromkeys(taps, hidden))

    def _row(self, tokens: list[int]) -> np.ndarray:
        context = ([0] * self._order + tokens)[-self._order :] if self._order else []
        row: np.ndarray = self._logits[tuple(context)]
        return row

    def keep(self, seq: int, length: int, path: Sequence[int] = ()) -> None:
        tokens = self._tokens[seq]
        assert 0 <= length <= len(tokens)
        tokens[length:] = [tokens[length + row] for row in path]

    def fork(self, seq: int, length: int) -> int:
        assert 0 <= length <= self.length(seq)
        child = self.open()
        self._tokens[child] = self._tokens[seq][:length]
        return child

    def release(self, seq: int) -> None:
        del self._tokens[seq]

    def subset(self, layers: Sequence[int]) -> "ToySession":
        checked_layers(layers, self.num_layers)
        return ToySession(self._logits, max_len=self.max_len, cache_tokens=self._cache_tokens)

    def room(self) -> int:
        return self._cache_tokens - sum(map(len, self._tokens.values()))
