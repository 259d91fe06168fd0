"""Two rounds in a row have the target's law under the shipped keys, and not where a round meets old draws again.

Uniforms are enumerated as intervals. A key that is met for the first time is uniform on [0, 1); each comparison splits
its interval, and one that is met again is still in the part where it was left. So equal keys are one draw and
different keys are independent, as in the engine.

Distances found with keys of (absolute position, role), the same for a draft and for what replaces it: block rule up to
0.034, token rule 0 (it never looks past the first failure), on tables of two tokens with two drafts a round.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from forerun.backends.toy import ToySession
from forerun.drafters.base import Chosen, Outcome, Proposal, View
from forerun.drafters.lm import LMDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.sampling.streams import Role, Stream
from forerun.sampling.tree import walk
from forerun.sampling.verify import block_rule, draw, token_rule
from forerun.types import SamplingParams
from tests.sampling.enumeration import Rule, round_edges

Text = tuple[int, ...]
Law = Callable[[Text], np.ndarray]
Key = tuple[int, ...]
PROMPT: Text = (0, 0)


class Draws:
    """Uniforms by key, as intervals; one path through all outcomes, told by `script`."""

    def __init__(self, script: list[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []  # which part of how many
        self.intervals: dict[Key, tuple[float, float]] = {}
        self.weight = 1.0

    def pick(self, key: Key, cuts: np.ndarray) -> float:
        """Return the middle of a part of the key's interval, which the cuts divide."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        edges = [low, *sorted({float(c) for c in cuts if low + 1e-15 < c < high - 1e-15}), high]
        part = self._script[len(self.taken)] if len(self.taken) < len(self._script) else 0
        self.taken.append((part, len(edges) - 1))
        self.weight *= (edges[part + 1] - edges[part]) / (high - low)
        self.intervals[key] = (edges[part], edges[part + 1])
        return (edges[part] + edges[part + 1]) / 2


