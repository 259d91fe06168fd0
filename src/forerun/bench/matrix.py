"""`forerun bench --matrix`: all drafters on all kinds of prompt, greedy and sampled, each against plain in turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.bench.report import Table, number, percent, times
from forerun.bench.run import Bench, Options, Progress, Quiet, loading, select
from forerun.bench.workload import load_workload
from forerun.engine.llm import LLM
from forerun.errors import OptionError

TEMPERATURES = (0.0, 0.8)
_DRAFTERS = ("ngram", "suffix", "recycle", "layerskip:auto", "quant:q4", "auto")


def run_matrix(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every drafter that this target has, and that of `options` if it is another one."""
    progress = progress or Quiet()
    prompts = select(load_workload(options.prompts), options.kinds, options.limit)
    names = [*_DRAFTERS, *({options.config.drafter} - {*_DRAFTERS, "none"})]
    document: dict[str, Any] = {}
    matrix: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        progress.stage(f"drafter {name}")
        try:
            llm = LLM(replace(options.config, drafter=name, k="auto"), progress=loading(progress))
        except OptionError as error:  # this target has no such drafter
            skipped[name] = str(error)
            continue
        with llm:
            for temperature in TEMPERATURES:
                bench = Bench(replace(options, temperature=temperature), prompts, llm, progress)
                document = document or bench.heading()
                matrix.setdefault(name, {})[str(temperature)] = bench.speeds()["speculative"]
    progress.done()
    document["config"] |= {"drafter": "each in turn"}
    return {**document, "matrix": matrix, "skipped_drafters": skipped}


def matrix_tables(document: Mapping[str, Any]) -> list[Table]:
    """Return a table for each temperature: speed-up over plain, and tokens a round in brackets."""
    kinds = document["workload"]["kinds"]
    tables = []
    for temperature in map(str, TEMPERATURES):
        rows = []
        for name, found in document["matrix"].items():
            own = found[temperature]
            cells = [_cell(own["kinds"][kind]) for kind in kinds]
            counts = own["speculation"]
            accepted = percent(counts["acceptance_rate"]) if counts["proposed"] else "-"
            rows.append([name, *cells, _cell(own), accepted])
        sampling = "greedy" if temperature == "0.0" else f"temperature {temperature}"
        title = f"Speed over plain decoding (tokens a round), {sampling}"
        tables.append(Table(title, ["drafter", *kinds, "all", "accepted/reached"], rows))
    if document["skipped_drafters"]:
        remarks = [f"{name} left out: {why}" for name, why in document["skipped_drafters"].items()]
        tables[-1] = tables[-1]._replace(remarks=remarks)
    return tables


def _cell(own: Mapping[str, Any]) -> str:
    return f"{times(own['speedup'])} ({number(own['speculation']['tokens_per_round'], 2)})"
