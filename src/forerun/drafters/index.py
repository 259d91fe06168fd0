"""Where the n-grams of a text occur: what drafters that copy look things up in.

An index, not a scan: each token costs a few dictionary writes, each question a few look-ups, whatever the length.
"""

from array import array
from collections.abc import Iterator, Sequence

_LONGEST_MATCH = 64  # tokens
_NOWHERE = -1


class Index:
    """Where each n-gram of a text was followed by something, the most recent place first.

    Cut back, it is what it was before. Its beginning can be dropped: positions stay what they were. Two n-grams may
    share a hash: whoever asks gets places whose tokens were compared.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: how long the n-grams are, the longest first."""
        assert list(sizes) == sorted(set(sizes), reverse=True)
        assert min(sizes) >= 1
        self.first = 0  # the position of tokens[0]
        self.tokens: list[int] = []  # the text that is indexed
        self._sizes = tuple(sizes)
        self._last: dict[int, int] = {}  # hash of an n-gram -> position of the token after its last occurrence
        self._before = array("q")  # for each token and size: the same of the occurrence before

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The n-grams that end before each of them are now known to be followed by it."""
        old = len(self.tokens)
        self.tokens += tokens
        known, last, before = self.tokens, self._last, self._before
        for end in range(old, len(known)):
            for size in self._sizes:
                if 0 < size <= end:
                    key = hash(tuple(known[end - size : end]))
                    before.append(last.get(key, _NOWHERE))
                    last[key] = self.first + end
                else:
                    before.append(_NOWHERE)

    def cut(self, end: int) -> None:
        """Forget all tokens from position `end` on."""
        known, count = self.tokens, len(self._sizes)
        for i in range(len(known) - 1, max(end - self.first, 0) - 1, -1):
            for place in range(count - 1, -1, -1):
                before, size = self._before.pop(), self._sizes[place]
                if size > i:
                    continue
                if before > self.first:
                    self._last[hash(tuple(known[i - size : i]))] = before
                else:
                    del self._last[hash(tuple(known[i - size : i]))]
        del known[max(end - self.first, 0) :]

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens."""
        count = min(count, len(self.tokens))
        for i in range(count):
            for size in self._sizes:
                if size <= i:
                    self._drop(i - size, i)
        for i in range(count, min(count + self._sizes[0], len(self.tokens))):  # n-grams that begin with a dropped token
            for size in self._sizes:
                if i - count < size <= i:
                    self._drop(i - size, i)
        del self.tokens[:count]
        del self._before[: count * len(self._sizes)]
        self.first += count

    def _drop(self, start: int, end: int) -> None:
        key = hash(tuple(self.tokens[start:end]))
        if self._last.get(key) == self.first + end:
            del self._last[key]

    def occurrences(self, text: Sequence[int], size: int) -> Iterator[int]:
        """Yield the positions after the places where the last `size` tokens of `text` occur, the most recent first.

        `size` is one of those that are indexed. `text` need not be the text that is indexed.
        """
        if size > len(text):
            return
        end = tuple(text[len(text) - size :])
        key, place = hash(end), self._sizes.index(size)
        known, first, count = self.tokens, self.first, len(self._sizes)
        at = self._last.get(key, _NOWHERE)
        while at - first >= size:
            if tuple(known[at - first - size : at - first]) == end:
                yield at
            at = self._before[(at - first) * count + place]

    def match_length(self, text: Sequence[int], position: int) -> int:
        """Return how many tokens before `position` equal those at the end of `text`, up to 64."""
        a, b = position - self.first, len(text)
        most, length = min(a, b, _LONGEST_MATCH), 0
        known = self.tokens
        while length < most and known[a - length - 1] == text[b - length - 1]:
            length += 1
        return length

    def copy(self) -> "Index":
        twin = Index(self._sizes)
        twin.first, twin.tokens, twin._last, twin._before = (
            self.first,
            list(self.tokens),
            dict(self._last),
            self._before[:],
        )
        return twin


class Texts:
    """The index of each sequence's own text."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._of: dict[int, Index] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, seq: int) -> Index:
        """Return the index of a sequence; one that nobody told of is empty, and not kept."""
        return self._of.get(seq) or Index(self._sizes)

    def observe(self, seq: int, tokens: Sequence[int], start: int) -> None:
        """Follow a text, new from `start` on; what it has in common with what was known is left as it is."""
        index = self._of.setdefault(seq, Index(self._sizes))
        while start < index.end and start < len(tokens) and index.tokens[start] == tokens[start]:
            start += 1
        index.cut(start)
        index.extend(tokens[index.end :])

    def fork(self, seq: int, child: int) -> None:
        if seq in self._of:
            self._of[child] = self._of[seq].copy()

    def release(self, seq: int) -> None:
        self._of.pop(seq, None)