def every_outcome(play: Callable[[Draws], Text]) -> Iterator[tuple[Text, Draws]]:
    script: list[int] = []
    while True:
        draws = Draws(script)
        yield play(draws), draws
        script = [part for part, _ in draws.taken]
        while script and script[-1] + 1 == draws.taken[len(script) - 1][1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def by_round(start: int, role: Role, index: int, offset: int) -> Key:
    """The shipped key: the committed length at the round's start, the role, the node."""
    return (start, int(role), index)


def by_absolute_position(start: int, role: Role, index: int, offset: int) -> Key:
    return (start + offset, int(role))


class Rounds:
    """Rounds of one text with `depth` drafts each, over laws of the last few tokens."""

    def __init__(
        self, target: Law, drafter: Law, rule: Rule | None, depth: int, *, drawn: bool, num_rounds: int = 2
    ) -> None:
        self.target, self.drafter, self.rule, self.depth = target, drafter, rule, depth
        self.drawn, self.num_rounds = drawn, num_rounds
        self._edges: dict[tuple[Text, Text], np.ndarray] = {}

    def play(self, draws: Draws, keyed: Callable[..., Key]) -> Text:
        text: Text = PROMPT
        for _ in range(self.num_rounds):
            start, drafts, q = len(text), (), []
            for i in range(self.depth):
                law = self.drafter(text + drafts)
                if self.drawn:
                    u = draws.pick(keyed(start, Role.DRAFT, i, i), np.cumsum(law))
                    drafts += (int(draw(law[None], np.asarray([u]))[0]),)
                else:
                    drafts += (int(law.argmax()),)
                q.append(law)
            p = np.stack([self.target(text + drafts[:i]) for i in range(self.depth + 1)])[None]
            case = (p, np.stack([*q, np.zeros_like(q[0])])[None], np.asarray([drafts]), np.asarray([self.depth]))
            if self.rule is None:
                text += self._chosen(start, text, drafts, p[0], draws)
                continue
            if (text, drafts) not in self._edges:
                self._edges[text, drafts] = round_edges(self.rule, *case)[0]
            edges = self._edges[text, drafts]
            u_BK = np.asarray([[draws.pick(keyed(start, Role.ACCEPT, i, i), edges[i]) for i in range(self.depth)]])
            verdict = self.rule(*case, u_BK)
            n = int(verdict.num_accepted_B[0])
            law = verdict.law_BV[0] / verdict.law_BV[0].sum()
            u = draws.pick(keyed(start, Role.RESAMPLE, 0, n), np.cumsum(law))
            text += (*drafts[:n], int(draw(law[None], np.asarray([u]))[0]))
        return text

    def _chosen(self, start: int, text: Text, drafts: Text, p_LV: np.ndarray, draws: Draws) -> Text:
        """The target chooses at every row, also past the end of the path, by draws keyed by the place."""
        choices = []
        for i, law in enumerate(p_LV):
            u = draws.pick((start + i, int(Role.CHOICE), 0), np.cumsum(law))
            choices.append(int(draw(law[None], np.asarray([u]))[0]))
        n = len(walk(drafts, None, choices))
        return (*drafts[:n], choices[n])

    def distance(self, keyed: Callable[..., Key]) -> float:
        """Return how far the law of the rounds, continued by the target to a fixed length, is from the target's."""
        size, length = len(self.target(PROMPT)), self.num_rounds * (self.depth + 1)
        law = dict.fromkeys(itertools.product(range(size), repeat=length), 0.0)
        total, emitted = 0.0, {}
        for text, draws in every_outcome(lambda draws: self.play(draws, keyed)):
            emitted[text] = emitted.get(text, 0.0) + draws.weight
            total += draws.weight
        assert total == pytest.approx(1.0, abs=1e-12)
        for text, mass in emitted.items():
            for rest in itertools.product(range(size), repeat=length - len(text) + len(PROMPT)):
                law[text[len(PROMPT) :] + rest] += mass * self._mass(text, rest)
        return sum(abs(mass - self._mass(PROMPT, text)) for text, mass in law.items()) / 2

    def _mass(self, text: Text, rest: Text) -> float:
        mass = 1.0
        for i, token in enumerate(rest):
            mass *= self.target(text + rest[:i])[token]
        return float(mass)


RULES: dict[str, Rule | None] = {"token": token_rule, "block": block_rule, "choice": None}
SHAPES = [(2, 2, 0), (2, 2, 5), (3, 1, 3)]  # V, K, seed


def tables(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target that looks at two tokens and of a drafter that looks at one."""
    rng = np.random.default_rng(seed)
    shapes = ((size,) * 3, (size,) * 2)
    target, drafter = (rng.normal(scale=1.5, size=shape).astype(np.float32) for shape in shapes)
    return target, drafter


def law_of(logits: np.ndarray) -> Law:
    table = np.exp(logits.astype(np.float64))
    table /= table.sum(axis=-1, keepdims=True)
    order = logits.ndim - 1
    return lambda text: table[((0,) * order + text)[-order:]]


def rounds(rule: str, size: int, depth: int, seed: int) -> Rounds:
    target, drafter = tables(size, seed)
    return Rounds(law_of(target), law_of(drafter), RULES[rule], depth, drawn=rule != "choice")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_two_rounds_under_the_shipped_keys_have_the_targets_law(rule: str, shape: tuple[int, int, int]) -> None:
    assert rounds(rule, *shape).distance(by_round) < 1e-9


def test_block_rule_keyed_by_absolute_position_is_biased() -> None:
    """The round has looked at draws past what it keeps, and the next one takes them for fresh."""
    assert rounds("block", 2, 2, 0).distance(by_absolute_position) > 1e-3
    assert rounds("block", 2, 2, 5).distance(by_absolute_position) == pytest.approx(0.034, abs=0.001)


def test_the_token_rule_stops_at_the_first_failure_so_it_stands_keys_of_absolute_position() -> None:
    assert rounds("token", 2, 2, 0).distance(by_absolute_position) < 1e-9


class Favourite:
    """Drafts the most likely tokens of a table, as point masses."""

    name = "favourite"
    max_drafts = 64
    num_top = 0

    def __init__(self, law: Law) -> None:
        self._law = law

    def propose(self, views: list[View], budgets: list[int]) -> list[Proposal]:
        return [self._chosen(tuple(view.tokens), budget) for view, budget in zip(views, budgets, strict=True)]

    def _chosen(self, text: Text, budget: int) -> Chosen:
        drafts: Text = ()
        for _ in range(budget):
            drafts += (int(self._law(text + drafts).argmax()),)
        return Chosen(drafts)

    def observe(self, outcomes: list[Outcome]) -> None: ...

    def fork(self, seq: int, child: int) -> None: ...

    def release(self, seq: int) -> None: ...


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_engine_plays_exactly_these_rounds(
    rule: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each outcome is replayed in the engine, which is given the uniforms of those keys and no others."""
    size, depth, seed = shape
    target, drafter = tables(size, seed)
    model = rounds(rule, *shape)
    given: dict[Key, float] = {}
    monkeypatch.setattr(
        Stream,
        "uniforms",
        lambda self, position, role, count: [given[position, int(role), i] for i in range(count)],
    )
    played = 0
    for text, draws in every_outcome(lambda draws: model.play(draws, by_round)):
        if min(high - low for low, high in draws.intervals.values()) < 1e-5:
            continue  # the engine's laws are float32
        # the round that ends a prompt has no drafts: it is made to write the second token of the prompt
        given = {(1, int(Role.CHOICE), 0): 0.0} | {
            key: (low + high) / 2 for key, (low, high) in draws.intervals.items()
        }
        guesser = LMDrafter(ToySession(drafter), vocab_size=size) if model.drawn else Favourite(model.drafter)
        engine = Engine(ToySession(target), guesser, token_bytes=[b"x"] * size, k=depth)
        verify = "token" if rule == "token" else "block"
        engine.add(Request(PROMPT[:1], SamplingParams(temperature=1.0, verify=verify, max_tokens=50)))
        emitted = [trace.token_id for _ in range(3) for event in engine.step() for trace in event.tokens]
        assert (*PROMPT[:1], *emitted) == text
        played += 1
    assert played > 20
