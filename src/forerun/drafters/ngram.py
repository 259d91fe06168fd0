"""n-gram drafting (prompt lookup): find the last tokens earlier in the text, copy what followed them.

An index, not a scan: each token costs a few dictionary writes, each proposal a few look-ups, whatever the context.
"""

from array import array
from collections.abc import Sequence

from forerun.drafters.base import NOTHING, Chosen, Outcome, Proposal, View

_LONGEST_MATCH = 64  # tokens


class NgramDrafter:
    """Drafts point masses from the longest match of the text's end, the most recent one first.

    It drafts at most `reach` times as far as the match reaches back (as SuffixDecoding 2411.04975 does): long matches
    go on for long, and a match of a single token is worth one or two drafts.
    """

    name = "ngram"
    num_top = 0

    def __init__(self, *, longest: int = 4, shortest: int = 1, reach: int = 1, max_drafts: int = 64) -> None:
        assert 1 <= shortest <= longest
        self.max_drafts = max_drafts
        self._reach = reach
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: dict[int, _Index] = {}

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _propose(self, view: View, budget: int) -> Proposal:
        tokens, budget = view.tokens, min(budget, self.max_drafts)
        index = self._texts.get(view.seq) or _Index(self._sizes)
        known = index.length
        index.extend(tokens)
        start = index.find(tokens)
        index.cut(known)  # the text may never be written
        if start is None or budget < 1:
            return NOTHING
        period = len(tokens) - start  # past the end of the text the copy goes on with itself
        match = _match_length(tokens, start)
        depth = min(budget, self._reach * match)
        keys = [(match.bit_length() if match > 3 else match, min(i, 4)) for i in range(depth)]
        return Chosen([tokens[start + i % period] for i in range(depth)], None, keys)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            index = self._texts.setdefault(outcome.seq, _Index(self._sizes))
            index.cut(outcome.start)
            index.extend(outcome.tokens)

    def fork(self, seq: int, child: int) -> None:
        if seq in self._texts:
            self._texts[child] = self._texts[seq].copy()

    def release(self, seq: int) -> None:
        self._texts.pop(seq, None)


def _match_length(tokens: Sequence[int], start: int) -> int:
    """Return how many tokens before `start` equal those at the end of the text, up to _LONGEST_MATCH."""
    length, end = 1, len(tokens)
    while length < min(start, _LONGEST_MATCH) and tokens[start - length - 1] == tokens[end - length - 1]:
        length += 1
    return length


class _Index:
    """Where each n-gram of a text was last followed by something.

    Cut back, it is what it was before. Two n-grams may share a hash: `find` compares before it believes.
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._tokens: list[int] = []  # the text that is indexed
        self._next: dict[int, int] = {}  # hash of an n-gram -> position of the token after it
        self._replaced = array("q")  # for each entry, in the order in which they were written, the one before, or 0

    @property
    def length(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take `tokens[length:]` in."""
        old = self.length
        self._tokens += tokens[old:]
        for end in range(max(old, 1), self.length):
            for size in self._sizes:
                if size <= end:
                    key = self._key(end, size)
                    self._replaced.append(self._next.get(key, 0))
                    self._next[key] = end

    def cut(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        for end in range(self.length - 1, max(length, 1) - 1, -1):
            for size in reversed(self._sizes):
                if size <= end:
                    before = self._replaced.pop()
                    if before:
                        self._next[self._key(end, size)] = before
                    else:
                        del self._next[self._key(end, size)]
        del self._tokens[length:]

    def _key(self, end: int, size: int) -> int:
        return hash(tuple(self._tokens[end - size : end]))

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the position after the most recent earlier occurrence of the longest possible end of the text."""
        for size in self._sizes:
            end = tuple(tokens[-size:])
            start = self._next.get(hash(end))
            if start is not None and size <= start < len(tokens) and tuple(tokens[start - size : start]) == end:
                return start
        return None

    def copy(self) -> "_Index":
        twin = _Index(self._sizes)
        twin._tokens, twin._next, twin._replaced = list(self._tokens), dict(self._next), self._replaced[:]
        return twin
