"""n-gram drafting (prompt lookup): find the last tokens earlier in the text, copy what followed them."""

from collections.abc import Sequence

from forerun.drafters.base import NOTHING, Chosen, Outcome, Proposal, View
from forerun.drafters.index import Index, Texts


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
        self._texts = Texts(self._sizes)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _propose(self, view: View, budget: int) -> Proposal:
        tokens, budget = view.tokens, min(budget, self.max_drafts)
        index = self._texts.of(view.seq)
        known = index.end
        index.extend(tokens[known:])
        start = self._find(index, tokens)
        if start is None or budget < 1:
            index.cut(known)  # the text may never be written
            return NOTHING
        match = index.match_length(tokens, start)
        index.cut(known)
        period = len(tokens) - start  # past the end of the text the copy goes on with itself
        depth = min(budget, self._reach * match)
        keys = [(match.bit_length() if match > 3 else match, min(i, 4)) for i in range(depth)]
        return Chosen([tokens[start + i % period] for i in range(depth)], None, keys)

    def _find(self, index: Index, tokens: Sequence[int]) -> int | None:
        """Return the position after the most recent earlier occurrence of the longest possible end of the text."""
        for size in self._sizes:
            start = next(index.occurrences(tokens, size), None)
            if start is not None and start < len(tokens):
                return start
        return None

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._texts.observe(outcome.seq, outcome.tokens, outcome.start)

    def fork(self, seq: int, child: int) -> None:
        self._texts.fork(seq, child)

    def release(self, seq: int) -> None:
        self._texts.release(seq)

    def forget(self) -> None:
        """Nothing outlives its text."""
