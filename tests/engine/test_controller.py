"""The controller drafts where it pays, stops where it doesn't, comes back, and never looks ahead."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forerun.backends.base import Scores
from forerun.drafters.base import Chosen, Outcome, Proposal, View
from forerun.drafters.lm import LMDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.engine.controller import Controller, Estimates
from forerun.engine.costs import CostTable, measure, measured
from forerun.engine.engine import Engine
from forerun.engine.policy import Policy
from forerun.engine.sequence import Request
from forerun.types import SamplingParams, Verify
from tests.engine.playground import (
    EOS,
    SIZE,
    TOKEN_BYTES,
    Branching,
    CheckedSession,
    Result,
    Scripted,
    engine_of,
    everything_in_turn,
    run,
    toy,
)

FLAT = CostTable((1, 32), (1.0, 1.31), (1,), (0.0,))
STEEP = CostTable((1, 32), (1.0, 32.0), (1,), (0.0,))
CURVE = CostTable((1, 2, 9, 32), (1.0, 1.12, 1.9, 6.0), (1,), (0.0,))
CHEAP_MODEL = CostTable((1, 32), (0.05, 0.06), (1,), (0.0,))
DEAR_MODEL = CostTable((1, 32), (2.0, 2.0), (1,), (0.0,))


def engine_with(policy: Policy, **settings: object) -> Engine:
    return Engine(toy(), token_bytes=TOKEN_BYTES, end_ids=(EOS,), k=policy.max_drafts, policy=policy, **settings)


class Oracle(Scripted):
    """Knows the text; from a place on it is wrong, and from another right again."""

    name = "oracle"

    def __init__(self, text: Sequence[int], wrong: range) -> None:
        self._text, self._wrong = text, wrong
        self.asked = 0
        super().__init__(self._guess)

    def _guess(self, tokens: Sequence[int]) -> Sequence[int]:
        self.asked += 1
        at = len(tokens)
        return [(token + (at + i in self._wrong)) % SIZE for i, token in enumerate(self._text[at : at + 8])]


def written(num_tokens: int = 300) -> list[int]:
    (result,) = run(engine_of(), [Request((1,), SamplingParams(max_tokens=num_tokens, ignore_eos=True))])
    return [1, *result.token_ids]


def with_oracle(wrong: range, costs: CostTable = CURVE) -> tuple[Result, Oracle]:
    text = written()
    oracle = Oracle(text, wrong)
    engine = engine_with(Controller([oracle], costs))
    (result,) = run(engine, [Request((1,), SamplingParams(max_tokens=300, ignore_eos=True))])
    assert [1, *result.token_ids] == text
    return result, oracle


def test_it_drafts_where_drafts_are_right() -> None:
    result, _ = with_oracle(range(0))
    assert result.stats.tokens_per_round > 4


def test_it_stops_where_they_are_wrong_and_asks_less_often() -> None:
    result, oracle = with_oracle(range(1000))
    assert result.stats.proposed < 30
    assert oracle.asked < 100  # of 299 rounds


def test_it_comes_back_when_they_are_right_again() -> None:
    result, _ = with_oracle(range(20, 150))
    late = sum(trace.source == "draft" for trace in result.traces[200:])
    assert late > 60  # of 100


def test_it_never_drafts_where_a_row_costs_as_much_as_a_pass() -> None:
    result, _ = with_oracle(range(0, 1000, 2), STEEP)
    assert result.stats.proposed < 12


class Counting(CheckedSession):
    passes = 0

    def extend(self, *args: Any, **rest: Any) -> Scores:
        self.passes += 1
        return super().extend(*args, **rest)


def test_a_dear_draft_model_is_only_probed_and_a_cheap_one_is_used() -> None:
    for costs, least, most in ((CHEAP_MODEL, 250, 2000), (DEAR_MODEL, 0, 25)):
        model = LMDrafter(Counting(toy()._logits), vocab_size=SIZE)
        engine = engine_with(Controller([model], CURVE, draft_costs={"lm": costs}))
        (result,) = run(engine, [Request((1,), SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True))])
        assert least <= result.stats.proposed <= most
        if costs is DEAR_MODEL:  # it hasn't read along: a pass for each probe, and few of those
            assert model.session.passes < 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_with_second_guesses_makes_trees_and_a_sure_one_chains(temperature: float) -> None:
    """Where rows cost next to nothing a tree pays; where each costs a good part of a pass it doesn't."""
    found = {}
    for costs in (FLAT, STEEP):
        model = LMDrafter(toy(order=1, seed=5), vocab_size=SIZE)
        policy = Controller([model], costs, draft_costs={"lm": CHEAP_MODEL})
        engine = engine_with(policy)
        requests = [Request((1,), SamplingParams(temperature=temperature, max_tokens=600, ignore_eos=True), seed=1)]
        engine.add(requests[0])
        trees, tokens = 0, []
        while engine.has_work:
            (event,) = engine.step()
            tokens += event.tokens
            trees += event.stats.proposed > len(event.stats.reached_by_position) + 8
        found[costs] = trees
        if temperature == 0.0:
            (plain,) = run(engine_of(), requests)
            assert [token.token_id for token in tokens] == plain.token_ids
    assert found[FLAT] > 30
    assert found[STEEP] == 0


