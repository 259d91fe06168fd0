"""From the document of a run to tables for people: pure functions from plain values to text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Document = Mapping[str, Any]


class Table(NamedTuple):
    """Rows of text under a title, and remarks below. The first column is words, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


def as_text(document: Document, shown: Sequence[Table] | None = None) -> str:
    """Return all tables, or those `shown`, for a terminal."""
    return "\n\n".join([headline(document), *map(text_table, tables(document) if shown is None else shown)])


def as_markdown(document: Document, shown: Sequence[Table] | None = None) -> str:
    """Return all tables, or those `shown`, in Markdown, ready for a README."""
    return "\n\n".join([headline(document), *map(markdown_table, tables(document) if shown is None else shown)])


def tables(document: Document) -> list[Table]:
    """Return every table for which something was measured."""
    made = [
        _speed(document),
        _kinds(document),
        _texts(document),
        _rounds(document),
        _curve(document),
        *(_peer(name, document) for name in document["peers"]),
        _batch(document),
        _start(document),
    ]
    return [table for table in made if table is not None]


def headline(document: Document) -> str:
    """Return what was run, on what, and when."""
    config, workload, hardware = document["config"], document["workload"], document["hardware"]
    where = ", ".join(hardware["gpu"] or [hardware["cpu"], f"threads {config['threads']}"])
    where += f", backend {config['backend']}"
    if document["instruction_set"]:
        where += f" with {document['instruction_set']}"
    sampling = "greedy, "
    if "matrix" in document:
        sampling = ""
    elif workload["temperature"] > 0:
        sampling = f"temperature {workload['temperature']}, top-p {workload['top_p']}, "
    repeats = workload["repeats"]
    how = f"medians of {repeats} interleaved repetitions" if repeats > 1 else "one repetition"
    prompts = f"{workload['prompts']} prompts" + (f" of {workload['file']}" if workload["file"] else "")
    return (
        f"forerun {document['forerun']}, {config['target']} in {config['dtype']} on {config['device']} ({where}), "
        f"drafter {config['drafter']}, k {config['k']}, verify {config['verify']}. "
        f"{prompts}, up to {workload['max_tokens']} tokens each, {sampling}seed {workload['seed']}, {how}, "
        f"{document['date'][:10]}."
    )


def text_table(table: Table) -> str:
    """Return a table for a terminal: columns padded to their widest entry."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    header, *rows = (_aligned(row, widths) for row in (table.header, *table.rows))
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([table.title, *([header] if header else []), rule, *rows, *table.remarks])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(padded).rstrip()


def markdown_table(table: Table) -> str:
    """Return a table in Markdown."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:])]
    remarks = ["", "  \n".join(table.remarks)] if table.remarks else []
    return "\n".join([f"**{table.title}**", "", *lines, *remarks])


def _speed(document: Document) -> Table:
    rows = []
    for name, own in document["contenders"].items():
        counts = own["speculation"] or {}
        has_drafts = bool(counts.get("proposed"))
        row = {
            "": name,
            "tokens/s": number(own["tokens_per_s"]),
            "over own plain": times(own["speedup"], own["speedup_range"]),
            "over our plain": times(own["over_plain"]),
            "tokens/round": number(counts.get("tokens_per_round"), 2),
            "accepted/reached": percent(counts["acceptance_rate"]) if has_drafts else "-",
            "accepted/proposed": percent(counts["accepted_over_proposed"]) if has_drafts else "-",
            "first token, ms": number(1e3 * own["prefill_s"], 0),
        }
        rows.append(row)
    skipped = [f"{name} skipped: {reason}" for name, reason in document["skipped_peers"].items()]
    remarks = [*_ceiling(document), *_positions(document), *skipped]
    return _table("Speed, all prompts, from the first token on", rows, remarks)


def _table(title: str, rows: Sequence[Mapping[str, str]], remarks: Sequence[str] = ()) -> Table:
    """Return a table of rows that name their columns alike."""
    return Table(title, list(rows[0]), [list(row.values()) for row in rows], remarks)


def _ceiling(document: Document) -> list[str]:
    ceiling = document["ceiling"]
    if ceiling is None:
        return []
    plain = document["contenders"]["plain"]["tokens_per_s"]
    share = f"; plain reaches {percent(plain / ceiling['tokens_per_s'])}" if plain else ""
    lines = [
        f"Ceiling of plain decoding: {number(ceiling['tokens_per_s'])} tokens/s: "
        f"{ceiling['bytes_per_s'] / 1e9:.1f} GB/s over {ceiling['bytes_per_pass'] / 1e6:.0f} MB a pass{share} "
        f"({ceiling['method']})."
    ]
    if ceiling["fits_in_cache"]:
        lines.append("The weights fit in the last-level cache, faster than memory: the ceiling can be exceeded.")
    return lines


def _positions(document: Document) -> list[str]:
    counts = (document["contenders"].get("speculative") or {}).get("speculation")
    if not counts or not counts["proposed"]:
        return []
    rates = zip(counts["acceptance_by_position"], counts["reached_by_position"], strict=True)
    shown = "  ".join(percent(rate) if reached else "-" for rate, reached in rates)
    return [f"Accepted/reached by position: {shown}"]


def _kinds(document: Document) -> Table | None:
    kinds = document["workload"]["kinds"]
    if len(kinds) < 2:
        return None
    rows = []
    for name, own in document["contenders"].items():
        rows.append([f"{name}, tokens/s", *(number(own["kinds"][kind]["tokens_per_s"]) for kind in kinds)])
        if own["baseline"] is not None:
            rows.append([f"{name}, over {own['baseline']}", *(times(own["kinds"][kind]["speedup"]) for kind in kinds)])
    return Table("By kind", ["", *kinds], rows)


