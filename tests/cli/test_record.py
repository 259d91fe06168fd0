"""`--record`: what it holds, that it survives, that it overwrites nothing."""

import csv
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from forerun import __version__
from forerun.engine.record import COLUMNS
from tests.cli.conftest import Run
from tests.cli.toy import SlowSession


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    with (folder / "tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return json.loads((folder / "meta.json").read_bytes()), rows


def test_a_record_holds_settings_totals_rounds_and_every_token(run: Run, session: SlowSession, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "record"
    result = run(
        "generate", "Hello", "--record", str(folder), "--json", "--temperature", "1", "--ignore-eos", "--k", "2"
    )
    answer, (meta, rows) = result.json, read(folder)
    assert "logprobs" not in answer
    assert meta["complete"] is True
    assert meta["prompt"] == "Hello"
    assert len(meta["prompt_ids"]) == answer["usage"]["prompt_tokens"]
    assert meta["config"] == answer["config"]
    assert meta["versions"].keys() >= {"forerun", "python", "platform", "numpy"}
    assert meta["versions"]["forerun"] == __version__
    assert {**meta["totals"], "drafter": "suffix", "verify": "block"} == answer["speculation"]
    assert (meta["text"], meta["finish_reason"]) == (answer["text"], "length")

    assert tuple(rows[0]) == COLUMNS
    assert [int(row["token_id"]) for row in rows] == answer["token_ids"]
    assert [int(row["step"]) for row in rows] == list(range(256))
    assert {row["source"] for row in rows} == {"plain", "draft", "bonus", "resample"}
    for row in rows:
        assert 0 < float(row["p_target"]) <= 1
        assert float(row["logprob"]) < 0
        if row["source"] == "plain":
            assert row["p_draft"] == ""
        if row["source"] == "draft":
            assert float(row["p_draft"]) == 1

    rounds = meta["rounds"]
    assert len(rounds) == answer["speculation"]["rounds"]
    for one in rounds:
        own = [row for row in rows if int(row["round"]) == one["round"]]
        assert one["emitted"] == len(own)
        assert one["accepted"] == sum(row["source"] == "draft" for row in own)
        assert one["accepted"] <= one["reached"] <= one["proposed"]
    assert [one["end_s"] for one in rounds] == sorted(one["end_s"] for one in rounds)


def test_a_record_tells_what_the_controller_decided(run: Run, session: SlowSession, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    run("generate", "Hello", "--record", str(folder), "--ignore-eos", "--max-tokens", "60")
    meta, _rows = read(folder)
    for one in meta["rounds"]:
        decision = one["decision"]
        assert decision["num_drafts"] == one["proposed"] <= decision["num_offered"]
        assert (decision["drafter"] is None) == (one["proposed"] == 0)
        assert decision["expected_tokens"] >= 1
        assert decision["seconds"] >= decision["plain_seconds"] > 0
    assert any(one["proposed"] for one in meta["rounds"])


def test_recording_changes_no_token(run: Run, session: SlowSession, tmp_path: Path) -> None:
    assert run("generate", "Hello", "--record", str(tmp_path / "r")).out == run("generate", "Hello").out


def test_a_folder_with_a_record_is_refused_and_left_alone(run: Run, session: SlowSession, tmp_path: Path) -> None:
    run("generate", "Hello", "--record", str(tmp_path))
    before = read(tmp_path)
    result = run("generate", "Other", "--record", str(tmp_path))
    assert (result.status, result.out) == (2, "")
    assert "holds a record already" in result.err
    assert read(tmp_path) == before


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    result = run("generate", "Hello", "--target", "no such model", "--record", str(tmp_path / name))
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert "is not a folder" in result.err


def test_a_model_that_fails_to_load_leaves_no_record(run: Run, tmp_path: Path) -> None:
    assert run("generate", "Hello", "--target", "no such model", "--record", str(tmp_path / "r")).status == 2
    assert not (tmp_path / "r").exists()


def test_an_interrupted_record_is_kept_and_says_so(start: Any, tmp_path: Path) -> None:
    args = ("generate", "Hello", "--record", str(tmp_path), "--max-tokens", "1900", "--ignore-eos")
    process = start(*args, env={"TOY_DELAY_S": "0.02"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    meta, rows = read(tmp_path)
    assert (process.returncode, meta["complete"]) == (130, False)
    assert 20 <= len(rows) == meta["totals"]["emitted"] == sum(one["emitted"] for one in meta["rounds"])


def test_a_record_survives_a_kill(start: Any, tmp_path: Path) -> None:
    args = ("generate", "Hello", "--record", str(tmp_path), "--max-tokens", "2000", "--ignore-eos", "--k", "2")
    process = start(*args, env={"TOY_DELAY_S": "0.02"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    tokens = tmp_path / "tokens.csv"
    deadline = time.monotonic() + 30
    while not tokens.exists() or tokens.read_text().count("\n") < 40:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shown = process.stdout.read().decode()
    meta, rows = read(tmp_path)
    assert meta["complete"] is False
    assert meta["config"]["target"] == "smollm2-135m"
    assert len(rows) >= 39
    assert bytes(int(row["token_id"]) for row in rows).decode().startswith(shown)
    assert {path.name for path in tmp_path.iterdir()} <= {"meta.json", "tokens.csv"}