def test_the_chances_of_later_ranks_are_learned_apart() -> None:
    text = written(400)
    model = LMDrafter(toy(), vocab_size=SIZE)  # always right at the first rank
    policy = Controller([model], FLAT, draft_costs={"lm": CHEAP_MODEL})
    engine = engine_with(policy)
    (result,) = run(engine, [Request((1,), SamplingParams(max_tokens=399, ignore_eos=True))])
    assert [1, *result.token_ids] == text[:400]
    assert result.stats.tokens_per_round > 8
    assert policy.estimates.chance(("lm", 0, 0)) > 0.95


def test_it_takes_the_drafter_that_is_right() -> None:
    text = written()
    right, wrong = Oracle(text, range(0)), Oracle(text, range(1000))
    wrong.name = "wrong"
    engine = engine_with(Controller([wrong, right], CURVE))
    (result,) = run(engine, [Request((1,), SamplingParams(max_tokens=300, ignore_eos=True))])
    assert result.stats.tokens_per_round > 4
    assert result.stats.proposed < 1.3 * result.stats.accepted + 30


def test_a_batch_shares_one_budget_and_the_surest_drafts_come_first() -> None:
    text = written(150)
    costs = CostTable((1, 16, 17, 64), (1.0, 1.1, 40.0, 90.0), (1,), (0.0,))  # more than 16 rows don't pay at all
    oracle = Oracle(text, range(0))
    engine = engine_with(Controller([oracle], costs))
    most = 0
    requests = [Request((1,), SamplingParams(max_tokens=149, ignore_eos=True)) for _ in range(6)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events = engine.step()
        most = max(most, len(events) + sum(event.stats.proposed for event in events))
    assert 10 <= most <= 16


def requests_of(temperature: float, verify: Verify) -> list[Request]:
    params = SamplingParams(temperature=temperature, verify=verify, max_tokens=24, ignore_eos=True)
    settings = [{}, {"repetition_penalty": 1.3}, {"stop": ("cab",)}, {"frequency_penalty": 0.6, "min_tokens": 5}]
    return [Request((1, 3, seed % SIZE), replace(params, **settings[seed % 4]), seed=seed) for seed in range(24)]


@pytest.mark.parametrize("costs", [FLAT, CURVE])
@pytest.mark.parametrize(("temperature", "verify"), [(0.0, "block"), (0.9, "coupled"), (0.9, "block")])
def test_the_text_is_that_of_plain_decoding_whatever_the_controller_does(
    temperature: float, verify: Verify, costs: CostTable
) -> None:
    """Greedy, coupled, and sampled as long as all drafters choose without chance."""
    requests = requests_of(temperature, verify)
    plain = [run(engine_of(), [request])[0].outcome for request in requests]
    policy = Controller([NgramDrafter(), Branching(everything_in_turn)], costs)
    results = run(engine_with(policy), requests, joins=[i % 5 for i in range(24)])
    assert [result.outcome for result in results] == plain


def test_events_say_who_drafted_and_what_was_expected() -> None:
    text = written(60)
    engine = engine_with(Controller([Oracle(text, range(0))], CURVE))
    engine.add(Request((1,), SamplingParams(max_tokens=59, ignore_eos=True)))
    events = [event for _ in range(8) for event in engine.step()]
    assert {event.drafter for event in events[2:] if event.stats.proposed} == {"oracle"}
    for event in events:
        decision = event.decision
        assert decision is not None
        assert decision.drafter == event.drafter
        assert decision.num_drafts == event.stats.proposed <= decision.num_offered
        assert decision.expected_tokens >= 1.0
        assert decision.seconds >= decision.plain_seconds > 0
        assert (decision.seconds == decision.plain_seconds) == (decision.num_drafts == 0)


def test_what_earlier_requests_taught_is_known_to_later_ones() -> None:
    estimates, text = Estimates(), written()
    requests = [Request((1,), SamplingParams(max_tokens=60, ignore_eos=True))]
    run(engine_with(Controller([Oracle(text, range(1000))], CURVE, estimates=estimates)), requests)
    (second,) = run(engine_with(Controller([Oracle(text, range(1000))], CURVE, estimates=estimates)), requests)
    assert second.stats.proposed <= 2
    assert estimates.table()


class LooksAtTheDraw(LMDrafter):
    """A draft model that takes back what it has drawn if it doesn't like it."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Proposal]:
        return [p if list(p.tokens)[:1] != [1] else Chosen(()) for p in super().propose(views, budgets)]


def first_drafted_token_law(model: type[LMDrafter], count: int) -> float:
    """Return how often token 0 comes out right after the prompt's own round: p is 0.7/0.3, q is 0.5/0.5."""
    from forerun.backends.toy import ToySession

    target = ToySession(np.log(np.asarray([0.7, 0.3], dtype=np.float32)))
    guess = ToySession(np.zeros(2, dtype=np.float32))
    policy = Controller([model(guess, vocab_size=2)], FLAT, draft_costs={"lm": CHEAP_MODEL})
    engine = Engine(target, token_bytes=[b"a", b"b"], k=1, policy=policy)
    for seed in range(count):
        engine.add(Request((0,), SamplingParams(temperature=1.0, max_tokens=3), seed=seed))
    drafts = zeros = 0
    seen: set[int] = set()
    while engine.has_work:
        for event in engine.step():
            for trace in event.tokens:
                if trace.round == 1 and event.request_id not in seen:
                    seen.add(event.request_id)
                    zeros += trace.token_id == 0
                    drafts += event.stats.proposed
    assert drafts > count / 3
    return zeros / count


def test_the_controller_does_not_look_at_the_draw_and_who_does_is_biased() -> None:
    """0.7/0.3 stays what it is; a drafter that drops a drawn token 1 makes 0.85/0.15 of it. 6 standard deviations."""
    count = 3000
    assert abs(first_drafted_token_law(LMDrafter, count) - 0.7) < 6 * (0.21 / count) ** 0.5
    assert abs(first_drafted_token_law(LooksAtTheDraw, count) - 0.85) < 6 * (0.21 / count) ** 0.5


def test_costs_are_straight_lines_that_never_fall(tmp_path: object) -> None:
    table = CostTable((1, 4, 8), (1.0, 1.3, 2.1), (1, 4), (0.001, 0.002))
    assert table(1) == 1.0
    assert table(6) == pytest.approx(1.7)
    assert table(16) == pytest.approx(3.7)
    assert table(1, 1064) == pytest.approx(2.0)
    assert table(0) == 0.0


def test_costs_are_measured_once_and_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    ticks = iter(range(1_000_000))
    session = toy(max_len=4096)

    def clock() -> float:
        return float(next(ticks))

    first = measured(session, clock, folder=tmp_path, key={"model": "toy"})
    used = next(ticks)
    again = measured(session, clock, folder=tmp_path, key={"model": "toy"})
    assert first == again
    assert next(ticks) == used + 1
    assert measured(session, clock, folder=tmp_path, key={"model": "another"}) is not first
    (tmp_path / "broken").mkdir()
    for path in tmp_path.glob("*.json"):
        path.write_text("{")
    assert measured(session, clock, folder=tmp_path, key={"model": "toy"}).rows == first.rows
    assert measure(toy(max_len=20), clock).rows == (1, 2, 3, 4, 5)
    assert session.room() == toy(max_len=4096).room()


def test_observing_is_passed_on(tmp_path: object) -> None:
    class Deaf(Scripted):
        seen = 0

        def observe(self, outcomes: Sequence[Outcome]) -> None:
            self.seen += len(outcomes)

    deaf = Deaf(lambda _tokens: ())
    run(engine_with(Controller([deaf], CURVE)), [Request((1, 2), SamplingParams(max_tokens=9, ignore_eos=True))])
    assert deaf.seen == 9
