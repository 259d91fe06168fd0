"""`LLM`, `Conversation` and `AsyncLLM` on the toy model: text in, text out, many callers at once."""

import asyncio
from collections.abc import Iterator

import pytest

import forerun.engine.llm
from forerun import LLM, AsyncLLM, EngineError, SamplingParams, UserError
from forerun.errors import OptionError, RequestError
from tests.cli import toy

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(forerun.engine.llm, "load_model", None)  # to be put back
    monkeypatch.setattr(forerun.engine.llm, "open_session", None)
    toy.install()
    with LLM("toy", drafter="ngram", k=4) as llm:
        yield llm


def no_handles(llm: LLM) -> bool:
    return not llm.session._tokens  # type: ignore[attr-defined]


def test_a_list_is_answered_in_its_order_each_with_its_own_settings(llm: LLM) -> None:
    prompts = ["one", "two two", "three"]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=n) for n, t in ((3, 0), (9, 1), (5, 0))]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.completion_tokens for out in together] == [3, 9, 5]
    assert no_handles(llm)


def test_the_pieces_of_a_stream_make_up_its_output(llm: LLM) -> None:
    pieces = list(llm.stream("tell me", PARAMS))
    output = pieces[-1].output
    assert output is not None
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.tokens] == list(output.traces)
    assert ["".join(text for text, _source in piece.spans) for piece in pieces] == [piece.text for piece in pieces]


def test_two_streams_can_be_read_in_turn(llm: LLM) -> None:
    expected = [llm.generate(prompt, PARAMS).text for prompt in ("first", "second")]
    streams = [llm.stream("first", PARAMS), llm.stream("second", PARAMS)]
    texts = ["", ""]
    open_streams = {0, 1}
    while open_streams:
        for i in list(open_streams):
            piece = next(streams[i])
            texts[i] += piece.text
            if piece.output is not None:
                open_streams.discard(i)
    assert texts == expected


def test_closing_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("tell me", PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert no_handles(llm)
    assert llm.generate("tell me", PARAMS).finish_reason == "length"


def test_if_one_prompt_of_a_list_is_refused_nothing_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context"):
        llm.generate(["fine", "x" * 5000], PARAMS)
    with pytest.raises(RequestError, match="sampling params"):
        llm.generate(["a", "b"], [PARAMS])
    assert not llm.engine.has_work
    assert no_handles(llm)


def test_unknown_settings_are_refused_by_name(llm: LLM) -> None:
    for settings in ({"drafter": "magic"}, {"k": 99}, {"verify": "hope"}, {"dtype": "int3"}, {"spede": 3}):
        with pytest.raises(OptionError, match=next(iter(settings))):
            LLM("toy", **settings)  # type: ignore[arg-type]


def test_a_new_turn_reads_only_what_is_new(llm: LLM) -> None:
    chat = llm.conversation(system="be brief", params=PARAMS)
    chat.say("hello there, how are you?")
    before = llm.session.num_rows  # type: ignore[attr-defined]
    out = chat.say("fine")
    read = llm.session.num_rows - before  # type: ignore[attr-defined]
    assert read < out.prompt_tokens
    chat.close()
    assert no_handles(llm)


def test_a_conversation_writes_what_its_whole_prompt_would_write(llm: LLM) -> None:
    chat = llm.conversation(params=PARAMS)
    for text in ("hello", "what?", "more"):
        history = [*chat.messages, {"role": "user", "content": text}]
        assert chat.say(text).token_ids == llm.generate(history, PARAMS).token_ids


def test_a_full_context_forgets_the_oldest_turns_and_never_the_system_message(llm: LLM) -> None:
    chat = llm.conversation(system="remember me", params=SamplingParams(max_tokens=50, ignore_eos=True))
    for i in range(8):
        chat.say(f"{i} " + "word " * 80)
    assert chat.num_forgotten > 0
    assert chat.messages[0] == {"role": "system", "content": "remember me"}
    with pytest.raises(RequestError, match="shorten"):
        chat.say("x" * 4000)


def test_many_tasks_share_one_engine(llm: LLM) -> None:
    expected = [llm.generate(f"prompt {i}", PARAMS).text for i in range(5)]

    async def main() -> list[str]:
        async with AsyncLLM(llm) as many:
            outputs = await asyncio.gather(*(many.generate(f"prompt {i}", PARAMS) for i in range(5)))
            return [out.text for out in outputs]

    assert asyncio.run(main()) == expected
    assert no_handles(llm)


def test_a_cancelled_task_ends_its_request_and_no_other(llm: LLM) -> None:
    llm.session.delay_s = 0.005  # type: ignore[attr-defined]

    async def main() -> None:
        async with AsyncLLM(llm) as many:
            other = asyncio.create_task(many.generate("other", PARAMS))
            task = asyncio.create_task(many.generate("long", SamplingParams(max_tokens=1000, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).completion_tokens == 20
            with pytest.raises(UserError):
                await many.generate("x" * 5000, PARAMS)

    asyncio.run(main())
    assert no_handles(llm)


def test_after_closing_nothing_more_is_served(llm: LLM) -> None:
    async def main() -> None:
        many = AsyncLLM(llm)
        await many.close()
        with pytest.raises(EngineError, match="closed"):
            await many.generate("late", PARAMS)

    asyncio.run(main())


def test_a_failing_engine_ends_all_requests_and_serves_new_ones(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, calls = llm.session.extend, []

    def failing(*args: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no more")
        return extend(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.session, "extend", failing)
    with pytest.raises(MemoryError):
        llm.generate(["a", "b"], PARAMS)
    assert no_handles(llm)
    assert llm.generate("again", PARAMS).finish_reason == "length"


def broken(_tokens: object, _logits: object) -> object:
    raise ValueError("no idea")


def test_a_failed_answer_raises_alone_and_is_marked_among_others(llm: LLM) -> None:
    failing = SamplingParams(max_tokens=5, logits_processors=(broken,))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no idea"):
        llm.generate("a", failing)
    outputs = llm.generate(["a", "b"], [failing, PARAMS])
    assert [out.finish_reason for out in outputs] == ["error", "length"]
    chat = llm.conversation(params=PARAMS)
    with pytest.raises(EngineError, match="no idea"):
        chat.say("a", failing)
    assert chat.messages == []
    assert chat.say("b").text == llm.generate("b", PARAMS).text


def test_a_conversation_takes_one_turn_at_a_time(llm: LLM) -> None:
    chat = llm.conversation(params=PARAMS)
    stream = chat.stream("a")
    next(stream)
    with pytest.raises(RequestError, match="still being written"):
        chat.say("b")
    stream.close()  # type: ignore[attr-defined]
    assert chat.say("b").completion_tokens == 20


def test_what_is_no_prompt_and_what_are_no_params_is_refused(llm: LLM) -> None:
    for prompt in (None, [], 3):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(prompt)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]


def test_there_are_never_more_threads_than_cores(llm: LLM) -> None:
    from forerun.config import available_cores

    assert LLM("toy", threads=500).config.threads == available_cores()
