"""`forerun generate --compare`: the same prompt plainly and speculatively, on one model, in one run."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forerun.cli.report import answer_dict, settings_dict, summary, tokens_per_s
from forerun.cli.terminal import Writer, note, print_json, progress_bars
from forerun.engine.llm import LLM
from forerun.errors import EngineError
from forerun.types import Output, SamplingParams, TokenLogprob

_WARM_UP_TOKENS = 24
_NUM_ALTERNATIVES = 100  # the most that there are


class Difference(NamedTuple):
    """Where two greedy answers part."""

    token: int  # its index
    plain: str
    speculative: str
    margin_plain: float | None  # how far the plain choice is ahead of the other in plain decoding, in nats
    margin_speculative: float | None  # how far the speculative choice is ahead of the plain one when speculating


def compare_runs(
    llm: LLM, ids: Sequence[int], params: SamplingParams, *, color: bool, as_json: bool, load_s: float
) -> None:
    """Answer twice, each time streaming the text, then say how the two compare."""
    plain_params = replace(params, k=0)
    num_warm_up = min(_WARM_UP_TOKENS, params.max_tokens or _WARM_UP_TOKENS)
    with progress_bars() as progress:
        progress("warming up", 0, None)
        for warm_up in (plain_params, params):
            _run(llm, ids, replace(warm_up, max_tokens=num_warm_up), None)
    shown = sys.stderr if as_json else sys.stdout
    writer = Writer(shown, color=color and not as_json)
    print("plain", "-----", sep="\n", file=shown)
    plain = _run(llm, ids, plain_params, writer)
    print(f"\nspeculative: {llm.config.drafter}", "-----------", sep="\n", file=shown)
    speculative = _run(llm, ids, params, writer)
    must_agree = params.temperature == 0 or (params.verify or llm.config.verify) == "coupled"
    difference = _first_difference(llm, ids, params, plain, speculative) if must_agree else None
    speeds = tokens_per_s(plain), tokens_per_s(speculative)
    speed_up = speeds[1] / speeds[0] if speeds[0] and speeds[1] else None
    note(summary(speculative.speculation, llm.config, params, speed=speeds[1]))
    if as_json:
        document: dict[str, Any] = {
            "plain": answer_dict(plain, llm, plain_params, load_s),
            "speculative": answer_dict(speculative, llm, params, load_s),
            "speed_up": speed_up,
            "identical": plain.token_ids == speculative.token_ids,
            "first_difference": difference._asdict() if difference else None,
            "config": settings_dict(llm.config, params),
        }
        document["plain"]["speculation"]["drafter"] = "none"
        print_json(document)
        return
    _print_tables(plain, speculative, speed_up)
    print(_verdict(plain, difference, must_agree=must_agree))


def _run(llm: LLM, ids: Sequence[int], params: SamplingParams, writer: Writer | None) -> Output:
    output = None
    for piece in llm.pieces(llm.submit(ids, params)):
        if writer:
            writer.write(piece.spans)
        output = piece.output
    if writer:
        writer.end_line()
    assert output is not None
    if output.finish_reason == "error":
        raise EngineError(f"the answer failed: {output.error}")
    return output


def _first_difference(
    llm: LLM, ids: Sequence[int], params: SamplingParams, plain: Output, speculative: Output
) -> Difference | None:
    """Find where the answers part; both are written again up to there, with log-probabilities, for the margins."""
    a, b = plain.token_ids, speculative.token_ids
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if index == len(a) == len(b):
        return None
    if index == min(len(a), len(b)):
        return Difference(index, _token_text(llm, a, index), _token_text(llm, b, index), None, None)
    again = replace(params, logprobs=_NUM_ALTERNATIVES)  # the rest as before: the same passes, the same rounding
    return Difference(
        index,
        _token_text(llm, a, index),
        _token_text(llm, b, index),
        _margin(_logprobs_at(llm, ids, replace(again, k=0), index), a[index], b[index]),
        _margin(_logprobs_at(llm, ids, again, index), b[index], a[index]),
    )


def _token_text(llm: LLM, tokens: Sequence[int], index: int) -> str:
    return llm.tokenizer.decode(tokens[index : index + 1])


def _logprobs_at(llm: LLM, ids: Sequence[int], params: SamplingParams, index: int) -> dict[int, float]:
    """Return the log-probabilities of the likeliest tokens at a place of the answer."""
    found: list[TokenLogprob] = []
    job = llm.submit(ids, params)
    for piece in llm.pieces(job):
        found += piece.logprobs or ()
        if len(found) > index:
            break
    llm.abort(job)
    return dict(found[index].top) if len(found) > index else {}


def _margin(logprobs: Mapping[int, float], chosen: int, other: int) -> float | None:
    return logprobs[chosen] - logprobs[other] if chosen in logprobs and other in logprobs else None


def _print_tables(plain: Output, speculative: Output, speed_up: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "tokens", "seconds", "tokens/s", "speed-up", "tokens a round", "acceptance"):
        table.add_column(name, justify="right" if name else "left")
    for name, output in (("plain", plain), ("speculative", speculative)):
        speed, stats = tokens_per_s(output), output.speculation
        gain = speed_up if output is speculative else 1.0
        table.add_row(
            name,
            f"{output.completion_tokens}",
            f"{output.decode_s:.2f}",
            f"{speed:.1f}" if speed else "-",
            f"{gain:.2f}" if gain else "-",
            f"{stats.tokens_per_round:.2f}",
            f"{stats.acceptance_rate:.0%}" if stats.reached else "-",
        )
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print()
    console.print(table)
    stats = speculative.speculation
    if stats.reached:
        positions = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("position in draft", "reached", "accepted", ""):
            positions.add_column(name, justify="right" if name else "left")
        counts = zip(stats.reached_by_position, stats.accepted_by_position, stats.acceptance_by_position, strict=True)
        for position, (reached, accepted, rate) in enumerate(counts, start=1):
            positions.add_row(f"{position}", f"{reached}", f"{accepted}", f"{'█' * round(20 * rate)} {rate:.0%}")
        console.print()
        console.print(positions)
    console.print()


def _verdict(plain: Output, difference: Difference | None, *, must_agree: bool) -> str:
    if not must_agree:
        return "The texts are drawn by chance: the law is the same, the words may differ (--temperature 0: one text)."
    if difference is None:
        return f"The two answers are identical, all {plain.completion_tokens} tokens."
    return (
        f"The answers part at token {difference.token}: "
        f"plainly {difference.plain!r}, {_ahead(difference.margin_plain)}; "
        f"speculatively {difference.speculative!r}, {_ahead(difference.margin_speculative)}. "
        "Passes of one row and of several may round differently (less so in fp32), which flips a near-tie; "
        "a wide margin is a fault."
    )


def _ahead(margin: float | None) -> str:
    return "the margin is not known" if margin is None else f"ahead of the other by {margin:.2g} nats"
