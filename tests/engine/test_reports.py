"""What the engine reports of a round: sources, positions, masses, log-probabilities, counts. All recomputed outside."""

import math

import numpy as np
import pytest

from forerun.engine.sequence import Request
from forerun.types import SamplingParams, SpeculationStats, Verify
from tests.engine.playground import DRAFTERS, EOS, SIZE, Result, engine_of, run, toy
from tests.reference import next_law

PARAMS = {
    "greedy": SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3),
    "plain": SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=0),
    "mixed": SamplingParams(
        temperature=0.8, top_k=5, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=20,
        max_tokens=40, logprobs=SIZE, logit_bias={2: 1.0},
    ),
    "more alternatives than tokens": SamplingParams(temperature=0.8, max_tokens=20, logprobs=50),
}  # fmt: skip
PROMPTS = [(1,), (3, 0, 2), (0, 5, 1, 1, 2)]


def results_of(drafter: str, verify: Verify, params: SamplingParams) -> list[tuple[Request, Result]]:
    params = SamplingParams(**{**params.__dict__, "verify": verify})
    requests = [Request(PROMPTS[seed % 3], params, seed=seed) for seed in range(6)]
    return list(zip(requests, run(engine_of(DRAFTERS[drafter](), k=4), requests), strict=True))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("verify", ["block", "token", "coupled"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "lm", "scripted"])
def test_masses_and_log_probabilities_are_the_targets_and_the_drafters(
    drafter: str, verify: Verify, params: str
) -> None:
    target, guess = toy(), toy(order=1, seed=5)
    for request, result in results_of(drafter, verify, PARAMS[params]):
        assert len(result.logprobs) == len(result.traces) == len(result.token_ids)
        for i, (trace, logprob) in enumerate(zip(result.traces, result.logprobs, strict=True)):
            output = result.token_ids[:i]
            text = [*request.prompt_ids, *output]
            arguments = (request.params, request.prompt_ids, output, (EOS,) if not request.params.ignore_eos else ())
            law = next_law(target._row(text).tolist(), *arguments)
            assert trace.token_id == logprob.token_id == result.token_ids[i]
            assert trace.p_target == pytest.approx(law[trace.token_id], rel=1e-5, abs=1e-9)
            assert trace.p_target > 0

            drawn = drafter == "lm" and verify != "coupled" and request.params.temperature > 0
            if trace.source in ("plain", "bonus") or verify == "coupled":
                assert trace.p_draft is None
            elif drawn:
                q = next_law(guess._row(text).tolist(), *arguments)
                assert trace.p_draft == pytest.approx(q[trace.token_id], rel=1e-5, abs=1e-9)
            else:
                assert trace.p_draft == (1.0 if trace.source == "draft" else 0.0)

            raw = target._row(text).astype(np.float64)
            raw -= np.logaddexp.reduce(raw)
            assert logprob.logprob == pytest.approx(raw[trace.token_id], abs=1e-5)
            assert len(logprob.top) == min(request.params.logprobs or 0, SIZE)
            assert [token for token, _ in logprob.top] == np.argsort(-raw, kind="stable")[: len(logprob.top)].tolist()
            np.testing.assert_allclose(
                [value for _, value in logprob.top], -np.sort(-raw)[: len(logprob.top)], atol=1e-5
            )


@pytest.mark.parametrize("verify", ["block", "token", "coupled"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "lm", "scripted", "lm with a short context"])
def test_counts_agree_with_traces_and_with_each_other(drafter: str, verify: Verify) -> None:
    for _request, result in results_of(drafter, verify, PARAMS["mixed"]):
        stats, traces = result.stats, result.traces
        assert stats.rounds == len(result.steps)
        assert stats.emitted == len(traces) == sum(result.steps)
        assert stats.accepted <= stats.reached <= stats.proposed
        assert sum(stats.reached_by_position) == stats.reached
        assert sum(stats.accepted_by_position) == stats.accepted
        assert len(stats.accepted_by_position) == len(stats.reached_by_position)
        reached = stats.reached_by_position
        assert all(b <= a for a, b in zip(stats.accepted_by_position, reached[1:], strict=False))
        assert stats.accepted - 4 <= sum(trace.source == "draft" for trace in traces) <= stats.accepted  # a cut block
        assert stats.tokens_per_round == pytest.approx(stats.emitted / stats.rounds)

        start = 0
        for number, size in enumerate(result.steps):
            block = traces[start : start + size]
            start += size
            assert [trace.round for trace in block] == [number] * size
            assert [trace.position for trace in block] == list(range(size))
            assert all(trace.source == "draft" for trace in block[:-1])
            if start < len(traces):
                assert block[-1].source in ("bonus", "resample", "plain")
        assert (drafter == "none") == all(trace.source == "plain" for trace in traces)
        if drafter == "lm with a short context":
            assert traces[-1].source == "plain"  # drafting stops past the draft model's context, the answer doesn't


def test_a_round_counts_positions_up_to_the_first_that_fell() -> None:
    from forerun.engine.engine import _round_stats

    assert _round_stats(0, 0, 1, fell=False) == SpeculationStats(1, 0, 0, 0, 1, (), ())
    assert _round_stats(4, 0, 1, fell=True) == SpeculationStats(1, 4, 1, 0, 1, (1,), (0,))
    assert _round_stats(4, 2, 3, fell=True) == SpeculationStats(1, 4, 3, 2, 3, (1, 1, 1), (1, 1, 0))
    assert _round_stats(4, 4, 5, fell=False) == SpeculationStats(1, 4, 4, 4, 5, (1, 1, 1, 1), (1, 1, 1, 1))
    total = _round_stats(4, 2, 3, fell=True) + _round_stats(1, 1, 2, fell=False) + _round_stats(0, 0, 1, fell=False)
    assert total == SpeculationStats(3, 5, 4, 3, 6, (2, 1, 1), (2, 1, 0))
    assert total.acceptance_by_position == (1.0, 1.0, 0.0)
    assert (total.acceptance_rate, total.tokens_per_round) == (0.75, 2.0)


def test_without_a_wish_for_them_there_are_no_log_probabilities() -> None:
    engine = engine_of()
    engine.add(Request((1,), SamplingParams(max_tokens=2)))
    assert all(event.logprobs is None for event in engine.step())


def test_a_greedy_text_has_mass_one_at_every_token() -> None:
    for _request, result in results_of("lm", "block", PARAMS["greedy"]):
        assert all(trace.p_target == 1.0 for trace in result.traces)
        assert all(math.exp(logprob.logprob) < 1.0 for logprob in result.logprobs)
