"""Caches under random joins, aborts, kept and resumed sequences: right after every step, and empty at the end."""

import random

import pytest

from forerun.drafters.lm import LMDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Request
from forerun.errors import RequestError
from forerun.types import SamplingParams
from tests.engine.playground import DRAFTERS, SIZE, TOKEN_BYTES, Result, check_caches, engine_of, run, toy


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        max_tokens=rng.randint(1, 20),
        k=rng.choice([None, 0, 1, 3, 9]),
        verify=rng.choice(["block", "token", "coupled"]),
        ignore_eos=rng.random() < 0.7,
        repetition_penalty=rng.choice([1.0, 1.3]),
        stop=rng.choice([(), ("ab", "c b")]),
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(2))
def test_caches_are_right_after_every_step_of_a_random_life(drafter: str, seed: int) -> None:
    """Every answer that wasn't aborted is that of a fresh engine; resumed ones start anywhere in their old text."""
    rng = random.Random(seed)
    session = toy(cache_tokens=260)
    engine = engine_of(DRAFTERS[drafter](), session, max_running=4, prefill_rows=rng.choice([2, 5, 512]))
    requests: dict[int, Request] = {}
    results: dict[int, Result] = {}
    kept: dict[int, tuple[int, ...]] = {}  # text of kept sequences
    finished: list[tuple[Request, Result]] = []
    for step in range(180):
        if rng.random() < 0.35 and step < 150:
            resume = rng.choice([None, *kept])
            prompt = tuple(rng.randrange(SIZE) for _ in range(rng.randint(1, 12)))
            if resume is not None:
                text = kept.pop(resume)
                prompt = text[: rng.randint(0, len(text))] + prompt[:6]
            request = Request(prompt, random_params(rng), seed=step, keep=rng.random() < 0.5, resume=resume)
            try:
                request_id = engine.add(request)
            except RequestError as error:
                assert resume is not None
                assert "kept sequence" in str(error)  # noqa: PT017  # it was given up for want of room
                continue
            assert resume in (None, request_id)
            requests[request_id], results[request_id] = request, Result()
        if rng.random() < 0.08 and requests:
            request_id = rng.choice(list(requests))
            event = engine.abort(request_id)
            assert event is not None
            assert event.finish_reason == "aborted"
            if requests.pop(request_id).keep:
                kept.pop(request_id, None)
            results.pop(request_id)
        if rng.random() < 0.03 and kept:
            request_id = rng.choice(list(kept))
            kept.pop(request_id)
            if request_id in engine._parked:
                engine.release(request_id)
        for event in engine.step():
            results[event.request_id].take(event)
            if event.finish_reason is not None:
                request, result = requests.pop(event.request_id), results.pop(event.request_id)
                finished.append((request, result))
                if request.keep:
                    kept[event.request_id] = (*request.prompt_ids, *result.token_ids)
        check_caches(engine)
        assert session.room() >= 0
    while engine.has_work:
        engine.step()
        check_caches(engine)
    for request_id in list(engine._parked):
        engine.release(request_id)
    assert not session.caches
    for left in engine.drafters:
        assert not isinstance(left, LMDrafter) or not left._handles
    assert len(finished) > 15
    for request, result in finished:
        fresh = engine_of(DRAFTERS[drafter]())
        alone = run(fresh, [Request(request.prompt_ids, request.params, seed=request.seed)])[0]
        assert result.outcome == alone.outcome


def test_a_resumed_sequence_feeds_only_what_is_new() -> None:
    session = toy()
    engine = engine_of(DRAFTERS["lm"](), session)
    prompt = (1, 2, 3, 0, 1, 5, 2, 2)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (first,) = run(engine, [Request(prompt, params, keep=True)])
    text = (*prompt, *first.token_ids)
    rows = []
    honest = session.extend
    session.extend = lambda feeds, **more: rows.append(sum(len(f.tokens) for f in feeds)) or honest(feeds, **more)
    assert engine.add(Request((*text, 4, 4), params, resume=0)) == 0
    engine.step()
    assert rows == [3]  # the last token of the answer, which was never fed, and the two new ones
    while engine.has_work:
        engine.step()
    assert not session.caches


