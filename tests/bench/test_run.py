"""The whole bench on a toy model, and its command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from forerun.backends.toy import ToySession
from forerun.bench import machine, measure, run
from forerun.bench.command import bench
from forerun.bench.measure import CURVE_ROWS, RACE_ROWS, SessionPasses
from forerun.bench.peer import PeerMissingError, PeerSetup
from forerun.bench.peers import PEERS
from forerun.bench.report import as_text
from forerun.bench.run import Options, run_bench, select
from forerun.bench.stats import Run
from forerun.bench.workload import Prompt
from forerun.config import Config
from forerun.errors import OptionError, UserError
from forerun.types import SamplingParams
from tests.bench.doubles import use_toy

SMALL = Options(Config("toy", drafter="ngram", k=4), max_tokens=24, limit=3, repeats=2, context=32)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    use_toy(monkeypatch)
    bandwidth = machine.Bandwidth(1e9, 1 << 20, "by decree")
    monkeypatch.setattr(machine, "read_bandwidth", lambda *_a, **_k: bandwidth)
    monkeypatch.setattr(run, "import_module", lambda _name: None)


class Parrot:
    """A peer that says what it was told."""

    name, baseline, has_our_weights = "parrot plain", None, True
    remarks, passes = ("it repeats itself",), None

    def __init__(self, setup: PeerSetup) -> None:
        assert (setup.dtype, setup.device) == ("fp32", "cpu")
        self.contenders = (self,)

    def run(self, prompt_ids: Any, params: SamplingParams) -> Run:
        return Run(tuple(prompt_ids)[: params.max_tokens], 1, 0.5, 2.0)


def test_a_run_measures_everything_and_its_document_is_plain_json() -> None:
    document = run_bench(replace(SMALL, batch=5))
    assert json.loads(json.dumps(document)) == document
    plain, speculative = document["contenders"]["plain"], document["contenders"]["speculative"]
    assert plain["tokens"] == 3 * 23
    assert plain["speculation"]["tokens_per_round"] == 1.0
    assert speculative["speculation"]["tokens_per_round"] > 1.5
    assert speculative["speedup"] == pytest.approx(speculative["tokens_per_s"] / plain["tokens_per_s"])
    assert speculative["speedup_range"][0] <= speculative["speedup_range"][1]
    assert list(speculative["kinds"]) == ["chat", "summary", "code"]
    assert document["texts"] == [{"text": "speculative", "reference": "plain", "same": 3, "of": 3, "differences": []}]
    assert list(document["curve"]["rows"]) == [str(k) for k in CURVE_ROWS]
    assert document["ceiling"]["tokens_per_s"] == pytest.approx(1e9 / (4 * 53**2))
    assert document["rounds"]["full_k"] == 4
    assert document["batch"]["size"] == 5
    assert document["config"]["k"] == 4
    assert document["start"]["load_s"] > 0
    assert [len(prompt["contenders"]["plain"]["decode_s"]) for prompt in document["prompts"]] == [2, 2, 2]


def test_speed_and_counts_of_the_kinds_add_up_to_the_whole() -> None:
    document = run_bench(replace(SMALL, curve=False))
    assert document["curve"] is None
    own = document["contenders"]["speculative"]
    for key in ("tokens", "seconds"):
        assert sum(kind[key] for kind in own["kinds"].values()) == pytest.approx(own[key])
    counts = own["speculation"]
    for key in ("rounds", "proposed", "accepted", "emitted"):
        assert sum(kind["speculation"][key] for kind in own["kinds"].values()) == counts[key]
    assert sum(counts["accepted_by_position"]) == counts["accepted"]


def test_without_a_drafter_only_plain_decoding_is_measured() -> None:
    for config in (Config("toy", drafter="none"), Config("toy", drafter="ngram", k=0)):
        document = run_bench(replace(SMALL, config=config))
        assert list(document["contenders"]) == ["plain"]
        assert document["texts"] == []
        assert "speculative" not in as_text(document)


def test_sampled_texts_are_compared_in_coupled_mode_only() -> None:
    hot = replace(SMALL, temperature=0.8, top_p=0.95)
    assert run_bench(hot)["texts"] == []
    (pair,) = run_bench(replace(hot, config=replace(hot.config, verify="coupled")))["texts"]
    assert pair["same"] == 3


def test_a_peer_takes_part_in_the_same_run_and_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "parrot", Parrot)
    document = run_bench(replace(SMALL, peers=("parrot",)))
    own = document["contenders"]["parrot plain"]
    assert own["tokens_per_s"] == pytest.approx(23 / 2.0)
    assert own["over_plain"] == pytest.approx(own["tokens_per_s"] / document["contenders"]["plain"]["tokens_per_s"])
    assert own["speculation"] is None
    pair = document["texts"][-1]
    assert (pair["text"], pair["reference"], pair["same"]) == ("parrot plain", "plain", 0)
    assert {difference["verdict"] for difference in pair["differences"]} == {"real"}
    assert document["peers"] == {"parrot": {"contenders": ["parrot plain"], "remarks": ["it repeats itself"]}}
    assert document["curve"]["race"] == {}
    assert "Against parrot, in the same run" in as_text(document)


def test_the_curve_of_a_peer_is_measured_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Racer(Parrot):
        def __init__(self, setup: PeerSetup) -> None:
            super().__init__(setup)
            self.has_our_weights = False
            self.passes = SessionPasses(ToySession.random(300, order=1))

    monkeypatch.setitem(PEERS, "parrot", Racer)
    monkeypatch.setattr(measure, "_SETTLE_S", 0.0)
    document = run_bench(replace(SMALL, peers=("parrot",)))
    assert list(document["curve"]["race"]) == ["ours", "parrot"]
    assert list(document["curve"]["race"]["parrot"]) == [str(k) for k in RACE_ROWS]
    assert "a pass over 16, ms" in as_text(document)
    assert [pair["text"] for pair in document["texts"]] == ["speculative"]  # of other weights nothing is compared


def test_a_peer_that_is_missing_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(setup: PeerSetup) -> Any:
        raise PeerMissingError("isn't installed; pip install ghost")

    monkeypatch.setitem(PEERS, "ghost", missing)
    document = run_bench(replace(SMALL, peers=("ghost",)))
    assert document["skipped_peers"] == {"ghost": "isn't installed; pip install ghost"}
    assert "ghost skipped: isn't installed; pip install ghost" in as_text(document)


def test_a_limit_takes_prompts_of_all_kinds_in_turn_and_keeps_their_order() -> None:
    prompts = [Prompt(f"{kind}{n}", kind, "x") for kind in "ab" for n in (1, 2, 3)]
    assert [p.id for p in select(prompts, (), 3)] == ["a1", "a2", "b1"]
    assert [p.id for p in select(prompts, (), 4)] == ["a1", "a2", "b1", "b2"]
    assert [p.id for p in select(prompts, ("b",), None)] == ["b1", "b2", "b3"]
    with pytest.raises(OptionError, match="kind is 'c'; the prompts have a, b"):
        select(prompts, ("a", "c"), None)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"repeats": 0}, "repeats is 0; expected a whole number, 1 or more"),
        ({"batch": 1}, "batch is 1"),
        ({"limit": 0}, "limit is 0"),
        ({"context": 0}, "context is 0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"peers": ("vlm",)}, "peer is 'vlm'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_an_impossible_option_is_refused_before_a_model_is_loaded(setting: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        replace(SMALL, **setting)


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--limit", "2", "--max-tokens", "8", "--repeats", "1", "--k", "4", *arguments])


def test_the_command_prints_tables_and_writes_the_document(tmp_path: Path) -> None:
    result = invoke("--no-curve", "--out", str(tmp_path / "b.json"))
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stdout
    assert json.loads((tmp_path / "b.json").read_text())["workload"]["prompts"] == 2


def test_with_json_the_last_and_only_line_of_stdout_is_the_document() -> None:
    result = invoke("--json", "--no-curve", "--kinds", "code, chat", "--batch", "3")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workload"]["kinds"] == ["chat", "code"]
    assert result.stdout.count("\n") == 1
    assert "tokens/s" in result.stderr


def test_markdown_tables_can_be_pasted() -> None:
    assert "| --- | ---: |" in invoke("--markdown", "--no-curve").stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--k", "many"], "k is 'many'; expected auto or a whole number"),
        (["--kinds", "poetry"], "kind is 'poetry'"),
        (["--out", "no/such/folder/b.json"], "can't write"),
        (["--prompts", "none.jsonl"], "can't be read"),
        (["--peer", "vlm"], "peer is 'vlm'"),
        (["--peer", "llama.cpp:no.gguf"], "peer is 'llama.cpp:no.gguf'; expected Q4_0 or Q8_0 or a GGUF file"),
        (["--backend", "gpu"], "backend is 'gpu'; expected one of auto, cpu, torch"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_users_error(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert complaint in str(result.exception)


def test_importing_the_command_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    heavy = ("numpy", "torch", "transformers")
    code = f"import sys, forerun.bench.command; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
