"""`--report`: one HTML file with the tables and the plots of a run; the plots also lie beside it as PNG files."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.bench.report import Table, headline
from forerun.errors import OptionError
from forerun.models.files import write_atomically

Document = Mapping[str, Any]
_SIZE = (7.2, 3.6)  # inches
_DPI = 110
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } img { max-width: 100%; height: auto } p { color: #555 }
"""


def check_plots() -> None:
    """Raise OptionError where plots can't be made."""
    if find_spec("matplotlib") is None:
        raise OptionError("--report needs matplotlib, which isn't installed; pip install 'forerun[plots]'")


def write_report(document: Document, tables: Sequence[Table], path: Path) -> None:
    """Write the HTML file `path`, and its plots as `<stem>-<name>.png` beside it. Raises OptionError."""
    images = {name: (title, png(draw, document)) for name, (title, has, draw) in PLOTS.items() if has(document)}
    parts = [f"<h1>forerun bench</h1><p>{html.escape(headline(document))}</p>"]
    for name, (title, data) in images.items():
        encoded = base64.b64encode(data).decode()
        parts.append(
            f'<h2>{html.escape(title)}</h2><img id="{name}" alt="{title}" src="data:image/png;base64,{encoded}">'
        )
    parts += [_html_table(table) for table in tables]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>forerun bench</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>{"".join(parts)}</html>\n'
    )
    try:
        write_atomically(path, page.encode())
        for name, (_title, data) in images.items():
            write_atomically(path.with_name(f"{path.stem}-{name}.png"), data)
    except OSError as error:
        raise OptionError(f"can't write {path}: {error.strerror or error}") from error


def png(draw: Callable[[Any, Document], None], document: Document) -> bytes:
    """Return one plot as the bytes of a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, document)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _html_table(table: Table) -> str:
    rows = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, group in (("th", [table.header]), ("td", table.rows))
        for row in group
    ]
    remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in table.remarks)
    return f"<h2>{html.escape(table.title)}</h2><table>{''.join(rows)}</table>{remarks}"


def _draw_curve(figure: Any, document: Document) -> None:
    curve = document["curve"]
    axes = figure.add_subplot(xlabel="new rows in a pass", ylabel="ms")
    for name, rows in {"ours": curve["rows"], **{k: v for k, v in curve["race"].items() if k != "ours"}}.items():
        counts = [int(count) for count in rows]
        axes.plot(counts, [row["ms"] for row in rows.values()], marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_positions(figure: Any, document: Document) -> None:
    axes = figure.add_subplot(xlabel="position in the draft", ylabel="accepted of those reached")
    counts = document["contenders"]["speculative"]["speculation"]
    rates, reached = counts["acceptance_by_position"], counts["reached_by_position"]
    places = [i + 1 for i in range(len(rates)) if reached[i]]
    bars = axes.bar(places, [rates[place - 1] for place in places])
    axes.bar_label(bars, [str(reached[place - 1]) for place in places], fontsize=7)
    axes.set_ylim(0, 1.1)
    axes.set_xticks(places)


def _draw_kinds(figure: Any, document: Document) -> None:
    """Draw speed-ups by kind of prompt: of all contenders that have a baseline, or of all drafters of a matrix."""
    kinds = [*document["workload"]["kinds"], "all"]
    series: dict[str, list[float | None]] = {}
    if "matrix" in document:
        for name, by_temperature in document["matrix"].items():
            for temperature, own in by_temperature.items():
                label = f"{name}, {'greedy' if temperature == '0.0' else f'T {temperature}'}"
                series[label] = [*(own["kinds"][kind]["speedup"] for kind in kinds[:-1]), own["speedup"]]
    else:
        for name, own in document["contenders"].items():
            if own["baseline"] is not None:
                series[name] = [*(own["kinds"][kind]["speedup"] for kind in kinds[:-1]), own["speedup"]]
    axes = figure.add_subplot(ylabel="speed over plain")
    width = 0.8 / max(1, len(series))
    colours = [f"C{i // 2 if 'matrix' in document else i}" for i in range(len(series))]
    for i, (label, values) in enumerate(series.items()):
        places = [place + (i - (len(series) - 1) / 2) * width for place in range(len(kinds))]
        is_pale = "matrix" in document and i % 2 == 1
        heights = [value or 0.0 for value in values]
        axes.bar(places, heights, width, label=label, color=colours[i], alpha=0.5 if is_pale else 1.0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.legend(fontsize=7, ncols=2)


def _draw_decisions(figure: Any, document: Document) -> None:
    """Draw drafts and accepted drafts, round by round, on one prompt of each kind."""
    texts = document["controller"]
    figure.set_size_inches(_SIZE[0], 1.5 * len(texts) + 0.6)
    for place, text in enumerate(texts):
        axes = figure.add_subplot(len(texts), 1, place + 1)
        rounds = range(len(text["rounds"]))
        axes.step(rounds, [one["drafts"] for one in text["rounds"]], where="mid", linewidth=1, label="drafts")
        axes.bar(rounds, [one["accepted"] for one in text["rounds"]], 1.0, alpha=0.5, label="accepted", color="C2")
        axes.set_ylabel(text["kind"], fontsize=8)
        if place == 0:
            axes.legend(fontsize=7, ncols=2)
    axes.set_xlabel("round")


def _draw_pairs(figure: Any, document: Document) -> None:
    axes = figure.add_subplot(xlabel="speculative over plain")
    labels = [f"{own['sequences']} at once,\n{own['verify']}" for own in document["paired"]]
    for place, own in enumerate(document["paired"]):
        axes.scatter(own["ratios"], [place] * len(own["ratios"]), alpha=0.4, s=14)
        axes.errorbar(
            own["median"], place, capsize=5, fmt="k|",
            xerr=[[own["median"] - own["low"]], [own["high"] - own["median"]]],
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)


def _draw_rules(figure: Any, document: Document) -> None:
    axes = figure.add_subplot(xlabel="tokens a round")
    rules = document["rules"][::-1]
    bars = axes.barh([own["rule"] for own in rules], [own["tokens_per_round"] for own in rules])
    axes.bar_label(bars, fmt="%.2f")


def _has(*path: str) -> Callable[[Document], bool]:
    def check(document: Document) -> bool:
        value: Any = document
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return bool(value)

    return check


PLOTS: dict[str, tuple[str, Callable[[Document], bool], Callable[[Any, Document], None]]] = {
    "curve": ("What a pass costs by its rows", _has("curve"), _draw_curve),
    "acceptance": (
        "Acceptance by position, with how often each was reached",
        _has("contenders", "speculative", "speculation", "proposed"),
        _draw_positions,
    ),
    "speedup": (
        "Speed over plain decoding by kind of prompt",
        lambda document: _has("matrix")(document) or _has("contenders", "speculative")(document),
        _draw_kinds,
    ),
    "controller": ("What the controller drafted, round by round", _has("controller"), _draw_decisions),
    "paired": ("Where nothing can be guessed", _has("paired"), _draw_pairs),
    "rules": ("Tokens a round by rule", _has("rules"), _draw_rules),
}
