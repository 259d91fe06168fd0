"""What never changes a text: neighbours, order, budgets; and, where it is promised, the drafter, K and the rule."""

import itertools
from typing import Any

import pytest

from forerun.engine.sequence import Request
from forerun.sampling.streams import Role, Stream
from forerun.types import SamplingParams, Verify
from tests.engine.playground import DRAFTERS, SIZE, engine_of, everything_in_turn, run, toy

PROMPTS = [(1,), (3, 0, 2), (0, 5, 1, 1, 2, 4, 0, 3, 3), (2, 2)]
COMMON: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "min_tokens": 5},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4, "stop": ("cab", "b c b")},
    {"logit_bias": {1: 1.5, 4: -2.0}, "stop_token_ids": (0,), "min_tokens": 3},
    {"ignore_eos": True, "stop": ("é",)},
    {"ignore_eos": True, "logits_processors": (lambda tokens, x: x + (len(tokens) % 3) * x[::-1],)},
]


def requests_of(temperature: float, verify: Verify = "block", **more: Any) -> list[Request]:
    found = []
    for seed, (prompt, settings) in enumerate(itertools.product(PROMPTS, COMMON)):
        filters = {"top_k": 5, "top_p": 0.95, "min_p": 0.01} if temperature and seed % 2 else {}
        params = SamplingParams(
            temperature=temperature, verify=verify, max_tokens=24, **{**settings, **filters, **more}
        )
        found.append(Request(prompt, params, seed=seed // 3, stream=seed % 3))
    return found


def alone(requests: list[Request], drafter: str = "none", **settings: Any) -> list[tuple[Any, ...]]:
    return [run(engine_of(DRAFTERS[drafter](), **settings), [request])[0].outcome for request in requests]


@pytest.fixture(scope="module")
def plain() -> dict[float, list[tuple[Any, ...]]]:
    """What is written without drafts, each request alone: greedy, and coupled at a temperature."""
    return {0.0: alone(requests_of(0.0)), 0.9: alone(requests_of(0.9, "coupled"))}


@pytest.mark.parametrize("k", [1, 2, 5, 64])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_text_is_the_same_for_every_drafter_and_every_k_in_a_batch(
    drafter: str, k: int, plain: dict[float, list[tuple[Any, ...]]]
) -> None:
    engine = engine_of(DRAFTERS[drafter](), k=k)
    results = run(engine, requests_of(0.9, "coupled"), joins=[i % 5 for i in range(24)])
    assert [result.outcome for result in results] == plain[0.9]


@pytest.mark.parametrize("k", [1, 4, 64])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verify", ["block", "token", "coupled"])
def test_greedy_text_is_the_same_for_every_drafter_k_and_rule_in_a_batch(
    drafter: str, k: int, verify: Verify, plain: dict[float, list[tuple[Any, ...]]]
) -> None:
    engine = engine_of(DRAFTERS[drafter](), k=k)
    results = run(engine, requests_of(0.0, verify), joins=[i % 5 for i in range(24)])
    assert [result.outcome for result in results] == plain[0.0]


@pytest.mark.parametrize("drafter", ["lm", "ngram", "lm that is the target"])
def test_coupled_and_greedy_text_is_the_same_alone(drafter: str, plain: dict[float, list[tuple[Any, ...]]]) -> None:
    for k in (1, 4):
        assert alone(requests_of(0.9, "coupled"), drafter, k=k) == plain[0.9]
        assert alone(requests_of(0.0), drafter, k=k) == plain[0.0]


@pytest.mark.parametrize("verify", ["block", "token"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "lm", "lm with a short context", "scripted"])
def test_with_a_fixed_k_a_seed_has_one_text_whatever_its_neighbours_and_budgets(drafter: str, verify: Verify) -> None:
    """Alone, in a batch, joining late, with few places, and with prompts read in pieces of one to three tokens."""
    requests = requests_of(0.9, verify)
    expected = alone(requests, drafter)
    assert len(set(expected)) > 15
    for joins, settings in (
        ([], {}),
        ([i % 7 for i in range(24)], {}),
        ([23 - i for i in range(24)], {"max_running": 3}),
        ([i // 2 for i in range(24)], {"prefill_rows": 2, "max_running": 5}),
        ([], {"prefill_rows": 1}),
    ):
        results = run(engine_of(DRAFTERS[drafter](), **settings), requests, joins=joins)
        assert [result.outcome for result in results] == expected, settings


def test_each_request_may_have_its_own_k_and_rule() -> None:
    requests = [
        Request(prompt, SamplingParams(temperature=0.9, verify=verify, k=k, max_tokens=15, ignore_eos=True), seed=3)
        for prompt in PROMPTS
        for verify in ("block", "token", "coupled")
        for k in (0, 1, 2, 6)
    ]
    together = run(engine_of(DRAFTERS["lm"]()), requests)
    assert [result.outcome for result in together] == alone(requests, "lm")
    for request, result in zip(requests, together, strict=True):
        assert len(result.stats.reached_by_position) <= (request.params.k or 0)
        assert (result.stats.proposed > 0) == (request.params.k != 0)


def test_streams_of_one_seed_and_seeds_of_one_stream_differ() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    requests = [Request((1,), params, seed=seed, stream=stream) for seed in range(4) for stream in range(4)]
    assert len({result.outcome for result in run(engine_of(DRAFTERS["lm"]()), requests)}) == 16
    again = [Request((1,), params, seed=2, stream=1)] * 3
    assert len({result.outcome for result in run(engine_of(DRAFTERS["lm"]()), again)}) == 1


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "scripted", "branching"])
@pytest.mark.parametrize("k", [1, 3, 64])
def test_sampled_text_is_that_of_plain_decoding_where_drafts_are_chosen(drafter: str, k: int) -> None:
    """The target's choice at a place depends on the text before it and on a draw keyed by the place."""
    requests = requests_of(0.9)
    expected = alone(requests)
    assert len(set(expected)) > 15
    results = run(engine_of(DRAFTERS[drafter](), k=k), requests, joins=[i % 5 for i in range(24)])
    assert [result.outcome for result in results] == expected
    assert sum(result.stats.accepted for result in results) > 15


@pytest.mark.parametrize("verify", ["block", "token", "coupled"])
@pytest.mark.parametrize("drafter", ["lm", "scripted", "branching", "sampling", "mixed"])
def test_no_draw_is_met_in_two_rounds(drafter: str, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms keyed by the round are asked for once. Those of the target's choices are keyed by place: there the

    drafts don't depend on them, so that what was looked at past the end of a path had no effect.
    """
    asked: list[tuple[int, int, int]] = []
    choices: list[int] = []
    honest_uniforms = Stream.uniforms

    def uniforms(self: Stream, position: int, role: Role, count: int) -> list[float]:
        if role == Role.CHOICE:
            assert count == 1
            choices.append(position)
        else:
            asked.extend((position, int(role), i) for i in range(count))
        return honest_uniforms(self, position, role, count)

    monkeypatch.setattr(Stream, "uniforms", uniforms)
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, verify=verify)
    (result,) = run(engine_of(DRAFTERS[drafter](), k=4), [Request(PROMPTS[2], params, seed=1)])
    first = len(PROMPTS[2])
    assert len(asked) == len(set(asked))
    assert {position for position, _, _ in asked} <= {first + sum(result.steps[:i]) for i in range(len(result.steps))}
    if verify == "coupled":
        assert not choices
        assert {role for _, role, _ in asked} <= {Role.DRAFT}
    elif drafter in ("scripted", "branching"):
        assert set(range(first, first + 200)) <= set(choices)
        assert not asked
    else:
        assert choices[0] == first  # the round that ends the prompt has no drafts
        assert {role for _, role, _ in asked} == {Role.DRAFT, Role.ACCEPT, Role.RESAMPLE}
        assert len(asked) > 150


def test_scripted_drafts_hold_every_token() -> None:
    assert {token for last in range(SIZE) for n in range(9) for token in everything_in_turn([last] * (n + 1))} == set(
        range(SIZE)
    )
    assert toy().vocab_size == SIZE
