"""`forerun generate --prompts`: one JSON line in, one out; a bad line stops all before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.llm import LLM
from tests.cli.conftest import Run
from tests.cli.toy import SlowSession


def write(folder: Path, *lines: str | dict[str, Any]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_answers_come_in_order_and_are_those_of_each_prompt_alone(
    run: Run, session: SlowSession, tmp_path: Path
) -> None:
    path = write(
        tmp_path,
        {"prompt": "Hello", "id": "first", "max_tokens": 60},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "id": 7, "max_tokens": 3},
        {"prompt": "Hello", "k": 0, "verify": "token", "stop": ["a", "e"], "logprobs": 1},
    )
    result = run("generate", "--prompts", path, "--max-tokens", "30")
    assert result.status == 0
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert [answer.get("id") for answer in answers] == ["first", 7, None]
    assert [answer["usage"]["completion_tokens"] for answer in answers[:2]] == [60, 3]
    assert answers[0]["text"] + "\n" == run("generate", "Hello", "--max-tokens", "60").out
    assert answers[1]["text"] + "\n" == run("generate", "Hi", "--max-tokens", "3").out
    assert answers[2]["speculation"]["proposed"] == 0
    assert not set("ae") & set(answers[2]["text"])
    assert answers[2]["logprobs"]
    assert [answer["speculation"]["verify"] for answer in answers] == ["block", "block", "token"]
    assert "3 answers" in result.err


def test_many_prompts_share_their_passes(run: Run, session: SlowSession, tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"Say {i}"} for i in range(20)))
    passes = 0
    extend = session.extend

    def count(*args: Any, **settings: Any) -> Any:
        nonlocal passes
        passes += 1
        return extend(*args, **settings)

    session.extend = count  # type: ignore[method-assign]
    result = run("generate", "--prompts", path, "--max-tokens", "10", "--drafter", "none")
    assert len(result.out.splitlines()) == 20
    assert passes < 30


def test_prompts_come_from_a_pipe_and_a_system_message_goes_to_those_without(run: Run, session: SlowSession) -> None:
    lines = [
        {"prompt": "Hello"},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello"}]},
    ]
    data = "\ufeff" + "\r\n".join(map(json.dumps, lines))
    result = run("generate", "--prompts", "-", "--system", "Be brief", "--max-tokens", "2", stdin=data)
    counts = [json.loads(line)["usage"]["prompt_tokens"] for line in result.out.splitlines()]
    assert counts == [42, 42, 35]


def test_each_line_that_draws_has_a_seed_that_gives_it_again(run: Run, session: SlowSession, tmp_path: Path) -> None:
    path = write(
        tmp_path, *[{"prompt": "Hello"}] * 3, {"prompt": "Hello", "seed": 5}, {"prompt": "x", "temperature": 0}
    )
    result = run("generate", "--prompts", path, "--temperature", "1", "--ignore-eos", "--max-tokens", "30")
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert len({answer["text"] for answer in answers}) == 5
    assert answers[3]["seed"] == 5
    assert "seed" not in answers[4]
    for answer in answers[:4]:
        args = ("--temperature", "1", "--ignore-eos", "--max-tokens", "30", "--seed", str(answer["seed"]))
        assert run("generate", "Hello", *args).out == answer["text"] + "\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("Why?", "not JSON"),
        ('{"prompt": "cut o', "not JSON"),
        ("[1]", 'either "prompt" or "messages"'),
        ('{"id": 3}', 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": 5}', '"prompt" is not a string'),
        ('{"messages": []}', '"messages" is not'),
        ('{"messages": [{"role": "user"}]}', '"messages" is not'),
        ('{"prompt": "a", "temprature": 1}', 'unknown field "temprature"'),
        ('{"prompt": "a", "logits_processors": []}', "unknown field"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "top_p": "high"}', "top_p is 'high'"),
        ('{"prompt": "a", "logit_bias": 5}', "wrong kind"),
        ('{"prompt": "a", "logit_bias": {"x": 5}}', "wrong kind"),
        ('{"prompt": "a", "logit_bias": {"999": 5}}', "token id 999"),
        (json.dumps({"prompt": "long " * 1000}), "the context holds 2048"),
    ],
)
def test_a_bad_line_is_named_and_nothing_runs(
    run: Run, session: SlowSession, tmp_path: Path, line: str, complaint: str
) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", line, {"prompt": "fine"})
    result = run("generate", "--prompts", path, "--k", "4")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"forerun: error: {path}, line 3: ")
    assert complaint in result.err
    assert len(result.err.splitlines()) == 1
    assert session.num_rows == 0


def test_files_that_hold_no_prompts_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ok\xff")
    for name, complaint in (
        (write(tmp_path, "", " "), "no prompts in it"),
        (str(tmp_path / "none"), "can't be read"),
        (str(tmp_path), "can't be read"),
        (str(tmp_path / "bytes"), "not UTF-8"),
    ):
        result = run("generate", "--prompts", name)
        assert (result.status, len(result.err.splitlines())) == (2, 1)
        assert complaint in result.err


def test_an_answer_that_fails_is_reported_in_its_place(
    run: Run, session: SlowSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_tokens: Any, _logits: Any) -> Any:
        raise ValueError("boom")

    submit = LLM.submit

    def submit_one_broken(self: LLM, ids: Any, params: Any, **settings: Any) -> Any:
        from dataclasses import replace

        return submit(
            self, ids, replace(params, logits_processors=(broken,)) if params.seed == 9 else params, **settings
        )

    monkeypatch.setattr(LLM, "submit", submit_one_broken)
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b", "seed": 9}, {"prompt": "c"})
    result = run("generate", "--prompts", path, "--max-tokens", "5")
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length"]
    assert "boom" in answers[1]["error"]
    assert result.status == 1
    assert "1 of 3 answers failed, the first that of" in result.err.splitlines()[-1]
