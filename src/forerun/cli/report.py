"""An answer as numbers: the JSON document, the line under the text, the table of statistics."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

from forerun.config import Config
from forerun.engine.llm import LLM
from forerun.types import Output, SamplingParams, SpeculationStats, TokenLogprob


def tokens_per_s(output: Output) -> float | None:
    """From the first emitted token on; None where fewer than two came."""
    if output.completion_tokens < 2 or output.decode_s <= 0:
        return None
    return (output.completion_tokens - 1) / output.decode_s


def answer_dict(output: Output, llm: LLM, params: SamplingParams, load_s: float) -> dict[str, Any]:
    """Return what `generate --json` prints, without the settings."""
    document: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": {"prompt_tokens": output.prompt_tokens, "completion_tokens": output.completion_tokens},
        "timing": {
            "load_s": load_s,
            "prefill_s": output.prefill_s,
            "decode_s": output.decode_s,
            "tokens_per_s": tokens_per_s(output),
        },
        "speculation": {
            "drafter": llm.config.drafter,
            "verify": params.verify or llm.config.verify,
            **output.speculation.as_dict(),
        },
    }
    if output.logprobs is not None:
        document["logprobs"] = [_logprob_dict(entry, llm) for entry in output.logprobs]
    if output.error is not None:
        document["error"] = output.error
    return document


def settings_dict(config: Config, params: SamplingParams) -> dict[str, Any]:
    """Return all settings of an answer, as JSON has them."""
    sampling = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    del sampling["logits_processors"]
    sampling["logit_bias"] = {
        str(token): bias if math.isfinite(bias) else str(bias) for token, bias in params.logit_bias.items()
    }
    return {**config.as_dict(), "sampling": sampling}


def summary(
    stats: SpeculationStats, config: Config, params: SamplingParams | None, *, speed: float | None, num_answers: int = 1
) -> str:
    """Return the line under a text: what came out, and the settings as they were resolved."""
    parts = [f"{stats.emitted} tokens" if num_answers == 1 else f"{num_answers} answers, {stats.emitted} tokens"]
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"{stats.tokens_per_round:.2f} tokens a round")
    if stats.reached:
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
    seed = f", seed {params.seed}" if params is not None and params.temperature > 0 else ""
    return f"{', '.join(parts)} | {settings_line(config)}{seed}"


def settings_line(config: Config) -> str:
    """Return the settings as they were resolved."""
    names = ("target", "drafter", "k", "verify", "dtype", "device", "backend", "threads")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def show_stats(stats: SpeculationStats, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table on stderr: `rows`, then what speculation did."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    counts = [
        ("rounds", f"{stats.rounds}"),
        ("drafts proposed / reached / accepted", f"{stats.proposed} / {stats.reached} / {stats.accepted}"),
        ("tokens a round", f"{stats.tokens_per_round:.2f}"),
    ]
    if stats.reached:
        counts += [
            ("accepted over reached", f"{stats.acceptance_rate:.1%}"),
            ("accepted over proposed", f"{stats.accepted / stats.proposed:.1%}"),
            ("accepted over reached, by position", by_position(stats)),
        ]
    for row in (*rows, *counts):
        table.add_row(*row)
    Console(file=sys.stderr, highlight=False).print(table)


def by_position(stats: SpeculationStats) -> str:
    """Return the acceptance at each position of the draft, of those that were reached."""
    return "  ".join(f"{rate:.0%}" for rate in stats.acceptance_by_position) or "-"


def timing_rows(output: Output, load_s: float) -> list[tuple[str, str]]:
    speed = tokens_per_s(output)
    return [
        ("load", f"{load_s:.2f} s"),
        ("to the first token", f"{output.prefill_s:.3f} s for {output.prompt_tokens} tokens of prompt"),
        ("decode", f"{output.decode_s:.3f} s, " + (f"{speed:.1f} tokens/s" if speed else "too short to tell a speed")),
        ("ended by", output.finish_reason),
    ]


def _logprob_dict(entry: TokenLogprob, llm: LLM) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": llm.tokenizer.decode([token_id]), "logprob": logprob}

    return {**named(entry.token_id, entry.logprob), "top": [named(*pair) for pair in entry.top]}
