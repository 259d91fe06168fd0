"""The prompts that `forerun bench` measures on: ours, in the package, or a file of the user's.

The packaged file holds 24 plain user turns, four of each kind, 15 to 283 tokens with the tokenizer of SmolLM2. It was
written before anything was measured and stays as it is: numbers taken on different prompts can't be compared.

What this module does *not* know: models, chat templates, tokens.
"""

import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from forerun.errors import OptionError

KINDS = ("chat", "summary", "code", "translation", "arithmetic", "passage")  # of the packaged prompts, in file order


class Prompt(NamedTuple):
    """One user turn."""

    id: str  # unique in its workload
    kind: str  # results are pooled by kind
    prompt: str


def load_workload(path: Path | None = None) -> list[Prompt]:
    """Return the packaged prompts, or those of the file at `path`, in file order.

    A `.jsonl` file has one object a line: "prompt", and if wanted "id" and "kind" (other keys are ignored). Any other
    file is plain text with one prompt a line. Empty lines are skipped; by default the id is "line-N", the kind "user".

    Raises OptionError, naming file and line, for what can't be read that way, for an id given twice and for a file
    without prompts.
    """
    source = resources.files("forerun.bench").joinpath("workload.jsonl") if path is None else path
    try:
        text = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionError(f"{source}: can't be read ({error.strerror}); expected a file of prompts") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{source}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error

    is_jsonl = source.name.lower().endswith(".jsonl")
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand inside a prompt
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        prompt = _parse(line, number, where) if is_jsonl else Prompt(f"line-{number}", "user", line.strip())
        if prompt.id in line_of_id:
            raise OptionError(f'{where}: id "{prompt.id}" is that of line {line_of_id[prompt.id]}; give each its own')
        line_of_id[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise OptionError(f"{source}: no prompts in it; expected one a line")
    return prompts


def _parse(line: str, number: int, where: str) -> Prompt:
    """Return the prompt of one line of JSONL; `where` begins the message of an error."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise OptionError(f'{where}: not JSON ({reason}); expected an object like {{"prompt": "…"}}') from error
    if not isinstance(record, dict):
        raise OptionError(f'{where}: got {_shown(record)}; expected an object like {{"prompt": "…"}}')
    if "prompt" not in record:
        raise OptionError(f'{where}: no "prompt" in it; expected an object like {{"prompt": "…"}}')
    values = {"id": f"line-{number}", "kind": "user"} | record
    for key in Prompt._fields:
        if not isinstance(values[key], str) or not values[key].strip():
            raise OptionError(f'{where}: "{key}" is {_shown(values[key])}; expected a string that is not empty')
    return Prompt(values["id"], values["kind"], values["prompt"])


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"
