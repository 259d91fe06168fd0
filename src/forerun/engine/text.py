"""From tokens to text that may be shown: whole characters only, and never a part of what may become a stop string."""

import codecs
from collections.abc import Sequence

from forerun.types import Source, TokenTrace


class TextStream:
    """The text of one output as it grows."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str]) -> None:
        self._token_bytes = token_bytes
        self._stops = [stop.encode() for stop in stops]
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1  # the most bytes that are held back
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._pending: list[tuple[bytes, Source]] = []  # not shown yet
        self._num_shown = 0  # bytes
        self.text = ""

    def add(
        self, tokens: Sequence[TokenTrace], *, text_end: int | None = None, is_last: bool = False
    ) -> list[tuple[str, Source]]:
        """Take new tokens; return the text that may be shown now, cut by the origin of its tokens.

        `text_end`: where the text ends, in bytes from the start of the output, once that is known.
        """
        self._pending += [(self._token_bytes[token.token_id], token.source) for token in tokens]
        data = b"".join(piece for piece, _source in self._pending)
        if is_last:
            num_safe = len(data) if text_end is None else text_end - self._num_shown
        else:
            num_safe = len(data) - self._held_back(data)
        spans: list[tuple[str, Source]] = []
        source: Source = "plain"
        while self._pending and num_safe > 0:
            piece, source = self._pending.pop(0)
            if len(piece) > num_safe:
                self._pending.insert(0, (piece[num_safe:], source))
                piece = piece[:num_safe]
            num_safe -= len(piece)
            self._num_shown += len(piece)
            _append(spans, self._decode(piece), source)
        if is_last:
            _append(spans, self._decode(b"", True), source)
        self.text += "".join(text for text, _source in spans)
        return spans

    def _held_back(self, data: bytes) -> int:
        """Return the length of the longest end of `data` that begins a stop string."""
        for size in range(min(self._hold, len(data)), 0, -1):
            if any(size < len(stop) and data.endswith(stop[:size]) for stop in self._stops):
                return size
        return 0


def _append(spans: list[tuple[str, Source]], text: str, source: Source) -> None:
    if text and spans and spans[-1][1] == source:
        spans[-1] = (spans[-1][0] + text, source)
    elif text:
        spans.append((text, source))
