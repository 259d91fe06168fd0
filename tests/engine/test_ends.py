"""Where answers end, in `Ends` alone and in the engine: the same place as without drafts, whatever a block holds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.ends import Cut, Ends
from forerun.engine.sequence import Request
from forerun.types import SamplingParams
from tests.engine.playground import EOS, SIZE, TOKEN_BYTES, Result, Scripted, engine_of, run, toy

E1, E2 = 3, 4  # the two halves of "é"


def ends_of(
    *, stops: tuple[str, ...] = (), min_tokens: int = 0, max_tokens: int = 100, end_ids: tuple[int, ...] = (EOS,)
) -> Ends:
    return Ends(
        end_ids=end_ids, stops=stops, token_bytes=TOKEN_BYTES, min_tokens=min_tokens, max_tokens=max_tokens
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "blocks", "expected"),
    [
        (ends_of(), [[0, 1, 2]], Cut(3)),
        (ends_of(), [[0, EOS, 2]], Cut(2, "stop", 1)),
        (ends_of(), [[0, 1], [EOS]], Cut(1, "stop", 2)),
        (ends_of(stops=("ba",)), [[0, 1, 0, 2]], Cut(3, "stop", 1)),
        (ends_of(stops=("ba",)), [[0, 1], [0, 2]], Cut(1, "stop", 1)),
        (ends_of(stops=("aba",)), [[2], [2, 1]], Cut(1, "stop", 0)),
        (ends_of(stops=("b c a",)), [[1], [5], [5]], Cut(1)),
        (ends_of(stops=("b c c",)), [[1], [5], [5, 0]], Cut(1, "stop", 0)),
        (ends_of(stops=("é",)), [[0, E1], [E2, 0]], Cut(1, "stop", 1)),
        (ends_of(stops=("é",)), [[E2, E1, E1, E2]], Cut(4, "stop", 2)),
        (ends_of(stops=("bb", "abb")), [[2, 1]], Cut(2, "stop", 0)),
        (ends_of(stops=("c", " c")), [[5]], Cut(1, "stop", 0)),
        (ends_of(max_tokens=2), [[0, 1, 2]], Cut(2, "length")),
        (ends_of(max_tokens=2), [[0, EOS, 2]], Cut(2, "stop", 1)),
        (ends_of(max_tokens=2, stops=("b",)), [[0, 1, 2]], Cut(2, "stop", 1)),
        (ends_of(max_tokens=3, stops=("b",)), [[0, 1, EOS]], Cut(2, "stop", 1)),
        (ends_of(min_tokens=3, stops=("b",)), [[1, 1, 0, 1]], Cut(4, "stop", 3)),
        (ends_of(min_tokens=2, stops=("b", "xxxx")), [[1, 0, 0]], Cut(3)),
        (ends_of(min_tokens=2, end_ids=(0,)), [[0, 1, 0]], Cut(3, "stop", 2)),
        (ends_of(end_ids=()), [[EOS, EOS]], Cut(2)),
    ],
    ids=str,
)
def test_a_block_is_cut_at_the_first_end(ends: Ends, blocks: list[list[int]], expected: Cut) -> None:
    for block in blocks[:-1]:
        assert ends.advance(block) == Cut(len(block))
    assert ends.advance(blocks[-1]) == expected


tokens = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=14)
stop_strings = st.lists(st.text(alphabet="abcé ", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens, stop_strings, st.integers(0, 5), st.integers(1, 12), st.data())
def test_the_end_does_not_depend_on_how_tokens_fall_into_blocks(
    written: list[int], stops: list[str], min_tokens: int, max_tokens: int, data: st.DataObject
) -> None:
    """Against a search through the whole text after each token."""

    def whole() -> tuple[int, str | None, int | None]:
        for count in range(1, len(written) + 1):
            before = b"".join(TOKEN_BYTES[token] for token in written[: count - 1])
            after = before + TOKEN_BYTES[written[count - 1]]
            if count >= min_tokens and written[count - 1] == EOS:
                return count, "stop", len(before)
            new = [
                place
                for stop in (stop.encode() for stop in stops)
                for place in range(len(after))
                if after.startswith(stop, place) and place + len(stop) > len(before)
            ]
            if count >= min_tokens and new:
                return count, "stop", min(new)
            if count == max_tokens:
                return count, "length", None
        return len(written), None, None

    ends = ends_of(stops=tuple(stops), min_tokens=min_tokens, max_tokens=max_tokens)
    kept, cut = 0, Cut(0)
    while kept < len(written) and cut.finish_reason is None:
        size = data.draw(st.integers(1, 5))
        cut = ends.advance(written[kept : kept + size])
        kept += cut.num_tokens
    assert (kept, cut.finish_reason, cut.text_end) == whole()


def both(params: SamplingParams, drafts: list[int], *, prompt: tuple[int, ...] = (1,), **limits: int) -> Result:
    """Make a target write `drafts`, plainly and in blocks of each size; return what comes, the same for all."""

    def wants(text: object, logits: object) -> object:
        place = len(text) - len(prompt)  # type: ignore[arg-type]
        logits[drafts[min(place, len(drafts) - 1)]] += 100.0  # type: ignore[index]
        return logits

    settings = {**params.__dict__, "logits_processors": (wants,)}
    found: list[Result] = []
    for k in range(8):
        for miss in (None, *range(k)):  # where a draft goes wrong

            def draft(text: list[int], miss: int | None = miss) -> list[int]:
                done = len(text) - len(prompt)
                block = [drafts[min(done + i, len(drafts) - 1)] for i in range(8)]
                if miss is not None:
                    block[miss] = (block[miss] + 1) % SIZE
                return block

            session = toy(**limits)
            engine = engine_of(Scripted(draft), session, k=k)
            found.append(run(engine, [Request(prompt, SamplingParams(**settings), seed=k)])[0])
            assert not session.caches
    assert len({result.outcome for result in found}) == 1
    assert any(max(result.steps) > 3 for result in found) or len(found[0].token_ids) < 5
    for result in found:
        assert result.stats.emitted == len(result.token_ids) == sum(result.steps)
        assert len(result.traces) == len(result.token_ids)
    return found[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_token_inside_a_block_ends_the_answer_there(temperature: float) -> None:
    result = both(SamplingParams(temperature=temperature), [0, 1, 0, EOS, 1, 1])
    assert result.outcome == ((0, 1, 0, EOS), "stop", 3)
    assert result.text == b"aba"


def test_an_end_token_is_text_like_any_other_where_it_is_ignored() -> None:
    result = both(SamplingParams(ignore_eos=True, max_tokens=6), [0, EOS, 0, EOS, 1, 1, 1])
    assert result.outcome == ((0, EOS, 0, EOS, 1, 1), "length", None)


def test_stop_token_ids_end_an_answer_and_have_no_text() -> None:
    result = both(SamplingParams(stop_token_ids=(5,), ignore_eos=True), [0, EOS, 2, 5, 1])
    assert result.outcome == ((0, EOS, 2, 5), "stop", 3)


def test_a_stop_string_ends_the_answer_wherever_it_lies_in_blocks_and_tokens() -> None:
    assert both(SamplingParams(stop="bab"), [0, 0, 1, 2, 0, 0]).outcome == ((0, 0, 1, 2), "stop", 2)
    assert both(SamplingParams(stop="b c"), [0, 2, 5, 0, 0]).text == b"aa"
    assert both(SamplingParams(stop=["é c", "zz"]), [0, E1, E2, E1, E2, 5, 0]).text == "aé".encode()
    assert both(SamplingParams(stop="c c"), [0, 5, 5, 0]).text == b"a "


def test_an_earlier_stop_beats_the_length_cap_of_the_same_block() -> None:
    assert both(SamplingParams(stop="bb", max_tokens=5), [0, 1, 1, 0, 0, 0]).outcome == ((0, 1, 1), "stop", 1)
    assert both(SamplingParams(max_tokens=4), [0, 1, EOS, 0, 0]).outcome == ((0, 1, EOS), "stop", 2)
    assert both(SamplingParams(max_tokens=3), [0, 1, EOS, 0, 0]).finish_reason == "stop"


def test_max_tokens_is_met_to_the_token() -> None:
    for count in range(1, 9):
        result = both(SamplingParams(max_tokens=count), [0, 1, 2, 5])
        assert (len(result.token_ids), result.finish_reason) == (count, "length")


def test_no_more_is_drafted_than_may_be_written() -> None:
    """Of 6 tokens the first is written with the prompt; 4 drafts and one more token are the other 5."""
    engine = engine_of(Scripted(lambda text: [0] * 20), k=10)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={0: 100.0})
    (result,) = run(engine, [Request((1, 2), params)])
    assert result.steps == [1, 5]
    assert (result.stats.proposed, result.stats.accepted) == (4, 4)


def test_min_tokens_forbids_ends_along_the_whole_draft() -> None:
    """The end token is what the target wants most, from the first token on."""
    for least in range(1, 7):
        params = SamplingParams(min_tokens=least, max_tokens=9, logit_bias={EOS: 200.0})
        for temperature in (0.0, 1.0):
            for k in range(6):
                for drafts in ([EOS] * 6, [0, EOS] * 3, [0, 0, EOS, 0, 0, EOS]):
                    request = Request((1,), SamplingParams(**{**params.__dict__, "temperature": temperature}))
                    (result,) = run(engine_of(Scripted(lambda text, d=drafts: d), k=k), [request])
                    assert len(result.token_ids) == least + 1
                    assert result.token_ids[-1] == EOS
                    assert EOS not in result.token_ids[:-1]
                    assert result.finish_reason == "stop"


def test_a_stop_string_before_min_tokens_is_passed_over() -> None:
    result = both(SamplingParams(stop="b", min_tokens=4), [1, 1, 0, 0, 0, 1, 0])
    assert result.outcome == ((1, 1, 0, 0, 0, 1), "stop", 5)


def test_a_full_context_ends_the_answer() -> None:
    for limit in range(4, 12):
        result = both(SamplingParams(), [0, 1, 2, 5], prompt=(1, 1, 1), max_len=limit)
        assert (len(result.token_ids), result.finish_reason) == (limit - 3, "length")


def test_what_is_cut_off_leaves_no_trace_in_penalties_or_caches() -> None:
    """A kept sequence that ended inside a block goes on as its text says."""
    for k, stop in itertools.product((0, 3, 6), (2, 4)):
        session = toy()
        engine = engine_of(Scripted(lambda text: [0, 1, 0, 1, 0, 1]), session, k=k)
        params = SamplingParams(max_tokens=stop, logits_processors=(_alternates,))
        first = run(engine, [Request((2,), params, keep=True)])[0]
        text = (2, *first.token_ids)
        again = Request((*text, 5), SamplingParams(max_tokens=8, repetition_penalty=1.5), resume=0)
        (resumed,) = run(engine, [again])
        (fresh,) = run(engine_of(), [Request(again.prompt_ids, again.params)])
        assert resumed.outcome == fresh.outcome
        assert not session.caches


def _alternates(tokens: object, logits: object) -> object:
    logits[len(tokens) % 2] += 50.0  # type: ignore[arg-type, index]
    return logits
