"""The law of whole answers, of many requests with mixed settings in one engine, against exact enumeration.

Every answer (tokens and the reason of its end) is enumerated from the table by the plain-Python law; the engine writes
thousands of answers over keyed seeds; chi-square with cells of small expectation pooled. All tests of this file
together raise a false alarm once in a million runs of fresh seeds; the seeds are fixed.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from scipy.stats import chi2

from forerun.backends.toy import ToySession
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.recycle import NUM_SUCCESSORS, RecycleDrafter
from forerun.drafters.suffix import Past, SuffixDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.types import SamplingParams
from tests.engine.playground import (
    DRAFTERS,
    EOS,
    SIZE,
    TOKEN_BYTES,
    CheckedSession,
    bridge,
    engine_of,
    in_a_tree,
    run,
    toy,
)
from tests.reference import next_law

PROMPTS = [(1,), (3, 0, 2), (0, 5, 1, 1, 2, 4)]
MIXED = [
    SamplingParams(temperature=1.0, max_tokens=4),
    SamplingParams(temperature=0.7, max_tokens=5, top_k=3, k=1),
    SamplingParams(temperature=1.3, max_tokens=4, top_p=0.7, verify="token"),
    SamplingParams(temperature=1.5, max_tokens=4, min_p=0.15, k=5),
    SamplingParams(temperature=1.0, max_tokens=4, repetition_penalty=4.0, min_tokens=3),
    SamplingParams(temperature=1.0, max_tokens=4, presence_penalty=2.0, frequency_penalty=0.7, verify="token", k=2),
    SamplingParams(temperature=0.9, max_tokens=4, logit_bias={0: 1.0, 2: -8.0}, stop_token_ids=(1,)),
    SamplingParams(temperature=1.0, max_tokens=4, stop=("ba", "é"), k=4),
    SamplingParams(temperature=1.0, max_tokens=4, stop=("bab",), ignore_eos=True, min_tokens=2, top_k=5),
    SamplingParams(temperature=1.0, max_tokens=4, verify="coupled"),
    SamplingParams(max_tokens=4, repetition_penalty=1.3),
]
Answer = tuple[tuple[int, ...], str]


def answers(
    session: ToySession, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...] = ()
) -> dict[Answer, float]:
    """The law of all that a request may answer."""
    if output:
        end_ids = (() if params.ignore_eos else (EOS,)) + tuple(params.stop_token_ids)
        if output[-1] in end_ids:
            return {(output, "stop"): 1.0}
        text = b"".join(TOKEN_BYTES[token] for token in output)
        before = len(text) - len(TOKEN_BYTES[output[-1]])
        found = [text.find(stop.encode(), max(0, before - len(stop.encode()) + 1)) for stop in params.stop]
        if len(output) >= params.min_tokens and any(place >= 0 for place in found):
            return {(output, "stop"): 1.0}
        if len(output) == params.max_tokens:
            return {(output, "length"): 1.0}
    end_ids = (() if params.ignore_eos else (EOS,)) + tuple(params.stop_token_ids)
    law = next_law(session._row([*prompt, *output]).tolist(), params, prompt, output, end_ids)
    found = {}
    for token, mass in enumerate(law):
        if mass > 0:
            for answer, more in answers(session, params, prompt, (*output, token)).items():
                found[answer] = found.get(answer, 0.0) + mass * more
    return found


def least_p_value(expected: dict[Answer, float], seen: Counter[Answer]) -> float:
    """Return the least over all views: whole answers, ends, tokens and pairs at each place, number of repetitions."""
    found = []
    for view in VIEWS:
        law: dict[object, float] = {}
        counts: Counter[object] = Counter()
        for answer, mass in expected.items():
            law[view(answer)] = law.get(view(answer), 0.0) + mass
        for answer, count in seen.items():
            counts[view(answer)] += count
        found.append(p_value(law, counts))
    return min(found)


def p_value(expected: Mapping[object, float], seen: Counter[object]) -> float:
    """Chi-square with cells of expectation under 8 pooled."""
    assert set(seen) <= set(expected)
    total = seen.total()
    large = [answer for answer, mass in expected.items() if mass * total >= 8]
    cells = [(expected[answer] * total, seen[answer]) for answer in large]
    rest = total - sum(mass for mass, _ in cells)
    if rest > 1e-6 * total:
        cells.append((rest, total - sum(count for _, count in cells)))
    if len(cells) == 1:
        return 1.0
    return float(chi2.sf(sum((count - mass) ** 2 / mass for mass, count in cells), len(cells) - 1))


VIEWS: list[Callable[[Answer], object]] = [
    lambda answer: answer,
    lambda answer: (len(answer[0]), answer[1]),
    *[lambda answer, i=i: answer[0][i : i + 1] for i in range(4)],
    *[lambda answer, i=i: answer[0][i : i + 2] for i in range(3)],
    lambda answer: len(answer[0]) - len(set(answer[0])),
]
DRAFTERS_HERE = {
    "lm": lambda: LMDrafter(near_the_target(), vocab_size=SIZE),
    "ngram": NgramDrafter,
    "suffix": lambda: SuffixDrafter(past=Past(memory=1 << 17), reach=3),
    "recycle": lambda: RecycleDrafter(np.full((SIZE, NUM_SUCCESSORS), -1)),
    "lm of another tokenizer": lambda: LMDrafter(bridge(toy(order=1, seed=5, size=9)), vocab_size=SIZE),
    "cascade of three": lambda: three_levels(),
    "lm in a tree": lambda: in_a_tree(LMDrafter(near_the_target(), vocab_size=SIZE)),
    "mix": lambda: MixDrafter([NgramDrafter(), *(LMDrafter(near_the_target(i), vocab_size=SIZE) for i in (1, 2))]),
}
RATE = 1e-6 / (len(MIXED) * len(VIEWS) * len(DRAFTERS_HERE) + len(VIEWS))


def near_the_target(seed: int = 1) -> ToySession:
    """A draft model that is mostly right, so that blocks are long."""
    logits = toy()._logits
    return CheckedSession(logits + np.random.default_rng(seed).normal(scale=0.6, size=logits.shape).astype(np.float32))


def three_levels() -> LMDrafter:
    middle = LMDrafter(near_the_target(seed=2), vocab_size=SIZE, inner=NgramDrafter())
    return LMDrafter(near_the_target(), vocab_size=SIZE, inner=middle)


@pytest.mark.parametrize("drafter", DRAFTERS_HERE)
def test_answers_of_mixed_requests_in_one_engine_have_the_targets_law(drafter: str) -> None:
    count = 500
    session = toy()
    seen: dict[tuple[int, int], Counter[Answer]] = {}
    requests, kinds = [], []
    for seed in range(count):
        for i, params in enumerate(MIXED):
            kinds.append((i, i % len(PROMPTS)))
            requests.append(Request(PROMPTS[kinds[-1][1]], params, seed=seed, stream=i))
    engine = engine_of(DRAFTERS_HERE[drafter](), session, max_running=150, prefill_rows=40)
    for kind, result in zip(kinds, run(engine, requests, joins=[i // 60 for i in range(len(requests))]), strict=True):
        seen.setdefault(kind, Counter())[tuple(result.token_ids), str(result.finish_reason)] += 1
    for (i, prompt), counts in seen.items():
        assert least_p_value(answers(session, MIXED[i], PROMPTS[prompt]), counts) > RATE, (MIXED[i], prompt)


def test_the_statistic_finds_a_drafter_that_gives_a_wrong_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test, with q of another temperature than that of the draw: it must not pass."""
    import forerun.drafters.lm as module

    honest = module.draw

    def sharper(law: object, u: object) -> object:
        return honest(law**3, u)  # type: ignore[operator]

    monkeypatch.setattr(module, "draw", sharper)
    session, params = toy(), MIXED[0]
    requests = [Request(PROMPTS[0], params, seed=seed) for seed in range(700)]
    engine = engine_of(DRAFTERS["lm"](), session, max_running=250)
    seen = Counter((tuple(r.token_ids), str(r.finish_reason)) for r in run(engine, requests))
    assert least_p_value(answers(session, params, PROMPTS[0]), seen) < RATE


def test_speculation_is_at_work_in_these_engines() -> None:
    requests = [Request(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=30), seed=seed) for seed in range(20)]
    for rule in ("token", "block", "coupled"):
        engine = engine_of(DRAFTERS["lm"](), toy(), verify=rule)
        stats = sum((r.stats for r in run(engine, requests)), start=run(engine_of(), requests[:1])[0].stats)
        assert stats.accepted > 25, rule
    same = Engine(toy(), LMDrafter(toy(), vocab_size=SIZE), token_bytes=TOKEN_BYTES, k=4)
    stats = run(same, [Request(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=101))])[0].stats
    assert stats.acceptance_rate > 0.99  # a drafter that is the target is always right
