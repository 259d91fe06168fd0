"""Where prompts come from: the command line, standard input, a file of JSON lines. Read whole before a model is."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.errors import OptionError, RequestError
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

Messages = Sequence[Mapping[str, Any]]
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} - {"logits_processors"}


class Template(NamedTuple):
    """How a prompt becomes tokens."""

    raw: bool
    system: str | None
    args: Mapping[str, Any]

    def encode(self, llm: "LLM", prompt: str | Messages) -> tuple[int, ...]:
        """Raises RequestError."""
        if self.system is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if messages[0]["role"] != "system":
                prompt = [{"role": "system", "content": self.system}, *messages]
        return llm.encode(prompt, raw=self.raw, template_args=self.args)


class Asked(NamedTuple):
    """One line of a file of prompts."""

    where: str  # begins the message of an error
    id: Any  # as given; None: not given
    prompt: str | Messages
    params: SamplingParams


def read_prompt(prompt: str | None) -> str:
    """Return the prompt, from standard input where none is given or it is "-". Raises OptionError."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise OptionError(
            'no prompt; expected one, as in forerun generate "Why is the sky blue?", or one piped in, or --prompts'
        )
    text = _decode(sys.stdin.buffer.read(), "standard input")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise OptionError("standard input is empty; expected a prompt")
    return text


def read_requests(name: str, params: SamplingParams, *, raw: bool) -> list[Asked]:
    """Return the requests in a file of JSON lines, "-" being standard input; `params` hold where a line says nothing.

    Raises OptionError, naming the line.
    """
    source = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise OptionError(f"{name}: can't be read ({error.strerror}); expected a file of JSON lines") from error
    lines = enumerate(_decode(data, source).split("\n"), start=1)
    requests = [_parse(line, f"{source}, line {number}", params, raw) for number, line in lines if line.strip()]
    if not requests:
        raise OptionError(f'{source}: no prompts in it; expected one JSON object a line, like {{"prompt": "…"}}')
    return requests


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{source}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _parse(line: str, where: str, params: SamplingParams, raw: bool) -> Asked:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f'{where}: not JSON ({error}); expected an object like {{"prompt": "…"}}') from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise OptionError(f'{where}: expected an object with either "prompt" or "messages"')
    unknown = sorted(record.keys() - _SAMPLING_FIELDS - {"id", "prompt", "messages"})
    if unknown:
        known = ", ".join(sorted(_SAMPLING_FIELDS))
        raise OptionError(f'{where}: unknown field "{unknown[0]}"; expected id, prompt, messages or one of {known}')
    if raw and "messages" in record:
        raise OptionError(f'{where}: "messages" need the chat template, which --raw leaves out; give a "prompt"')
    prompt = record["messages"] if "messages" in record else record["prompt"]
    if "prompt" in record and not isinstance(prompt, str):
        raise OptionError(f'{where}: "prompt" is not a string')
    if "messages" in record and not _are_messages(prompt):
        raise OptionError(f'{where}: "messages" is not a list of objects with "role" and "content"')
    own = {name: value for name, value in record.items() if name in _SAMPLING_FIELDS}
    return Asked(where, record.get("id"), prompt, _own_params(params, own, where))


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item for item in value)
    )


def _own_params(params: SamplingParams, own: dict[str, Any], where: str) -> SamplingParams:
    try:
        if "logit_bias" in own:
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
        return dataclasses.replace(params, **own)
    except RequestError as error:
        raise OptionError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(f"{where}: a sampling field is of the wrong kind: {error}") from error
