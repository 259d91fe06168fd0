"""`forerun generate`: one prompt, or a file of them."""

import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.options import (
    OUTPUT,
    PROMPT,
    ModelOptions,
    SamplingOptions,
    ShowOptions,
    TemplateOptions,
    fix_seed,
    option,
    with_options,
)
from forerun.cli.prompts import Template, read_prompt, read_requests
from forerun.cli.terminal import Silence, Writer, legend, note, print_json, progress_bars, use_color
from forerun.config import Config
from forerun.errors import EngineError, OptionError
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.record import Recorder

_PROMPTS_HELP = (
    'Answer a file of prompts, batched: a JSON object a line with "prompt" or "messages" and, if wanted, "id" and '
    "sampling fields such as \"temperature\"; a JSON object a line comes out, in order. '-': stdin."
)


@with_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer; '-' or none: stdin.", show_default=False)
    ] = None,
    *,
    prompts: Annotated[str | None, option(PROMPT, _PROMPTS_HELP, metavar="FILE")] = None,
    raw: Annotated[bool, option(PROMPT, "Go on from the prompt as it is, without a chat template.", "--raw")] = False,
    template: TemplateOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    logprobs: Annotated[
        int | None, option(OUTPUT, "In JSON: the target's log-probabilities, with N alternatives.", metavar="N")
    ] = None,
    as_json: Annotated[bool, option(OUTPUT, "Print one JSON document as the last line of stdout.", "--json")] = False,
    record: Annotated[
        Path | None, option(OUTPUT, "Write meta.json and tokens.csv into DIR, round by round.", metavar="DIR")
    ] = None,
    compare: Annotated[bool, option(OUTPUT, "Answer plainly, then speculatively; compare.", "--compare")] = False,
    show: ShowOptions,
) -> None:
    """Answer a prompt, or a file of prompts."""
    started = perf_counter()
    _check_combination(prompt, prompts, record, logprobs, as_json=as_json, compare=compare)
    if raw and (template.system is not None or template.template_arg):
        raise OptionError(
            "--raw leaves out the chat template, which --system and --template-arg are for; drop one side"
        )
    encoding = Template(raw, template.system, template.template_args())
    params, config = sampling.params(logprobs=logprobs), model.config()
    color = use_color(show.color, sys.stdout)
    if prompts is not None:
        from forerun.cli.batch import answer_all

        requests = read_requests(prompts, params, raw=raw)
        llm, load_s = _load(config, started)
        with closing(llm):
            answer_all(requests, encoding, llm, load_s)
        return
    text = read_prompt(prompt)
    if record:
        from forerun.engine.record import check_folder

        check_folder(record)
    llm, load_s = _load(config, started)
    with closing(llm):
        ids = encoding.encode(llm, text)
        params = fix_seed(params)
        if color and (sys.stderr.isatty() or show.color == "always"):
            note(legend())
        if compare:
            from forerun.cli.compare import compare_runs

            compare_runs(llm, ids, params, color=color, as_json=as_json, load_s=load_s)
            return
        writer = Writer(sys.stdout, color=color)
        if as_json:
            writer = Writer(sys.stderr, color=use_color(show.color, sys.stderr)) if sys.stderr.isatty() else Silence()
        with closing(_open_record(record, llm, text, ids, params)) if record else nullcontext() as recorder:
            _answer(llm, ids, params, writer, recorder, load_s, as_json=as_json, stats=show.stats)


def _check_combination(
    prompt: str | None, prompts: str | None, record: Path | None, logprobs: int | None, *, as_json: bool, compare: bool
) -> None:
    given = {"PROMPT": prompt is not None, "--record": record is not None, "--compare": compare}
    beside = [name for name, is_given in given.items() if is_given]
    if prompts is not None and beside:
        raise OptionError(f"got --prompts and {beside[0]}; expected one of them")
    if compare and record is not None:
        raise OptionError("got --compare and --record; expected one of them")
    if logprobs is not None and not (as_json or prompts or record):
        raise OptionError("got --logprobs, which only --json, --prompts and --record show; add one of them")


def _load(config: Config, started: float) -> "tuple[LLM, float]":
    """Return the model and how long it took since `started`, imports included."""
    with progress_bars() as progress:
        from forerun.engine.llm import LLM

        llm = LLM(config, progress=progress)
    return llm, perf_counter() - started


def _open_record(folder: Path, llm: "LLM", prompt: str, ids: Sequence[int], params: SamplingParams) -> "Recorder":
    from forerun.cli.report import settings_dict
    from forerun.engine.record import Recorder

    return Recorder(folder, {"prompt": prompt, "prompt_ids": list(ids), "config": settings_dict(llm.config, params)})


def _answer(
    llm: "LLM",
    ids: Sequence[int],
    params: SamplingParams,
    writer: Writer,
    recorder: "Recorder | None",
    load_s: float,
    *,
    as_json: bool,
    stats: bool,
) -> None:
    from forerun.cli.report import answer_dict, settings_dict, show_stats, summary, timing_rows, tokens_per_s

    run = replace(params, logprobs=0) if recorder and params.logprobs is None else params
    output = None
    try:
        for piece in llm.pieces(llm.submit(ids, run)):
            if recorder:
                recorder.add(piece)
            writer.write(piece.spans)
            output = piece.output
    except KeyboardInterrupt:
        writer.end_line()
        raise
    writer.end_line()
    assert output is not None
    if output.finish_reason == "error":
        raise EngineError(f"the answer failed: {output.error}")
    if params.logprobs is None:
        output = replace(output, logprobs=None)
    note(summary(output.speculation, llm.config, params, speed=tokens_per_s(output)))
    if stats:
        show_stats(output.speculation, timing_rows(output, load_s))
    if as_json:
        print_json({**answer_dict(output, llm, params, load_s), "config": settings_dict(llm.config, params)})
