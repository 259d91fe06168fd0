"""An engine over toy tables, and what became of its requests: for the tests of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from forerun.backends.base import Feed, Scores
from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Drafter, Drawn, Offer, Outcome, Proposal, Tree, View
from forerun.drafters.bridge import BridgeSession, Translation
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.recycle import NUM_SUCCESSORS, RecycleDrafter
from forerun.drafters.suffix import Past, SuffixDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.models.tokenizer import Tokenizer, TokenizerSettings
from forerun.sampling.laws import Row, laws
from forerun.sampling.streams import Role
from forerun.sampling.tree import without
from forerun.sampling.verify import draw
from forerun.types import FinishReason, SpeculationStats, TokenLogprob, TokenTrace

SIZE = 7
EOS = 6
TOKEN_BYTES = [b"a", b"b", b"ab", "é".encode()[:1], "é".encode()[1:], b" c", b""]


class CheckedSession(ToySession):
    """A toy session that checks its caller: no feed past the room, and no sequence twice in a pass."""

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        assert feeds
        scores = super().extend(feeds, taps=taps)
        assert self.room() >= 0
        return scores

    @property
    def caches(self) -> dict[int, list[int]]:
        return self._tokens


def toy(*, order: int = 2, spread: float = 1.5, seed: int = 0, size: int = SIZE, **limits: int) -> CheckedSession:
    return CheckedSession(ToySession.random(size, order=order, spread=spread, seed=seed)._logits, **limits)


class Scripted:
    """Drafts what a function of the text says, as point masses."""

    name = "scripted"
    max_drafts = 64
    num_top = 0

    def __init__(self, function: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._function = function

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [Chosen(list(self._function(v.tokens))[:budget]) for v, budget in zip(views, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def fork(self, seq: int, child: int) -> None: ...

    def release(self, seq: int) -> None: ...

    def forget(self) -> None: ...


class Branching(Scripted):
    """Drafts point masses in a tree: what the function says, and beside each draft two others with a child."""

    name = "branching"
    num_top = 3

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> Proposal:
        assert view.branches
        tokens, parents, last = list[int](), list[int](), -1
        for token in self._function(view.tokens):
            trunk = len(tokens)
            tokens += [token, (token + 1) % SIZE, (token + 3) % SIZE, token, token]
            parents += [last, last, last, trunk + 1, trunk + 2]
            last = trunk
        return Chosen(tokens[:budget], parents[:budget], [index % 5 for index in range(len(tokens[:budget]))])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.verified is not None:
                tokens, top_ids = outcome.verified
                assert top_ids.shape == (len(tokens), 3)
                assert tokens[0] in outcome.tokens[outcome.start :]


class Sampling(Scripted):
    """Draws trees without replacement from a table, with a point mass between the draws where `mixed`."""

    name = "sampling"

    def __init__(self, *, mixed: bool = False) -> None:
        self._session = toy(order=1, seed=5)
        self._mixed = mixed

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [self._tree(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _tree(self, view: View, budget: int) -> Proposal:
        uniforms = view.sampler.stream.uniforms(len(view.tokens), Role.DRAFT, 16)
        tokens, parents, offers, q = list[int](), list[int](), list[Offer](), list[np.ndarray]()
        for node, children in ((-1, 2), (0, 2), (1, 1)):
            path = [node] if node < 0 else [parents[node], node]
            drafted = tuple(tokens[i] for i in path if i >= 0)
            if node >= len(tokens):
                break
            logits = self._session._row([*view.tokens, *drafted])[None]
            law = left = laws(logits, [Row(view.sampler, drafted)])[0]
            q.append(law)
            own: list[int] = []
            for _ in range(children):
                if left.sum() == 0:
                    break
                token = int(draw(left[None], np.asarray([uniforms[len(offers)]]))[0])
                left = without(left, token)
                own.append(len(offers))
                offers.append(Offer(self._node(tokens, parents, node, token), len(q) - 1))
            if self._mixed and own:
                offers.insert(own[0] + 1, Offer(self._node(tokens, parents, node, 2), None))
        kept = [offer for offer in offers if offer.draft < budget]  # a budget is known before anything is drawn
        return Tree(tokens[:budget], parents[:budget], kept, np.stack(q))

    def _node(self, tokens: list[int], parents: list[int], node: int, token: int) -> int:
        for draft, parent in enumerate(parents):
            if parent == node and tokens[draft] == token:
                return draft
        tokens.append(token)
        parents.append(node)
        return len(tokens) - 1


def _tokenizer(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, TokenizerSettings(eos_ids=(len(tokens),)))


def bridge(session: ToySession) -> BridgeSession:
    """A model of nine tokens, of which it shares six with the target, in another order."""
    target = _tokenizer(["a", "b", "ab", "Ã", "©", "Ġc"], [("a", "b")])
    assert target.token_bytes == TOKEN_BYTES
    draft = _tokenizer(["Ã", "b", "Ġ", "c", "a", "©", "Ġc", "ba"], [("Ġ", "c"), ("b", "a")])
    return BridgeSession(session, Translation(target, draft), SIZE)


def three_levels() -> LMDrafter:
    middle = LMDrafter(toy(order=1, seed=6), vocab_size=SIZE, inner=NgramDrafter())
    return LMDrafter(toy(order=1, seed=5), vocab_size=SIZE, inner=middle)


def in_a_tree(drafter: LMDrafter) -> LMDrafter:
    """Two candidates after the text, two after the first and one after the second of them, then a chain."""
    drafter.shape = lambda count: [-1, -1, 0, 0, 1, *range(3, count)][:count]
    return drafter


def mixed() -> MixDrafter:
    models = [LMDrafter(toy(order=1, seed=seed), vocab_size=SIZE) for seed in (5, 6)]
    return MixDrafter([models[0], NgramDrafter(), in_a_tree(models[1]), Scripted(everything_in_turn)])


def everything_in_turn(tokens: Sequence[int]) -> list[int]:
    """Drafts that are mostly wrong, and that hold every token sooner or later."""
    return [(tokens[-1] * 3 + len(tokens) + i) % SIZE for i in range(4)]


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": NgramDrafter,
    "suffix": lambda: SuffixDrafter(past=Past(), reach=2),
    "recycle": lambda: RecycleDrafter(np.full((SIZE, NUM_SUCCESSORS), -1)),
    "lm": lambda: LMDrafter(toy(order=1, seed=5), vocab_size=SIZE),
    "lm that is the target": lambda: LMDrafter(toy(), vocab_size=SIZE),
    "lm with a wider head": lambda: LMDrafter(toy(order=1, seed=5, size=SIZE + 3), vocab_size=SIZE),
    "lm with a short context": lambda: LMDrafter(toy(order=1, seed=5, max_len=9), vocab_size=SIZE),
    "lm of another tokenizer": lambda: LMDrafter(bridge(toy(order=1, seed=5, size=9)), vocab_size=SIZE),
    "cascade over another tokenizer": lambda: LMDrafter(
        bridge(toy(order=1, seed=5, size=9)), vocab_size=SIZE, inner=NgramDrafter()
    ),
    "cascade": lambda: LMDrafter(toy(order=1, seed=5), vocab_size=SIZE, inner=NgramDrafter()),
    "cascade of three": lambda: three_levels(),
    "lm in a tree": lambda: in_a_tree(LMDrafter(toy(order=1, seed=5), vocab_size=SIZE)),
    "mix": lambda: mixed(),
    "scripted": lambda: Scripted(everything_in_turn),
    "branching": lambda: Branching(everything_in_turn),
    "sampling": Sampling,
    "mixed": lambda: Sampling(mixed=True),
}


@dataclass
class Result:
    """All that the engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    traces: list[TokenTrace] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    text_end: int | None = None
    error: str | None = None
    steps: list[int] = field(default_factory=list)  # tokens of each of its events

    def take(self, event: Event) -> None:
        assert self.finish_reason is None, "an event after the last one"
        self.token_ids += [trace.token_id for trace in event.tokens]
        self.traces += event.tokens
        self.logprobs += event.logprobs or ()
        self.stats += event.stats
        self.finish_reason, self.text_end, self.error = event.finish_reason, event.text_end, event.error
        self.steps.append(len(event.tokens))

    @property
    def text(self) -> bytes:
        return b"".join(TOKEN_BYTES[token] for token in self.token_ids)[: self.text_end]

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must not depend on how it was made."""
        return tuple(self.token_ids), self.finish_reason, self.text_end


def engine_of(drafter: Drafter | None = None, session: ToySession | None = None, **settings: Any) -> Engine:
    settings = {"token_bytes": TOKEN_BYTES, "end_ids": (EOS,), "k": 3, **settings}
    return Engine(session or toy(), drafter, **settings)


def run(engine: Engine, requests: Sequence[Request], *, joins: Sequence[int] = ()) -> list[Result]:
    """Run requests to their ends; `joins` tells after how many steps each is added (0 where it is short)."""
    results: dict[int, Result] = {}
    order: list[int] = []
    when = [*joins, *[0] * (len(requests) - len(joins))]
    pending = sorted(range(len(requests)), key=lambda i: when[i])
    ids: dict[int, int] = {}
    step = 0
    while pending or engine.has_work:
        while pending and when[pending[0]] <= step:
            i = pending.pop(0)
            ids[i] = engine.add(requests[i])
            results[ids[i]] = Result()
        for event in engine.step():
            results[event.request_id].take(event)
        check_caches(engine)
        step += 1
        assert step < 10_000
    order = [ids[i] for i in range(len(requests))]
    return [results[i] for i in order]


def check_caches(engine: Engine) -> None:
    """Between rounds the target's cache holds all of a writer's text but the last token, and nothing else."""
    caches = dict(engine.session.caches)
    for sequence in engine._scheduler.running:
        cached = caches.pop(sequence.handle)
        assert cached == sequence.tokens[: len(cached)]
        assert len(cached) <= len(sequence.tokens) - 1
        if len(sequence.tokens) > sequence.num_prompt:
            assert len(cached) == len(sequence.tokens) - 1
    for handle, tokens in engine._parked.values():
        assert caches.pop(handle) == tokens
    assert not caches, "a handle that nobody holds"
    for drafter in engine.drafters:
        if isinstance(drafter, LMDrafter):
            session = drafter.session
            caches = session._texts if isinstance(session, BridgeSession) else session.caches
            assert set(drafter._handles.values()) == set(caches)
            known = {sequence.id for sequence in engine._scheduler.running} | set(engine._parked)
            assert set(drafter._handles) <= known
            for seq, handle in drafter._handles.items():
                assert caches[handle] == drafter._fed[seq]


__all__ = [
    "DRAFTERS", "EOS", "SIZE", "TOKEN_BYTES", "CheckedSession", "Chosen", "Drawn", "Result", "Scripted",
    "bridge", "check_caches", "engine_of", "everything_in_turn", "run", "toy",
]  # fmt: skip
