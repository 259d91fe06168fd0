"""A small language model of the same vocabulary as drafter, with a cache of its own.

Its cache is a length like the target's: it catches up by feeding `tokens[length:]`, so full acceptance, a rejection
and a text that was edited are all the same case. All sequences draft together, one pass for each depth.
"""

from collections.abc import Sequence

from forerun.backends.base import Feed, Session
from forerun.drafters.base import NOTHING, Chosen, Drawn, Outcome, Proposal, View
from forerun.errors import EngineError, OptionError
from forerun.sampling.arrays import Array, like, namespace, on_host
from forerun.sampling.laws import Row, laws
from forerun.sampling.streams import Role
from forerun.sampling.verify import draw, race


class LMDrafter:
    """Drafts by a `Session`; q is the model's law after the very transforms that the target's law goes through."""

    name = "lm"
    num_top = 0

    def __init__(self, session: Session, *, vocab_size: int, max_drafts: int = 64) -> None:
        """`vocab_size`: the target's V. The two share one tokenizer; padded rows are cut off."""
        if session.vocab_size < vocab_size:
            raise OptionError(
                f"the draft model knows {session.vocab_size} tokens, the target {vocab_size}; "
                "take a draft model with the target's tokenizer"
            )
        self.session = session
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._handles: dict[int, int] = {}
        self._fed: dict[int, list[int]] = {}  # the tokens in each sequence's cache

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        proposals: list[Proposal] = [NOTHING] * len(views)
        drafting = []
        for i, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            # the last draft is never fed, so the context must hold len(tokens) + depth - 1 rows
            depth = min(budget, self.max_drafts, self.session.max_len - len(view.tokens) + 1)
            if depth > 0:
                drafting.append(_Draft(i, view, depth))
        step = 0
        active = drafting
        while active:
            self._step(active, step)
            step += 1
            active = [draft for draft in active if draft.depth > step]
        for draft in drafting:
            proposals[draft.index] = draft.proposal()
        return proposals

    def _step(self, drafts: "list[_Draft]", step: int) -> None:
        feeds = []
        for draft in drafts:
            tokens = [*draft.view.tokens, *draft.tokens] if step == 0 else draft.tokens[-1:]
            handle = self._rewound(draft.view.seq, tokens) if step == 0 else self._handles[draft.view.seq]
            pending = tokens[self.session.length(handle) :] if step == 0 else tokens
            self._fed[draft.view.seq] += pending
            feeds.append(Feed(handle, pending, num_logits=1))
        logits_BV = on_host(self.session.extend(feeds).logits[:, : self._vocab_size])
        drafts, q_BV = _laws(drafts, logits_BV, step)
        for draft, token, q_V in zip(drafts, self._choose(q_BV, drafts, step), q_BV, strict=True):
            draft.tokens.append(token)
            draft.q.append(q_V)

    def _choose(self, q_BV: Array, drafts: "list[_Draft]", step: int) -> list[int]:
        """Draw a token of each row: by the DRAFT uniforms, or with the target's own noise in coupled mode."""
        xp = namespace(q_BV)
        tokens: list[int] = draw(q_BV, like([draft.uniforms[step] for draft in drafts], q_BV, xp.float64)).tolist()
        for i, draft in enumerate(drafts):
            if draft.view.verify == "coupled":
                position = len(draft.view.tokens) + step
                noise_V = draft.view.sampler.stream.exponentials(position, q_BV.shape[-1], q_BV)
                tokens[i] = int(race(q_BV[i], noise_V))
        return tokens

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep up with prompts while the target reads them; after a round the next proposal catches up."""
        feeds = []
        for seq, tokens, *_ in outcomes:
            handle = self._rewound(seq, tokens)
            pending = tokens[self.session.length(handle) : len(tokens) - 1]
            if len(pending) > 1 and len(tokens) - 1 <= self.session.max_len:
                self._fed[seq] += pending
                feeds.append(Feed(handle, pending))
        if feeds:
            self.session.extend(feeds)

    def _rewound(self, seq: int, tokens: Sequence[int]) -> int:
        """Return the handle of `seq`, its cache cut back to what agrees with `tokens`, the last one left to feed."""
        if seq not in self._handles:
            self._handles[seq], self._fed[seq] = self.session.open(), []
        fed = self._fed[seq]
        length = min(len(fed), len(tokens) - 1)
        if fed[:length] != list(tokens[:length]):
            length = next(i for i in range(length) if fed[i] != tokens[i])
        if length < len(fed):
            self.session.keep(self._handles[seq], length)
            del fed[length:]
        return self._handles[seq]

    def fork(self, seq: int, child: int) -> None:
        if seq in self._handles:
            self._handles[child] = self.session.fork(self._handles[seq], len(self._fed[seq]))
            self._fed[child] = list(self._fed[seq])

    def release(self, seq: int) -> None:
        if seq in self._handles:
            self.session.release(self._handles.pop(seq))
            del self._fed[seq]


class _Draft:
    """One sequence's draft while it grows."""

    def __init__(self, index: int, view: View, depth: int) -> None:
        self.index = index
        self.view = view
        self.depth = depth
        self.uniforms = view.sampler.stream.uniforms(len(view.tokens), Role.DRAFT, depth)
        self.tokens: list[int] = []
        self.q: list[Array] = []

    def proposal(self) -> Proposal:
        if not self.tokens:
            return NOTHING
        if self.view.sampler.is_greedy or self.view.verify == "coupled":
            return Chosen(self.tokens)  # greedy laws are point masses; coupled drafts need no law
        return Drawn(self.tokens, namespace(self.q[0]).stack(self.q))


def _laws(drafts: list[_Draft], logits_BV: Array, step: int) -> tuple[list[_Draft], Array]:
    """Return q of each draft's next row. A draft without one ends here; where the target gets there, it says why."""
    rows = [Row(draft.view.sampler, tuple(draft.tokens)) for draft in drafts]
    try:
        return drafts, laws(logits_BV, rows)
    except EngineError:
        xp = namespace(logits_BV)
        able, q = [], [xp.astype(logits_BV[:0], xp.float32)]
        for i, draft in enumerate(drafts):
            try:
                q.append(laws(logits_BV[i : i + 1], rows[i : i + 1]))
                able.append(draft)
            except EngineError:
                draft.depth = step
        return able, xp.concat(q)
