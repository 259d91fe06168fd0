"""`forerun generate`: what goes where, and that it is what the library writes."""

import io
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from forerun.cli import options, terminal
from forerun.types import Source
from tests.cli.conftest import Run
from tests.cli.toy import END, SlowSession

FIELDS = ["text", "token_ids", "finish_reason", "usage", "timing", "speculation", "config"]


def test_text_goes_to_stdout_and_one_line_with_resolved_settings_to_stderr(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--max-tokens", "40", "--threads", "2")
    assert result.status == 0
    assert 20 < len(result.out) <= 41
    assert result.out.endswith("\n")
    assert "\x1b" not in result.out
    assert re.fullmatch(
        r"40 tokens, [\d.]+ tokens/s, [\d.]+ tokens a round, acceptance \d+% \| target smollm2-135m, "
        r"drafter suffix\+recycle, k auto, verify block, dtype fp32, device cpu, backend torch, threads 2\n",
        result.err,
    )


def test_json_is_one_document_with_the_fields_that_scripts_rely_on(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--json", "--max-tokens", "40")
    assert len(result.out.splitlines()) == 1
    answer = result.json
    assert list(answer) == FIELDS
    assert answer["usage"] == {"prompt_tokens": len("(user\nHello)\n(assistant\n"), "completion_tokens": 40}
    assert len(answer["token_ids"]) == 40
    assert bytes(answer["token_ids"]).decode() == answer["text"]
    assert list(answer["timing"]) == ["load_s", "prefill_s", "decode_s", "tokens_per_s"]
    assert answer["timing"]["tokens_per_s"] == pytest.approx(39 / answer["timing"]["decode_s"])
    speculation = answer["speculation"]
    assert speculation.keys() >= {
        "drafter", "verify", "rounds", "proposed", "reached", "accepted", "emitted", "tokens_per_round",
        "acceptance_rate", "acceptance_by_position",
    }  # fmt: skip
    assert speculation["emitted"] == 40
    assert speculation["tokens_per_round"] > 1.5  # the toy goes in circles: n-grams are found
    assert (answer["config"]["drafter"], answer["config"]["k"], answer["config"]["device"]) == (
        "suffix+recycle",
        "auto",
        "cpu",
    )
    assert answer["config"]["sampling"]["max_tokens"] == 40


def test_speculation_does_not_change_the_text(run: Run, session: SlowSession) -> None:
    plain = run("generate", "Hello", "--json", "--drafter", "none").json
    assert plain["speculation"]["proposed"] == 0
    for k in ("1", "3", "20"):
        assert run("generate", "Hello", "--json", "--k", k).json["token_ids"] == plain["token_ids"]


def test_the_speed_of_a_single_token_is_unknown(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--json", "--max-tokens", "1")
    assert result.json["timing"]["tokens_per_s"] is None
    assert "tokens/s" not in result.err


@pytest.mark.parametrize("args", [(), ("-",)])
def test_a_prompt_may_come_from_a_pipe(run: Run, session: SlowSession, args: tuple[str, ...]) -> None:
    piped = run("generate", *args, stdin="Ünï\ncode\n")
    assert piped.out == run("generate", "Ünï\ncode").out


def test_a_raw_prompt_has_no_template(run: Run, session: SlowSession) -> None:
    assert run("generate", "Hello", "--raw", "--json").json["usage"]["prompt_tokens"] == 5


def test_a_system_message_and_arguments_reach_the_template(run: Run, session: SlowSession) -> None:
    def num_tokens(*args: str) -> int:
        return int(run("generate", "Hello", "--json", *args).json["usage"]["prompt_tokens"])

    assert num_tokens("--system", "Be brief") == num_tokens() + len("(system\nBe brief)\n")
    assert num_tokens("--template-arg", "mark=xyz") == num_tokens() + 3
    assert num_tokens("--template-arg", 'mark="xyz"') == num_tokens() + 3


def test_a_stop_string_ends_the_text_before_it(run: Run, session: SlowSession) -> None:
    whole = run("generate", "Hello", "--json").json
    stop = whole["text"][7:10]
    cut = run("generate", "Hello", "--json", "--stop", "no such", "--stop", stop).json
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


def test_a_seed_is_used_or_made_up_and_shown_and_gives_the_text_again(run: Run, session: SlowSession) -> None:
    fresh = run("generate", "Hello", "--temperature", "1", "--ignore-eos")
    found = re.search(r"seed (\d+)", fresh.err)
    assert found
    again = run("generate", "Hello", "--temperature", "1", "--ignore-eos", "--seed", found[1], "--json")
    assert again.json["text"] + "\n" == fresh.out
    assert again.json["config"]["sampling"]["seed"] == int(found[1])
    assert run("generate", "Hello", "--temperature", "1", "--ignore-eos").out != fresh.out


@pytest.mark.parametrize("form", ["{}=-inf", '{{"{}": -Infinity}}', "{}=-1e9"])
def test_a_logit_bias_forbids_a_token(run: Run, session: SlowSession, form: str) -> None:
    first = run("generate", "Hello", "--json").json["token_ids"][0]
    biased = run("generate", "Hello", "--json", "--logit-bias", form.format(first), "--logit-bias", "0=0.5")
    assert first not in biased.json["token_ids"]
    assert biased.json["config"]["sampling"]["logit_bias"].keys() == {str(first), "0"}


def test_log_probabilities_come_with_their_alternatives(run: Run, session: SlowSession) -> None:
    answer = run("generate", "Hello", "--json", "--logprobs", "3", "--max-tokens", "9").json
    assert len(answer["logprobs"]) == 9
    for token_id, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top"][0]["token_id"]
        assert entry["token"] == chr(token_id)
        assert 0 > entry["logprob"] == entry["top"][0]["logprob"] > entry["top"][1]["logprob"]
        assert len(entry["top"]) == 3


def test_an_end_token_is_counted_and_not_shown(run: Run, session: SlowSession) -> None:
    answer = run("generate", "x", "--raw", "--json", "--temperature", "1", "--seed", "4", "--max-tokens", "2000").json
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"][-1] == END
    assert answer["text"] == bytes(answer["token_ids"][:-1]).decode()


def test_colour_paints_each_origin_and_changes_no_letter(run: Run, session: SlowSession) -> None:
    painted = run("generate", "Hello", "--color", "always")
    assert painted.out.count("\x1b[38;5;32m") > 3
    assert re.sub(r"\x1b\[[\d;]*m", "", painted.out) == run("generate", "Hello", "--color", "never").out
    assert painted.err.startswith("colours: ")
    for meaning in ("drafted and accepted", "bonus", "resampled", "plain"):
        assert painted.err.count(meaning) == 1


def test_every_origin_has_a_style_of_its_own() -> None:
    assert len({terminal.paint("x", source) for source in get_args(Source)}) == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_automatic_on_a_terminal_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.use_color("auto", Terminal())
    assert not terminal.use_color("auto", io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.use_color("auto", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.use_color("auto", Terminal())
    assert terminal.use_color("always", Terminal())


def test_a_model_cannot_drive_the_terminal_but_a_file_gets_its_bytes() -> None:
    for stream, expected in ((Terminal(), "a\ufffd[2Jb\tc\n"), (io.StringIO(), "a\x1b[2Jb\tc\n")):
        terminal.Writer(stream, color=False).write([("a\x1b[2Jb\tc\n", "plain")])
        assert stream.getvalue() == expected


def test_stats_are_a_table_on_stderr(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--stats")
    assert result.out == run("generate", "Hello").out
    assert "accepted over reached, by position" in result.err
    assert "24 tokens of prompt" in result.err


def test_the_target_may_come_from_the_environment(
    run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORERUN_TARGET", "some/model")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    config = run("generate", "Hello", "--json").json["config"]
    assert (config["target"], config["cache_dir"]) == ("some/model", str(tmp_path))
    assert run("generate", "Hello", "--json", "--target", "other").json["config"]["target"] == "other"


def test_compare_runs_both_on_one_model_and_finds_them_equal(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--compare", "--max-tokens", "50")
    assert result.status == 0
    assert "identical, all 50 tokens" in result.out
    for heading in ("tokens/s", "speed-up", "tokens a round", "position in draft"):
        assert heading in result.out
    alone = run("generate", "Hello", "--max-tokens", "50").out
    assert result.out.count(alone) == 2


def test_compare_as_json_holds_both_answers(run: Run, session: SlowSession) -> None:
    result = run("generate", "Hello", "--compare", "--json", "--max-tokens", "50")
    assert len(result.out.splitlines()) == 1
    both = result.json
    assert both["identical"]
    assert both["plain"]["speculation"]["proposed"] == 0 < both["speculative"]["speculation"]["accepted"]
    assert both["speed_up"] > 0


def test_compare_shows_where_greedy_answers_part_and_by_how_little(run: Run, session: SlowSession) -> None:
    session.wide_shift = 100.0
    both = run("generate", "Hello", "--compare", "--json").json
    found = both["first_difference"]
    assert not both["identical"]
    assert both["plain"]["token_ids"][: found["token"]] == both["speculative"]["token_ids"][: found["token"]]
    assert found["speculative"] == "z" != found["plain"]
    assert found["margin_plain"] > 0
    assert found["margin_speculative"] > 50
    assert "a wide margin is a fault" in run("generate", "Hello", "--compare").out


def test_compare_does_not_expect_equal_words_by_chance(run: Run, session: SlowSession) -> None:
    assert "drawn by chance" in run("generate", "Hello", "--compare", "--temperature", "1").out
    coupled = run("generate", "Hello", "--compare", "--temperature", "1", "--verify", "coupled", "--ignore-eos")
    assert "identical, all 256 tokens" in coupled.out


def test_what_stdout_cannot_encode_is_escaped_the_way_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "utf-8"):
        data = io.BytesIO()
        stream = io.TextIOWrapper(data, encoding=encoding, errors="backslashreplace")
        monkeypatch.setattr("sys.stdout", stream)
        terminal.print_json({"id": "\ud800", "text": "é𝄞"})
        assert json.loads(data.getvalue()) == {"id": "\ud800", "text": "é𝄞"}


def test_the_help_names_all_kinds_of_drafters() -> None:
    from forerun.drafters.build import DRAFTERS

    assert ", ".join(["auto", *(kind.usage for kind in DRAFTERS.values())]) == options.DRAFTER_USAGE


def test_what_was_written_is_kept_in_a_file_and_drafted_again(run: Run, tmp_path: Path) -> None:
    """The second run of a prompt is guessed from the first one's answer, unless it is to stay apart."""
    path = tmp_path / "past"
    args = ("generate", "Hello", "--json", "--max-tokens", "30", "--k", "8", "--drafter", f"suffix:{path}")
    first = run(*args).json
    size = path.stat().st_size
    isolated = run(*args, "--isolated").json
    second = run(*args).json
    assert first["token_ids"] == isolated["token_ids"] == second["token_ids"]
    assert first["speculation"]["rounds"] == isolated["speculation"]["rounds"] > second["speculation"]["rounds"]
    assert size < path.stat().st_size < 3 * size  # the isolated one left nothing


def test_a_past_that_can_not_be_used_is_a_users_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"what is this?")
    for name, complaint in (("broken", "no file of past texts"), ("", "can't read")):
        result = run("generate", "Hello", "--drafter", f"suffix:{tmp_path / name}")
        assert result.status == 2
        assert complaint in result.err
    result = run("generate", "Hello", "--max-tokens", "5", "--drafter", f"suffix:{tmp_path / 'broken' / 'below'}")
    assert result.status == 2
    assert "can't" in result.err
