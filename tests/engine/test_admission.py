"""Who is in a round: places, room in the cache, and long prompts that stall nobody."""

import pytest

from forerun.engine.sequence import Request
from forerun.errors import RequestError
from forerun.types import SamplingParams
from tests.engine.playground import DRAFTERS, SIZE, Result, engine_of, run, toy

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_long_prompt_is_read_in_pieces_while_a_writer_writes_in_every_step() -> None:
    session = toy()
    engine = engine_of(DRAFTERS["lm"](), session, prefill_rows=4)
    writer = engine.add(Request((1,), SamplingParams(max_tokens=200, ignore_eos=True)))
    engine.step()
    reader = engine.add(Request((2,) * 50, LONG))
    rows = []
    honest = session.extend
    session.extend = lambda feeds, **more: rows.append([len(f.tokens) for f in feeds]) or honest(feeds, **more)
    for step in range(1, 14):
        events = engine.step()
        assert writer in {event.request_id for event in events if event.tokens}
        assert (reader in {event.request_id for event in events}) == (step == 13)  # 12 pieces of 4, one of 2
        assert rows[-1][0] <= 1 + 3
        assert rows[-1][1] == (4 if step < 13 else 2)


def test_prompts_share_the_rows_of_a_step_first_come_first_served() -> None:
    session = toy()
    engine = engine_of(session=session, prefill_rows=10)
    ids = [engine.add(Request((1,) * size, LONG)) for size in (4, 4, 4, 9)]
    lengths = []
    for _ in range(3):
        engine.step()
        lengths.append([session.length(s.handle) for s in engine._scheduler.running])
    assert [s.id for s in engine._scheduler.running] == ids
    assert lengths[0] == [4, 4, 2, 0]
    assert lengths[1] == [5, 5, 4, 8]
    assert lengths[2] == [6, 6, 5, 9]


@pytest.mark.parametrize("places", [1, 2, 5])
def test_no_more_requests_run_than_there_are_places(places: int) -> None:
    engine = engine_of(DRAFTERS["lm"](), max_running=places)
    requests = [Request((i % SIZE,), SamplingParams(max_tokens=3 + i, ignore_eos=True)) for i in range(8)]
    for request in requests:
        engine.add(request)
    most, started = 0, []
    while engine.has_work:
        for event in engine.step():
            if event.request_id not in started:
                started.append(event.request_id)
        most = max(most, len(engine._scheduler.running))
    assert most <= places
    assert started == sorted(started)


def test_the_cache_is_never_outgrown_and_everyone_is_served_in_turn() -> None:
    """The session of these tests checks its room at every pass, drafts included."""
    for drafter in ("none", "lm", "scripted"):
        session = toy(cache_tokens=50)
        engine = engine_of(DRAFTERS[drafter](), session, k=5)
        requests = [Request((i % SIZE,) * (1 + i), SamplingParams(max_tokens=12, ignore_eos=True)) for i in range(12)]
        results = run(engine, requests)
        assert all(len(result.token_ids) == 12 for result in results)


def test_what_can_never_be_served_is_refused_when_it_is_added() -> None:
    engine = engine_of(session=toy(max_len=20, cache_tokens=15), k=0)
    for request, text in (
        (Request(()), "has no tokens"),
        (Request((1,) * 20), "the context holds 20"),
        (Request((1, SIZE)), f"token id {SIZE} "),
        (Request((1, -1)), "token id -1 "),
        (Request((1,), SamplingParams(logit_bias={SIZE: 1.0})), f"token id {SIZE} "),
        (Request((1,), SamplingParams(stop_token_ids=(99,))), "token id 99"),
        (Request((1,)), "holds 15: lower max_tokens"),
        (Request((1,) * 10, SamplingParams(max_tokens=8)), "holds 15: lower max_tokens"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.add(request)
    assert not engine.has_work
    assert engine.step() == []
    assert run(engine, [Request((1,) * 10, SamplingParams(max_tokens=5))])[0].finish_reason is not None


def test_a_request_that_leaves_makes_room_at_once() -> None:
    engine = engine_of(max_running=1)
    first, second = engine.add(Request((1,), LONG)), engine.add(Request((2,), LONG))
    assert {event.request_id for event in engine.step()} == {first}
    engine.abort(first)
    assert {event.request_id for event in engine.step()} == {second}
    assert engine.abort(first) is None
    assert engine.abort(second).finish_reason == "aborted"
    assert not engine.has_work


def test_a_waiting_request_can_be_aborted() -> None:
    session = toy()
    engine = engine_of(DRAFTERS["lm"](), session, max_running=1)
    first, second = engine.add(Request((1,), LONG)), engine.add(Request((2,), LONG))
    engine.step()
    event = engine.abort(second)
    assert (event.request_id, event.tokens, event.finish_reason) == (second, (), "aborted")
    result = Result()
    while engine.has_work:
        for event in engine.step():
            assert event.request_id == first
            result.take(event)
    assert not session.caches
