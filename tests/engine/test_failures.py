"""A request that fails ends alone, and only where its own text gets to the failure."""

import math
from typing import Any

import pytest

from forerun.engine.sequence import Request
from forerun.types import SamplingParams, Verify
from tests.engine.playground import DRAFTERS, SIZE, Scripted, check_caches, engine_of, run, toy

NEIGHBOURS = [
    Request((1,), SamplingParams(temperature=0.9, max_tokens=20), seed=1),
    Request((2, 3), SamplingParams(max_tokens=20, ignore_eos=True)),
    Request((0, 5, 1), SamplingParams(temperature=1.1, max_tokens=20, ignore_eos=True, verify="coupled"), seed=3),
]


def fails_at(length: int) -> Any:
    def processor(tokens: Any, logits: Any) -> Any:
        if len(tokens) >= length:
            raise ValueError("no rule for this")
        return logits

    return processor


def forbids_all_at(length: int) -> Any:
    return lambda tokens, logits: logits * 0 - math.inf if len(tokens) >= length else logits


@pytest.mark.parametrize("make", [fails_at, forbids_all_at])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_failing_request_ends_with_an_error_and_its_neighbours_write_on(
    drafter: str, temperature: float, make: Any
) -> None:
    """From its first row, in the middle, and where a draft reaches past the failure. What came before is emitted."""
    expected = [run(engine_of(DRAFTERS[drafter]()), [request])[0].outcome for request in NEIGHBOURS]
    for length in (2, 5, 9):
        session = toy()
        engine = engine_of(DRAFTERS[drafter](), session)
        params = SamplingParams(
            temperature=temperature, max_tokens=20, ignore_eos=True, logits_processors=(make(length),)
        )
        results = run(engine, [NEIGHBOURS[0], Request((4, 1), params, seed=7, keep=True), *NEIGHBOURS[1:]])
        failed = results.pop(1)
        assert failed.finish_reason == "error"
        assert failed.error
        assert "no rule for this" in failed.error or "every token is forbidden" in failed.error
        assert len(failed.token_ids) == length - 2
        assert [result.outcome for result in results] == expected
        assert not session.caches  # an error keeps nothing


def grammar(tokens: Any, logits: Any) -> Any:
    """Output alternates between even and odd ids, from an even one; asked about another text, it raises."""
    for i, token in enumerate(tokens[1:]):
        if token % 2 != i % 2:
            raise ValueError(f"token {token} can't stand at place {i}")
    logits[(len(tokens) % 2) :: 2] = -math.inf
    return logits


@pytest.mark.parametrize("verify", ["block", "token", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_that_a_grammar_forbids_are_rejected_and_no_error(
    drafter: str, temperature: float, verify: Verify
) -> None:
    params = SamplingParams(
        temperature=temperature, max_tokens=25, ignore_eos=True, logits_processors=(grammar,), verify=verify
    )
    requests = [Request((3,), params, seed=seed) for seed in range(6)]
    results = run(engine_of(DRAFTERS[drafter]()), [*requests, *NEIGHBOURS])
    for result in results[:6]:
        assert result.finish_reason == "length", result.error
        assert [token % 2 for token in result.token_ids] == [i % 2 for i in range(25)]
    if temperature == 0.0 or verify == "coupled":
        plain = run(engine_of(), requests)
        assert [r.outcome for r in results[:6]] == [r.outcome for r in plain]
    expected = [run(engine_of(DRAFTERS[drafter]()), [request])[0].outcome for request in NEIGHBOURS]
    assert [result.outcome for result in results[6:]] == expected


def test_a_grammar_leaves_the_law_of_the_target_whatever_is_drafted() -> None:
    """With drafts that it forbids mostly: chi-square over 1500 answers, false-alarm rate 1e-6."""
    from tests.engine.test_law import Counter, answers, least_p_value

    def even_first(tokens: Any, logits: Any) -> Any:
        if any(token % 2 != i % 2 for i, token in enumerate(tokens[1:])):
            raise ValueError("asked about a text that it forbids")
        logits = logits.copy()
        logits[(len(tokens) % 2) :: 2] = -math.inf
        return logits

    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, logits_processors=(even_first,))
    session = toy()
    for drafter in (DRAFTERS["lm"](), Scripted(lambda text: [0, 2, 1]), Scripted(lambda text: [1, 0, 1, 0])):
        requests = [Request((3,), params, seed=seed) for seed in range(500)]
        results = run(engine_of(drafter, session, max_running=100), requests)
        seen = Counter((tuple(r.token_ids), str(r.finish_reason)) for r in results)
        assert least_p_value(answers(session, params, (3,)), seen) > 1e-6 / 30


def test_a_request_that_fails_in_its_first_round_leaves_nothing() -> None:
    for drafter in DRAFTERS.values():
        session = toy()
        engine = engine_of(drafter(), session)
        forbidden = SamplingParams(logit_bias=dict.fromkeys(range(SIZE), -math.inf))
        (result,) = run(engine, [Request((1, 2), forbidden)])
        assert (result.token_ids, result.finish_reason) == ([], "error")
        assert not session.caches
        assert not engine.has_work
        check_caches(engine)
