"""`forerun bench` as the command line calls it. Nothing heavy is imported before the options are read."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.config import BACKENDS, DTYPES, Config
from forerun.errors import OptionError
from forerun.types import VERIFY_RULES

_CONFIG = Config(target="")
PEER_USAGE = "transformers|llama.cpp[:FILE.gguf|:Q4_0|:Q8_0]"
_MODEL, _WORK, _EXTRA, _MODES, _SHOWN = "Model", "Workload", "What else to measure", "Other measurements", "Output"


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def bench(
    *,
    target: Annotated[
        str,
        _option(_MODEL, "Alias, Hugging Face folder, .gguf file, or hub id.", metavar="MODEL", envvar="FORERUN_TARGET"),
    ] = "smollm2-135m",
    drafter: Annotated[str, _option(_MODEL, "Who guesses, named as for generate.", metavar="NAME")] = _CONFIG.drafter,
    k: Annotated[str, _option(_MODEL, "Drafts a round.", metavar="auto|N")] = str(_CONFIG.k),
    verify: Annotated[
        str, _option(_MODEL, "The rule of verification.", metavar="|".join(VERIFY_RULES))
    ] = _CONFIG.verify,
    dtype: Annotated[str, _option(_MODEL, "What weights are kept in.", metavar="|".join(DTYPES))] = _CONFIG.dtype,
    device: Annotated[str, _option(_MODEL, "Where to run.", metavar="auto|cpu|cuda")] = _CONFIG.device,
    backend: Annotated[
        str, _option(_MODEL, "What computes: our kernels for CPUs, or torch.", metavar="|".join(BACKENDS))
    ] = _CONFIG.backend,
    threads: Annotated[
        int | None, _option(_MODEL, "Threads on a CPU (default: the cores that are there).", metavar="N")
    ] = None,
    cache_dir: Annotated[
        Path | None, _option(_MODEL, "Where models are kept.", metavar="DIR", envvar="FORERUN_CACHE")
    ] = None,
    offline: Annotated[bool, _option(_MODEL, "Fetch nothing.", "--offline")] = False,
    max_tokens: Annotated[int, _option(_WORK, "The most tokens of an answer.", metavar="N")] = 128,
    temperature: Annotated[float, _option(_WORK, "0 is greedy.", metavar="X")] = 0.0,
    top_p: Annotated[float, _option(_WORK, "Keep the most likely tokens of so much mass.", metavar="X")] = 1.0,
    seed: Annotated[int, _option(_WORK, "Prompt i is answered with seed N + i.", metavar="N")] = 0,
    prompts: Annotated[
        Path | None, _option(_WORK, "Prompts of your own: .jsonl, or text with one a line.", metavar="FILE")
    ] = None,
    kinds: Annotated[str, _option(_WORK, "Only prompts of these kinds, such as chat,code.", metavar="A,B")] = "",
    limit: Annotated[int | None, _option(_WORK, "Only so many prompts, of all kinds in turn.", metavar="N")] = None,
    repeats: Annotated[int, _option(_WORK, "How often each prompt is run; medians count.", metavar="N")] = 3,
    batch: Annotated[int | None, _option(_EXTRA, "Also run so many sequences at once.", metavar="N")] = None,
    curve: Annotated[bool, _option(_EXTRA, "Time passes over 1 to 32 rows.", "--curve/--no-curve")] = True,
    context: Annotated[int, _option(_EXTRA, "Tokens before those rows.", metavar="N")] = 256,
    peer: Annotated[
        list[str] | None,
        _option(_EXTRA, "Also run this library on the same weights; repeatable.", metavar=PEER_USAGE),
    ] = None,
    matrix: Annotated[
        bool, _option(_MODES, "Instead: all drafters on all kinds of prompt, greedy and at 0.8.", "--matrix")
    ] = False,
    paired: Annotated[
        int | None,
        _option(_MODES, "Instead: N alternations on texts that nobody can guess; is it ever slower?", metavar="N"),
    ] = None,
    rules: Annotated[bool, _option(_MODES, "Instead: tokens a round by each rule of verification.", "--rules")] = False,
    report: Annotated[
        Path | None, _option(_SHOWN, "Also write plots and tables to this HTML file, PNGs beside it.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, _option(_SHOWN, "One JSON document as the last line of stdout; all else goes to stderr.", "--json")
    ] = False,
    markdown: Annotated[bool, _option(_SHOWN, "Tables in Markdown.", "--markdown")] = False,
    out: Annotated[Path | None, _option(_SHOWN, "Also write the JSON document to this file.", metavar="FILE")] = None,
) -> None:
    """Measure what speculation is worth here: plain against speculative, in turn, in one process."""
    if k != "auto" and not k.isdecimal():
        raise OptionError(f"k is {k!r}; expected auto or a whole number from 0 to 64")
    config = Config(
        target=target,
        drafter=drafter,
        k=int(k) if k.isdecimal() else "auto",
        verify=verify,  # type: ignore[arg-type]  # checked there
        dtype=dtype,  # type: ignore[arg-type]
        device=device,
        backend=backend,
        threads=threads,
        cache_dir=cache_dir and cache_dir.expanduser(),
        offline=offline,
    )

    modes = [
        name for name, given in (("--matrix", matrix), ("--paired", paired is not None), ("--rules", rules)) if given
    ]
    if len(modes) > 1:
        raise OptionError(f"got {' and '.join(modes)}; expected one of them")
    if paired is not None and paired < 2:
        raise OptionError(f"paired is {paired}; expected a whole number, 2 or more")

    from forerun.bench.matrix import matrix_tables, run_matrix
    from forerun.bench.paired import paired_tables, run_paired
    from forerun.bench.report import as_markdown, as_text, tables
    from forerun.bench.rules import rules_tables, run_rules
    from forerun.bench.run import Options, check_writable, run_bench, write_document

    options = Options(
        config,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prompts=prompts,
        kinds=tuple(kind.strip() for kind in kinds.split(",") if kind.strip()),
        limit=limit,
        repeats=repeats,
        batch=batch,
        curve=curve,
        context=context,
        peers=tuple(dict.fromkeys(peer or ())),
    )
    if out is not None:
        check_writable(out)
    if report is not None:
        from forerun.bench.plots import check_plots

        check_writable(report)
        check_plots()
    progress = _Progress()
    if matrix:
        document, make = run_matrix(options, progress), matrix_tables
    elif paired is not None:
        document, make = run_paired(options, paired, progress), paired_tables
    elif rules:
        document, make = run_rules(options, progress), rules_tables
    else:
        document, make = run_bench(options, progress), tables
    if out is not None:
        write_document(document, out)
    if report is not None:
        from forerun.bench.plots import write_report

        write_report(document, make(document), report)
    typer.echo((as_markdown if markdown else as_text)(document, make(document)), err=as_json)
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))


class _Progress:
    """Says on stderr what is going on: on one line that changes, or nothing but the stages where nobody watches."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def stage(self, text: str) -> None:
        self._clear()
        typer.echo(f"{text} …", err=True)

    def step(self, text: str) -> None:
        if self._is_terminal:
            self._clear()
            typer.echo(text[:79], err=True, nl=False)

    def done(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._is_terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)
