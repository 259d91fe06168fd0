"""Suffix drafting: what followed the end of the text before, here or in past outputs, by how often (2411.04975).

The places where a text's end occurred are followed together: at each step those that go on alike stay together, so a
token's chance is the share of the places that have it, which is what the counts of a suffix tree say. Only the most
recent places are looked at. A longer match has fewer places: of all lengths, the one whose drafts are expected to bring
most is taken.
"""

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forerun.drafters.base import NOTHING, Chosen, Outcome, Proposal, View
from forerun.drafters.index import Index, Texts
from forerun.errors import ModelError
from forerun.models.files import write_atomically

_SIZES = (8, 4, 2, 1)  # of n-grams
_PLACES = 8  # the most recent places that are followed, for each size
_LEAST_CHANCE = 0.1  # of a draft, given those before it
_BYTES_A_TOKEN = 640  # of the past, index and all
_BETWEEN = -1  # stands between two texts
_MAGIC = b"forerun past 1\n"


class SuffixDrafter:
    """Drafts point masses from the request itself and from past outputs of all requests.

    It drafts at most `reach` times as far as the match reaches back, no draft of which the share is below a tenth, a
    tree where one may be made. Chances are counts; what they are worth is for the controller to measure.
    """

    name = "suffix"
    num_top = 0

    def __init__(self, *, past: "Past | None" = None, reach: int = 1, max_drafts: int = 64) -> None:
        """`past`: shared by all requests but isolated ones; None: every request by itself."""
        self.max_drafts = max_drafts
        self.past = past
        self._reach = reach
        self._texts = Texts(_SIZES)
        self._written: dict[int, tuple[int, list[int]]] = {}  # length of the prompt, and the output since

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _propose(self, view: View, budget: int) -> Proposal:
        budget = min(budget, self.max_drafts)
        if budget < 1:
            return NOTHING
        index = self._texts.of(view.seq)
        known = index.end
        index.extend(view.tokens[known:])
        guess = self._best(index, view, budget)
        index.cut(known)  # the text may never be written
        if self.past is not None and not view.sampler.params.isolated:
            guess = max(guess, self._best(self.past.index, view, budget), key=lambda guess: guess.score)
        if not guess.tokens:
            return NOTHING
        is_chain = guess.parents == list(range(-1, len(guess.tokens) - 1))
        return Chosen(guess.tokens, None if is_chain else guess.parents, guess.keys)

    def _best(self, index: Index, view: View, budget: int) -> "_Guess":
        """Return the most promising guess over all lengths of match."""
        lengths: dict[int, int] = {}  # position after a match -> its length
        for size in _SIZES:
            for count, position in enumerate(index.occurrences(view.tokens, size)):
                if count == _PLACES:
                    break
                if position not in lengths:
                    lengths[position] = index.match_length(view.tokens, position)
        best = _NO_GUESS
        for match in sorted(set(lengths.values()), reverse=True):
            if best.score >= self._reach * match:  # a shorter match can't bring more
                break
            places = sorted((at for at, length in lengths.items() if length >= match), reverse=True)[:_PLACES]
            guess = _follow(index, places, match, self._reach * match, budget, branches=view.branches)
            if guess.score > best.score:
                best = guess
        return best

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._texts.observe(outcome.seq, outcome.tokens, outcome.start)
            if self.past is not None and outcome.num_prompt is not None:
                self._write(outcome.seq, outcome.tokens, outcome.num_prompt)

    def _write(self, seq: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Take down what a request has written; that of an earlier turn goes into the past."""
        before, written = self._written.get(seq, (num_prompt, []))
        if before != num_prompt:
            self._remember(seq)
            written = []
        written += tokens[num_prompt + len(written) :]
        self._written[seq] = (num_prompt, written)

    def _remember(self, seq: int) -> None:
        _num_prompt, written = self._written.pop(seq, (0, []))
        if written and self.past is not None:
            self.past.add(written)

    def fork(self, seq: int, child: int) -> None:
        self._texts.fork(seq, child)

    def release(self, seq: int) -> None:
        self._texts.release(seq)
        self._remember(seq)

    def forget(self) -> None:
        if self.past is not None:
            self.past.clear()


class _Guess(NamedTuple):
    score: float  # how many drafts are expected to stand
    tokens: list[int]
    parents: list[int]
    keys: list[Hashable]


_NO_GUESS = _Guess(0.0, [], [], [])


def _follow(index: Index, places: Sequence[int], match: int, max_depth: int, budget: int, *, branches: bool) -> _Guess:
    """Return what follows at `places`, the likeliest drafts first: a tree of them, or the likeliest chain."""
    known, first = index.tokens, index.first
    guess = _Guess(0.0, [], [], [])
    score, order = 0.0, 0
    # -chance, order of coming, token, parent, depth, how many places led here, those that go on
    queue: list[tuple[float, int, int, int, int, int, list[int]]] = []

    def enqueue(parent: int, depth: int, chance: float, at: Sequence[int]) -> None:
        nonlocal order
        going_on: dict[int, list[int]] = {}
        for position in at:
            if position - first < len(known):
                going_on.setdefault(known[position - first], []).append(position + 1)
        going_on.pop(_BETWEEN, None)
        if not branches and len(going_on) > 1:
            token = max(going_on, key=lambda token: len(going_on[token]))
            going_on = {token: going_on[token]}
        for token, following in going_on.items():
            share = len(following) / len(at)
            if share >= _LEAST_CHANCE:
                heappush(queue, (-chance * share, order, token, parent, depth, len(at), following))
                order += 1

    enqueue(-1, 0, 1.0, places)
    while queue and len(guess.tokens) < budget:
        negative, _order, token, parent, depth, support, following = heappop(queue)
        score -= negative
        reached = match + depth
        guess.keys.append(
            (
                reached if reached < 4 else 2 + min(reached, 64).bit_length(),
                4 * len(following) // support,
                min(support, 3),
            )
        )
        guess.tokens.append(token)
        guess.parents.append(parent)
        if depth + 1 < max_depth:
            enqueue(len(guess.tokens) - 1, depth + 1, -negative, following)
    return guess._replace(score=score)


class Past:
    """What was written before, over all requests, within a bound of memory: the oldest is forgotten first."""

    def __init__(self, *, memory: int = 64 << 20, vocabulary: str = "", vocab_size: int = 1 << 31) -> None:
        """`memory` in bytes. `vocabulary` names the tokenizer whose ids these are, below `vocab_size`, for files."""
        self.index = Index(_SIZES)
        self.max_tokens = max(2, memory // _BYTES_A_TOKEN)
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.index.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Append a text."""
        self.index.extend([_BETWEEN, *tokens[-(self.max_tokens - 1) :]])
        over = len(self) - self.max_tokens
        if over > 0:  # some more than needed, so that it isn't done each time
            self.index.drop(min(len(self), over + self.max_tokens // 16))

    def clear(self) -> None:
        self.index = Index(_SIZES)

    def save(self, path: Path) -> None:
        """Write it to a file, whole or not at all. Raises OSError."""
        ids = np.asarray(self.index.tokens, "<i4").tobytes()
        write_atomically(path, b"".join([_MAGIC, self._vocabulary.encode(), b"\n", ids]))

    def load(self, path: Path) -> None:
        """Append what a file has. Raises OSError; ModelError for a file that is no past, or of another tokenizer."""
        data = path.read_bytes()
        magic, _, rest = data.partition(b"\n")
        vocabulary, newline, ids = rest.partition(b"\n")
        if magic + b"\n" != _MAGIC or not newline or len(ids) % 4:
            raise ModelError(f"{path} is no file of past texts")
        if vocabulary.decode(errors="replace") != self._vocabulary:
            raise ModelError(f"{path} has the past of another tokenizer; take another file")
        tokens = np.frombuffer(ids, "<i4").tolist()
        if tokens and not (min(tokens) >= _BETWEEN and max(tokens) < self._vocab_size):
            raise ModelError(f"{path} has tokens that don't exist; it is damaged: delete it")
        self.add(tokens)