def test_an_unknown_sequence_and_one_that_is_being_resumed_cannot_be_resumed() -> None:
    engine = engine_of(session=toy())
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError, match="no kept sequence 5"):
        engine.add(Request((1,), params, resume=5))
    run(engine, [Request((1,), params, keep=True)])
    engine.add(Request((1, 2), params, resume=0, keep=True))
    with pytest.raises(RequestError, match="no kept sequence 0"):
        engine.add(Request((1, 2), params, resume=0))


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_request_that_is_aborted_before_it_runs_keeps_what_it_had_or_frees_it(keep: bool) -> None:
    session = toy()
    engine = engine_of(DRAFTERS["lm"](), session)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (first,) = run(engine, [Request((1, 2), params, keep=True)])
    engine.add(Request((1, 2, 3), params, resume=0, keep=keep))
    assert engine.abort(0).finish_reason == "aborted"
    check_caches(engine)
    assert list(session.caches.values()) == ([[1, 2, *first.token_ids[:-1]]] if keep else [])
    assert engine.abort(0) is None


def test_a_waiting_resumed_request_counts_against_the_cache() -> None:
    """Its old rows stay where they are while it waits behind others; together they never outgrow the cache."""
    session = toy(cache_tokens=60)
    engine = engine_of(session=session, k=0, max_running=8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (first,) = run(engine, [Request((1,) * 20, params, keep=True)])
    big = Request((2,) * 25, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.add(big)
    engine.add(Request((*(1,) * 20, *first.token_ids, 3), SamplingParams(max_tokens=5), resume=0))
    while engine.has_work:
        engine.step()
        check_caches(engine)
        assert session.room() >= 0
    assert not session.caches


def test_a_resumed_request_goes_on_with_its_rows_where_they_fill_most_of_the_cache() -> None:
    session = toy(cache_tokens=40)
    engine = engine_of(session=session, k=0)
    (first,) = run(engine, [Request((1,) * 20, SamplingParams(max_tokens=8, ignore_eos=True), keep=True)])
    engine.add(Request((*(1,) * 20, *first.token_ids, 3), SamplingParams(max_tokens=5, ignore_eos=True), resume=0))
    before = len(session.caches)
    engine.step()
    assert len(session.caches) == before  # the same handle
    assert session.room() == 40 - 29
    while engine.has_work:
        engine.step()


def test_a_drafter_forgets_a_kept_sequence_that_goes_on_without_drafts() -> None:
    """It isn't told of that text; when drafts are wanted again it must not remember the old one."""
    for drafter in ("ngram", "lm"):
        engine = engine_of(DRAFTERS[drafter]())
        params = SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True)
        without = SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, k=0)
        (first,) = run(engine, [Request((1, 2, 3, 1, 2), params, keep=True)])
        text = (1, 2, 3, *first.token_ids[:2])
        (second,) = run(engine, [Request(text, without, keep=True, resume=0, seed=1)])
        for left in engine.drafters:
            assert not getattr(left, "_texts", None)
            assert not getattr(left, "_handles", None)
        last = Request((*text, *second.token_ids), params, resume=0, seed=2)
        (resumed,) = run(engine, [last])
        (fresh,) = run(engine_of(DRAFTERS[drafter]()), [Request(last.prompt_ids, params, seed=2)])
        assert resumed.outcome == fresh.outcome


def test_kept_sequences_give_way_to_waiting_requests_oldest_first() -> None:
    session = toy(cache_tokens=40)
    engine = engine_of(session=session, k=0)
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    run(engine, [Request((i,), short, keep=True) for i in range(3)])
    assert sorted(engine._parked) == [0, 1, 2]
    engine.add(Request((4,), SamplingParams(max_tokens=18, ignore_eos=True)))
    engine.step()
    assert sorted(engine._parked) == [1, 2]  # 40 - 3 x 8 leaves 16, and 19 are asked for
    while engine.has_work:
        engine.step()
    engine.release(1)
    engine.release(2)
    assert not session.caches


def test_after_any_rounds_a_draft_models_cache_scores_as_a_fresh_prefill() -> None:
    guess = toy(order=3, seed=8)
    drafter = LMDrafter(guess, vocab_size=SIZE)
    engine = Engine(toy(), drafter, token_bytes=TOKEN_BYTES, k=4)
    engine.add(Request((1, 2, 3), SamplingParams(temperature=1.0, max_tokens=60), seed=2))
    while engine.has_work:
        engine.step()
        for seq, handle in drafter._handles.items():
            text = engine._scheduler.running[0].tokens
            assert guess.caches[handle] == drafter._fed[seq]
            agreed = [a == b for a, b in zip(guess.caches[handle], text, strict=False)]
            assert all(agreed[: len(text) - 1]) or not all(agreed)
    assert not guess.caches
