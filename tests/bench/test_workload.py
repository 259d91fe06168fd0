"""The workload: the packaged prompts are frozen, and a user's file is read or refused by line."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from forerun.bench.workload import KINDS, Prompt, load_workload
from forerun.errors import OptionError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_the_packaged_workload_has_four_prompts_of_each_kind_in_order() -> None:
    assert [(p.id, p.kind) for p in load_workload()] == [(f"{kind}-{n}", kind) for kind in KINDS for n in range(1, 5)]


def test_the_packaged_prompts_are_plain_user_turns_that_differ() -> None:
    prompts = [p.prompt for p in load_workload()]
    assert Counter(prompts).most_common(1)[0][1] == 1
    for prompt in prompts:
        assert prompt == prompt.strip()
        assert len(prompt) < 1300  # characters; at most 283 tokens with the tokenizer of SmolLM2
        assert "<|" not in prompt  # no special token of a chat template


def test_the_packaged_workload_never_changes_once_it_has_been_measured() -> None:
    digest = hashlib.sha256(json.dumps(load_workload(), ensure_ascii=True).encode()).hexdigest()
    assert digest == "0f694777acdf21b80fdd72e486154464952481300e05a8776f4ec5f22eae1264"


def test_a_jsonl_file_needs_only_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine.jsonl",
        '{"prompt": "one\\ntwo"}\n\n{"id": "b", "prompt": " x ", "topic": 7}\n{"kind": "law", "prompt": "naïve"}',
    )
    assert load_workload(path) == [
        Prompt("line-1", "user", "one\ntwo"),
        Prompt("b", "user", " x "),
        Prompt("line-4", "law", "naïve"),
    ]


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.txt", 'Why?\n\n  {"prompt": "not JSON here"}  \n')
    assert load_workload(path) == [
        Prompt("line-1", "user", "Why?"),
        Prompt("line-3", "user", '{"prompt": "not JSON here"}'),
    ]


@pytest.mark.parametrize("name", ["mine.txt", "mine.JSONL"])
def test_a_file_from_windows_reads_like_any_other(tmp_path: Path, name: str) -> None:
    lines = ["Why?", "How?"] if name.endswith("txt") else ['{"prompt": "Why?"}', '{"prompt": "How?"}']
    path = write(tmp_path, name, "\ufeff" + "\r\n".join(lines) + "\r\n")
    assert [p.prompt for p in load_workload(path)] == ["Why?", "How?"]


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.jsonl", '{"prompt": "a\u2028b"}')
    assert load_workload(path) == [Prompt("line-1", "user", "a\u2028b")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "cut o', r"not JSON \(Unterminated string starting at, column 12\)"),
        ("Why?", r"not JSON \(Expecting value, column 1\)"),
        pytest.param("[" * 100_000, "not JSON", id="nested too deep"),
        ('["Why?"]', r'got \["Why\?"\]'),
        ('{"text": "Why?"}', 'no "prompt"'),
        ('{"prompt": null}', '"prompt" is null'),
        ('{"prompt": " "}', '"prompt" is " "'),
        ('{"prompt": ' + json.dumps(["long"] * 50) + "}", '"prompt" is .{39}…;'),
        ('{"prompt": "Why?", "id": 3}', '"id" is 3'),
        ('{"prompt": "Why?", "kind": ""}', '"kind" is ""'),
        ('{"prompt": "Why?", "id": "a"}', 'id "a" is that of line 1'),
    ],
)
def test_a_bad_line_is_named_with_its_file_in_one_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, "mine.jsonl", '{"id": "a", "prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(OptionError, match=f"mine.jsonl, line 3: .*{complaint}") as caught:
        load_workload(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_an_empty_file_and_bytes_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"ok\xff\xfe")
    with pytest.raises(OptionError, match=r"binary\.txt: not UTF-8 text \(byte 2\)"):
        load_workload(tmp_path / "binary.txt")
    with pytest.raises(OptionError, match=r"none\.jsonl: can't be read"):
        load_workload(tmp_path / "none.jsonl")
    with pytest.raises(OptionError, match="can't be read"):
        load_workload(tmp_path)
    with pytest.raises(OptionError, match=r"empty\.txt: no prompts"):
        load_workload(write(tmp_path, "empty.txt", "\n \n"))
