"""Measuring, on toys and with a clock that moves only when told: who runs when, and what is counted."""

import numpy as np
import pytest

from forerun.backends.toy import ToySession
from forerun.bench import measure
from forerun.bench.measure import (
    Forerun,
    SessionPasses,
    Spans,
    compare_texts,
    pass_times,
    run_workload,
    time_rounds,
    timed_drafter,
)
from forerun.bench.stats import Run
from forerun.drafters.lm import LMDrafter
from forerun.types import SamplingParams
from tests.bench.doubles import VOCAB_SIZE, FakeClock, SlowSession, toy_llm

PROMPT = [7, 9, 11, 7, 9]


class Diary:
    """A contender that writes down when it ran and takes a fixed time."""

    baseline, has_our_weights = None, True

    def __init__(self, name: str, seconds: float, clock: FakeClock, diary: list[tuple[str, float]]) -> None:
        self.name = name
        self._seconds, self._clock, self._diary = seconds, clock, diary

    def run(self, prompt_ids: object, params: SamplingParams) -> Run:
        self._diary.append((self.name, self._clock()))
        self._clock.advance(self._seconds)
        return Run((1, 2, 3), 1, 0.0, self._seconds)


def test_contenders_take_turns_within_each_prompt_and_swap_from_one_to_the_next() -> None:
    clock, diary = FakeClock(), list[tuple[str, float]]()
    contenders = [Diary("a", 1.0, clock, diary), Diary("b", 10.0, clock, diary)]
    params = [SamplingParams()] * 2
    runs = [found for r in range(2) for found in run_workload(contenders, [[1], [2]], params, repetition=r)]
    assert diary == [("a", 0), ("b", 1), ("b", 11), ("a", 21), ("b", 22), ("a", 32), ("a", 33), ("b", 34)]
    found = [(prompt, contender, run.decode_s) for prompt, contender, run in runs[:3]]
    assert found == [(0, 0, 1), (0, 1, 10), (1, 1, 10)]


def test_the_curve_is_the_medians_of_widths_that_take_turns() -> None:
    clock = FakeClock()
    session = SlowSession(clock=clock, cost=lambda rows: 0.010 + 0.001 * rows)
    (times,) = pass_times([SessionPasses(session)], [1, 2, 3], rows=(1, 2, 5), repeats=2, clock=clock)
    assert times == pytest.approx({1: 0.011, 2: 0.012, 5: 0.015})
    assert session.widths == [3, 5, 2, 1, 1, 2, 5, 5, 2, 1]  # context, warm-up, then to and fro


def test_two_engines_take_turns_at_each_width_and_each_rests_and_warms_up_before_its_turn() -> None:
    clock, rests = FakeClock(), list[float]()
    fast, slow = (SlowSession(clock=clock, cost=lambda rows, s=seconds: s * rows) for seconds in (0.01, 0.03))
    engines = [SessionPasses(fast), SessionPasses(slow)]
    ours, theirs = pass_times(engines, [1, 2], rows=(1, 4), repeats=1, clock=clock, sleep=rests.append)
    assert ours == pytest.approx({1: 0.01, 4: 0.04})
    assert theirs == pytest.approx({1: 0.03, 4: 0.12})
    assert fast.widths == slow.widths == [2, 4, 4, 1, 1, 1, 1, 4, 4]
    assert len(rests) == 8


def test_the_curve_leaves_no_sequence_behind() -> None:
    session = ToySession.random(5, order=1)
    room = session.room()
    pass_times([SessionPasses(session)], [1, 2, 3], rows=(1, 2), repeats=1)
    measure.last_logits(session, [1, 2])
    measure.example_logits(session)
    assert session.room() == room


def test_spans_add_up_by_name_and_count_the_wait_for_the_device() -> None:
    clock = FakeClock()
    spans = Spans(wait=lambda: clock.advance(0.5), clock=clock)
    for seconds in (1.0, 2.0):
        with spans("draft"):
            clock.advance(seconds)
    assert spans.take() == {"draft": 4.0}
    assert spans.take() == {}


def test_a_span_ends_when_its_stretch_fails() -> None:
    clock = FakeClock()
    spans = Spans(clock=clock)

    def fail() -> None:
        with spans("target"):
            clock.advance(1.0)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert spans.take() == {"target": 1.0}


