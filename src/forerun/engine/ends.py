"""Where an answer ends: end tokens, stop strings, length. Applied to what a round would add, before it is committed."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from forerun.types import FinishReason


class Cut(NamedTuple):
    """How much of a round's tokens is kept."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    text_end: int | None = None  # a stop string was found: the text ends after so many bytes of the output


class Ends:
    """Watches one output. Stop strings are matched on bytes, so they may lie across tokens, characters and rounds."""

    def __init__(
        self,
        *,
        end_ids: Collection[int],
        stops: Sequence[str],
        token_bytes: Sequence[bytes],
        min_tokens: int,
        max_tokens: int,
    ) -> None:
        self._end_ids = frozenset(end_ids)
        self._stops = [stop.encode() for stop in stops]
        self._token_bytes = token_bytes
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._num_bytes = 0
        self._tail = b""  # the last bytes, as many as the longest stop string less one

    def advance(self, tokens: Sequence[int]) -> Cut:
        """Take the tokens of a round up to the first end, and say where that is. An earlier stop beats the length."""
        for count, token in enumerate(tokens, start=1):
            self._num_tokens += 1
            may_stop = self._num_tokens >= self._min_tokens
            if may_stop and token in self._end_ids:
                return Cut(count, "stop", self._num_bytes)  # an end token has no text
            stop_at = self._find_stop(self._token_bytes[token]) if self._stops else None
            if may_stop and stop_at is not None:
                return Cut(count, "stop", stop_at)
            self._num_bytes += len(self._token_bytes[token])
            if self._num_tokens >= self._max_tokens:
                return Cut(count, "length")
        return Cut(len(tokens))

    def _find_stop(self, new: bytes) -> int | None:
        """Return the byte at which the earliest stop string in the text begins, if `new` completes one."""
        text = self._tail + new
        old = len(self._tail)  # a match that ends within it was seen, and passed over, before
        found = [start for stop in self._stops if (start := text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        begins_at = self._num_bytes - old
        keep = max(len(stop) for stop in self._stops) - 1
        self._tail = text[len(text) - keep :] if 0 < keep < len(text) else text if keep else b""
        return begins_at + min(found) if found else None