def _texts(document: Document) -> Table | None:
    if not document["texts"]:
        return None
    rows, remarks = [], []
    for pair in document["texts"]:
        verdicts = [difference["verdict"] for difference in pair["differences"]]
        counts = [str(verdicts.count(kind)) for kind in ("near-tie", "real", "not judged")]
        rows.append([f"{pair['text']} against {pair['reference']}", f"{pair['same']} of {pair['of']}", *counts])
        for difference in pair["differences"]:
            margin = difference["margin"]
            shown = "" if margin is None else f", margin {margin:.3g} (tied up to {difference['tolerance']:.3g})"
            token, other = difference["tokens"]
            remarks.append(
                f"{difference['prompt_id']}, token {difference['position']}: {pair['text']} has {token}, "
                f"{pair['reference']} {other}{shown}: {difference['verdict']}"
            )
    return Table("Same text", ["", "same token ids", "near-ties", "real", "not judged"], rows, remarks)


def _rounds(document: Document) -> Table | None:
    rounds = document["rounds"]
    labels = {"plain": "plain", "full": f"with {rounds.get('full_k')} drafts", "speculative": "speculative, all"}
    rows = [_round_row(label, rounds[key]) for key, label in labels.items() if rounds.get(key)]
    if not rows:
        return None
    one_row = f"A pass over one row takes {number(rounds['one_row_pass_ms'], 2)} ms (the target in plain rounds)."
    return _table("Time per round, ms, medians", rows, [one_row])


def _round_row(label: str, parts: Mapping[str, Any]) -> dict[str, str]:
    return {
        "": label,
        "rounds": str(parts["rounds"]),
        "draft": number(parts["draft_ms"], 2),
        "of it its model": number(parts["draft_model_ms"], 2),
        "target": number(parts["target_ms"], 2),
        "sampling": number(parts["sampling_ms"], 2),
        "rest": number(parts["rest_ms"], 2),
        "whole round": number(parts["wall_ms"], 2),
        "beyond the models": number(parts["overhead_ms"], 2),
        "of a one-row pass": percent(parts["overhead_over_one_row_pass"]),
    }


def _curve(document: Document) -> Table | None:
    curve = document["curve"]
    if curve is None:
        return None
    rows, ceiling = curve["rows"], document["ceiling"]
    lines = [
        ["ms", *(number(row["ms"], 1) for row in rows.values())],
        ["t(k)/t(1)", *(number(row["over_one_row"], 2) for row in rows.values())],
    ]
    if ceiling is not None:  # what reading the weights from memory takes
        limit_ms = 1e3 * ceiling["bytes_per_pass"] / ceiling["bytes_per_s"]
        lines.append(["over the ceiling's", *(times(row["ms"] / limit_ms) for row in rows.values())])
    return Table(f"A pass over k new rows after {curve['context']} tokens", ["k", *rows], lines)


def _peer(name: str, document: Document) -> Table:
    """Return ours against theirs: the time of passes, where less is better, and the speed of decoding."""
    own, rows = document["peers"][name], []
    race = (document["curve"] or {}).get("race", {})
    if name in race:
        for k, a in race["ours"].items():
            b = race[name][k]
            rows.append([f"a pass over {k}, ms", number(a["ms"], 2), number(b["ms"], 2), times(a["ms"] / b["ms"])])
        last = list(race["ours"])[-1]
        shapes = [number(race[who][last]["over_one_row"], 2) for who in ("ours", name)]
        rows.append([f"t({last})/t(1)", *shapes, ""])
    speeds = {who: found["tokens_per_s"] for who, found in document["contenders"].items()}
    theirs = own["contenders"]
    for ours, other in [("plain", theirs[0]), *(("speculative", other) for other in theirs)]:
        if ours in speeds:
            x, y = speeds[ours], speeds[other]
            rows.append([f"{ours} against {other}, tokens/s", number(x), number(y), times(x / y if x and y else None)])
    return Table(f"Against {name}, in the same run", ["", "ours", "theirs", "ours over theirs"], rows, own["remarks"])


def _batch(document: Document) -> Table | None:
    batch = document["batch"]
    if batch is None:
        return None
    rows = [
        [name, number(batch[name]["one_by_one"]), number(batch[name]["tokens_per_s"]), times(batch[name]["ratio"])]
        for name in ("plain", "speculative")
        if name in batch
    ]
    header = ["", "one by one", f"{batch['size']} at once", "ratio"]
    return Table("Total tokens/s of many sequences, prompts included", header, rows)


def _start(document: Document) -> Table:
    start, memory = document["start"], document["memory"]
    resident, imports = memory["running"]["resident"], memory["after_imports"]["resident"]
    rows = [
        ["process start to first token, s", number(start["to_first_token_s"], 2)],
        ["of it imports", number(start["imported_s"], 2)],
        ["of it loading", number(start["load_s"], 2)],
        ["peak memory, MB", megabytes(memory["running"]["peak"])],
        ["resident above imports, MB", megabytes(None if resident is None or imports is None else resident - imports)],
        ["weights read in a pass, MB", megabytes(memory["weights"])],
    ]
    return Table("Start and memory", ["", ""], [row for row in rows if row[1] != "-"])


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def times(value: float | None, spread: Sequence[float] | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}×" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")


def megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.0f}"