def test_passes_of_a_draft_model_are_told_from_the_rest_of_drafting() -> None:
    clock = FakeClock()
    session = SlowSession(clock=clock, cost=lambda rows: 1.0 * rows)
    drafter, spans = LMDrafter(session, vocab_size=7), Spans(clock=clock)
    with timed_drafter(drafter, spans):
        handle = drafter.session.open()
        drafter.session.extend([(measure.Feed(handle, [1, 2], 1))])
        assert drafter.session.vocab_size == 7
    assert spans.take() == {"draft_model": 2.0}
    assert drafter.session is session
    with timed_drafter(None, spans):
        pass
    assert spans.take() == {}


def test_plain_and_speculative_runs_write_the_same_and_count_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch, drafter="ngram", k=4)
    params = SamplingParams(max_tokens=40, seed=1)
    plain = Forerun(llm, "plain", k=0).run(PROMPT, params)
    speculative = Forerun(llm, "speculative", k=None).run(PROMPT, params)
    assert plain.token_ids == speculative.token_ids
    assert plain.num_timed == 39
    assert plain.speculation is not None
    assert speculative.speculation is not None
    assert plain.speculation.proposed == 0
    assert speculative.speculation.tokens_per_round > 2
    batch = Forerun(llm, "plain", k=0).run_batch([PROMPT] * 3, [params] * 3)
    assert batch.num_tokens == 120
    assert batch.seconds > 0


def test_tokens_of_a_first_round_with_drafts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch, drafter="ngram", k=4)
    run = Forerun(llm, "speculative", k=None).run([5], SamplingParams(max_tokens=9, seed=1))
    assert run.num_timed == len(run.token_ids) - run.num_first


def test_every_round_but_the_reading_of_the_prompt_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch, drafter="ngram", k=4)
    params = [SamplingParams(max_tokens=20, seed=1)] * 2
    plain = time_rounds(llm, [PROMPT, PROMPT[::-1]], params, k=0)
    assert len(plain) == 2 * 19
    assert {r.num_drafts for r in plain} == {0}
    speculative = time_rounds(llm, [PROMPT], params[:1], k=None)
    assert len(speculative) < 19
    assert max(r.num_drafts for r in speculative) == 4
    for r in [*plain, *speculative]:
        assert r.target > 0
        assert r.sampling > 0
        assert r.rest > 0
        assert r.wall == pytest.approx(r.draft + r.target + r.sampling + r.rest)


def test_a_greedy_difference_is_judged_by_the_logits_after_the_common_text() -> None:
    logits = np.zeros((4, 4), np.float32)
    logits[1] = [0.0, 0.0, 5.0, 4.9999]  # after token 1, tokens 2 and 3 are nearly tied
    logits[2] = [3.0, 0.0, 0.0, 1.0]  # after token 2, token 0 is clear
    session = ToySession(logits)

    def compare(text: list[int], reference: list[int]) -> tuple:
        (found,) = compare_texts([text], [reference], [("p", [0, 1])], session=session, dtype="fp32", is_greedy=True)
        return found.prompt_id, found.position, found.tokens, found.verdict

    assert compare([3, 1], [2, 1]) == ("p", 0, (3, 2), "near-tie")
    assert compare([2, 3], [2, 0]) == ("p", 1, (3, 0), "real")
    assert compare([2], [2, 0]) == ("p", 1, (None, 0), "not judged")


def test_equal_texts_have_no_difference_and_sampled_ones_are_not_judged() -> None:
    session = ToySession.random(4, order=1)
    shared = {"session": session, "dtype": "fp32"}
    prompts = [("p", [1]), ("q", [2])]
    assert compare_texts([[1], [2]], [(1,), (2,)], prompts, is_greedy=True, **shared) == []
    (found,) = compare_texts([[1], [2]], [[1], [3]], prompts, is_greedy=False, **shared)
    assert (found.prompt_id, found.margin, found.verdict) == ("q", None, "not judged")


def test_no_one_waits_for_a_cpu_and_a_device_is_waited_for_by_a_copy() -> None:
    session = ToySession.random(VOCAB_SIZE, order=1)
    measure.waiter(session)()
    session.device = "cuda:0"  # type: ignore[attr-defined]
    measure.waiter(session)()
