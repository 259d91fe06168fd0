"""n-gram drafting (prompt lookup): find the last tokens earlier in the text, copy what followed them.

An index, not a scan: each token costs a few dictionary writes, each proposal a few look-ups, whatever the context.
"""

from collections.abc import Sequence

from forerun.drafters.base import NOTHING, Chosen, Outcome, Proposal, View


class NgramDrafter:
    """Drafts point masses from the longest match of the text's end, the most recent one first."""

    name = "ngram"

    def __init__(self, *, longest: int = 4, shortest: int = 1, max_drafts: int = 64) -> None:
        assert 1 <= shortest <= longest
        self.max_drafts = max_drafts
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: dict[int, _Index] = {}

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _propose(self, view: View, budget: int) -> Proposal:
        tokens, budget = view.tokens, min(budget, self.max_drafts)
        index = self._texts.get(view.seq) or _Index()
        length, replaced = index.length, []
        index.extend(tokens, self._sizes, replaced)
        start = index.find(tokens, self._sizes)
        index.undo(length, replaced)  # the text may never be written
        if start is None or budget < 1:
            return NOTHING
        period = len(tokens) - start  # past the end of the text the copy goes on with itself
        return Chosen([tokens[start + i % period] for i in range(budget)])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            index = self._texts.setdefault(outcome.seq, _Index())
            index.length = min(index.length, outcome.start)
            index.extend(outcome.tokens, self._sizes)

    def fork(self, seq: int, child: int) -> None:
        if seq in self._texts:
            self._texts[child] = self._texts[seq].copy()

    def release(self, seq: int) -> None:
        self._texts.pop(seq, None)


class _Index:
    """Where each n-gram of a text was last followed by something.

    Entries may be stale, after the text was cut or where two n-grams share a hash: `find` compares before it believes.
    """

    def __init__(self) -> None:
        self.length = 0  # tokens[:length] are indexed
        self._next: dict[int, int] = {}  # hash of an n-gram -> position of the token after it

    def extend(self, tokens: Sequence[int], sizes: range, replaced: list[tuple[int, int | None]] | None = None) -> None:
        """Take `tokens[length:]` in; write down in `replaced` what `undo` needs."""
        for end in range(max(self.length, 1), len(tokens)):
            for size in sizes:
                if size <= end:
                    key = hash(tuple(tokens[end - size : end]))
                    if replaced is not None:
                        replaced.append((key, self._next.get(key)))
                    self._next[key] = end
        self.length = max(self.length, len(tokens))

    def undo(self, length: int, replaced: Sequence[tuple[int, int | None]]) -> None:
        for key, end in reversed(replaced):
            if end is None:
                del self._next[key]
            else:
                self._next[key] = end
        self.length = length

    def find(self, tokens: Sequence[int], sizes: range) -> int | None:
        """Return the position after the most recent earlier occurrence of the longest possible end of the text."""
        for size in sizes:
            end = tuple(tokens[-size:])
            start = self._next.get(hash(end))
            if start is not None and size <= start < len(tokens) and tuple(tokens[start - size : start]) == end:
                return start
        return None

    def copy(self) -> "_Index":
        twin = _Index()
        twin.length, twin._next = self.length, dict(self._next)
        return twin
