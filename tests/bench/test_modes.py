"""The other measurements: matrix, paired, rules; and the report with its plots."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from forerun.bench import machine, matrix, plots, rules, run
from forerun.bench.command import bench
from forerun.bench.matrix import matrix_tables, run_matrix
from forerun.bench.paired import Interval, interval, paired_tables, random_words, run_paired
from forerun.bench.plots import PLOTS, write_report
from forerun.bench.report import as_markdown, as_text, tables
from forerun.bench.rules import rules_tables, run_rules
from forerun.bench.run import Options, run_bench
from forerun.config import Config
from forerun.drafters.build import DRAFTERS, Kind
from forerun.drafters.lm import LMDrafter
from forerun.errors import OptionError, UserError
from tests.bench.doubles import use_toy

SMALL = Options(Config("toy", k=4), max_tokens=24, limit=3, repeats=1, context=32)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    use_toy(monkeypatch)
    bandwidth = machine.Bandwidth(1e9, 1 << 20, "by decree")
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_a, **_k: bandwidth)
    monkeypatch.setattr(run, "import_module", lambda _name: None)


def is_plain(document: dict[str, Any]) -> bool:
    return bool(json.loads(json.dumps(document)) == document)


def test_a_matrix_has_every_drafter_on_every_kind_greedy_and_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_DRAFTERS", ("ngram", "recycle", "quant:q8"))
    document = run_matrix(replace(SMALL, config=Config("toy", drafter="suffix")))
    assert is_plain(document)
    assert list(document["matrix"]) == ["ngram", "recycle", "suffix"]
    assert list(document["skipped_drafters"]) == ["quant:q8"]
    kinds = document["workload"]["kinds"]
    for by_temperature in document["matrix"].values():
        assert list(by_temperature) == ["0.0", "0.8"]
        for own in by_temperature.values():
            assert list(own["kinds"]) == kinds
            assert own["speedup"] > 0
            assert own["speculation"]["tokens_per_round"] >= 1.0
    greedy, sampled = matrix_tables(document)
    assert greedy.header == ["drafter", *kinds, "all", "accepted/reached"]
    assert [row[0] for row in sampled.rows] == ["ngram", "recycle", "suffix"]
    assert "quant:q8 left out" in as_text(document, [greedy, sampled])
    assert "drafter each in turn" in as_markdown(document, [greedy])


def test_pairs_alternate_alone_and_in_a_batch() -> None:
    document = run_paired(replace(SMALL, batch=3), 4)
    assert is_plain(document)
    assert [(own["sequences"], own["verify"]) for own in document["paired"]] == [
        (1, "block"), (3, "block"), (1, "coupled"), (3, "coupled")
    ]  # fmt: skip
    for own in document["paired"]:
        assert len(own["ratios"]) == 4
        assert min(own["ratios"]) <= own["low"] <= own["median"] <= own["high"] <= max(own["ratios"])
    (table,) = paired_tables(document)
    assert table.rows[1][0] == "3 at once, verify block"


def test_an_interval_holds_the_median_nineteen_times_in_twenty() -> None:
    assert interval([1.0, 1.0, 1.0]) == Interval(1.0, 1.0, 1.0)
    rng = np.random.default_rng(0)
    found = [interval(rng.normal(size=20).tolist(), seed=i) for i in range(150)]
    held = sum(own.low <= 0 <= own.high for own in found)
    assert 132 <= held <= 150


def test_random_words_differ_and_come_again_with_their_seed() -> None:
    texts = [random_words(random.Random(seed)) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert len(set(texts[0].split())) > 30


def test_rules_are_compared_on_the_same_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.backends.toy import ToySession
    from tests.bench.doubles import VOCAB_SIZE

    def made(_parts: object) -> LMDrafter:
        return LMDrafter(ToySession.random(VOCAB_SIZE, order=1, spread=4.0, seed=3), vocab_size=VOCAB_SIZE)

    monkeypatch.setitem(DRAFTERS, "layerskip", Kind("layerskip:N", made, is_model=True))
    document = run_rules(SMALL)
    assert is_plain(document)
    assert document["workload"]["temperature"] == rules.TEMPERATURE
    found = {own["rule"]: own for own in document["rules"]}
    assert len(found) == 5
    assert all(own["proposed"] > 0 for own in found.values())
    chains = [own["tokens_per_round"] for rule, own in found.items() if rule.startswith("chain")]
    assert max(chains) > 2.0  # it is nearly the target
    (table,) = rules_tables(document)
    assert [row[3] for row in table.rows if row[0].endswith(("token verification", "target match"))] == ["+0.0%"] * 2


def test_a_report_has_all_plots_that_there_are_figures_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(matrix, "_DRAFTERS", ("ngram", "recycle"))
    made = [
        (run_bench(replace(SMALL, config=Config("toy"))), tables, {"curve", "acceptance", "speedup", "controller"}),
        (run_matrix(SMALL), matrix_tables, {"speedup"}),
        (run_paired(SMALL, 2), paired_tables, {"paired"}),
    ]
    for i, (document, make, expected) in enumerate(made):
        path = tmp_path / f"{i}.html"
        write_report(document, make(document), path)
        page = path.read_text()
        assert {name for name in PLOTS if f'id="{name}"' in page} == expected
        for name in expected:
            assert (tmp_path / f"{i}-{name}.png").read_bytes().startswith(b"\x89PNG")
        for table in make(document):
            assert table.title.replace("'", "&#x27;") in page


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_a_report_and_prints_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("--paired", "2", "--max-tokens", "8", "--report", str(tmp_path / "r.html"), "--json")
    assert result.exception is None, result.exception
    assert json.loads(result.stdout.splitlines()[-1])["paired"]
    assert (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--matrix", "--paired", "3"], "got --matrix and --paired"),
        (["--rules", "--matrix"], "got --matrix and --rules"),
        (["--paired", "1"], "paired is 1; expected a whole number, 2 or more"),
        (["--report", "no/such/folder.html"], "can't write no/such/folder.html"),
    ],
)
def test_a_mistake_is_a_users_error(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert complaint in str(result.exception)


def test_without_matplotlib_a_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    with pytest.raises(OptionError, match=r"pip install 'forerun\[plots\]'"):
        plots.check_plots()
    assert "matplotlib" in str(invoke("--report", str(tmp_path / "r.html")).exception)
