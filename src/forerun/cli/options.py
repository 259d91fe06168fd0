"""The options that commands share, as dataclasses: one field, one option. Defaults are those of the settings."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from forerun.config import BACKENDS, DTYPES, Config
from forerun.errors import OptionError
from forerun.types import VERIFY_RULES, SamplingParams

_CONFIG = Config(target="")
_PARAMS = SamplingParams()
# the kinds that are there, without importing them
DRAFTER_USAGE = (
    "auto, none, ngram, suffix[:isolated|FILE], recycle, lm:MODEL, layerskip:N, quant:q4, cascade:lm:MODEL+ngram, "
    "mix:A+B"
)
MODEL, SAMPLING, PROMPT, OUTPUT = "Model", "Sampling", "Prompt", "Output"


def option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    """Return an option under the heading `panel` of the help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


@dataclass(frozen=True)
class ModelOptions:
    """What to run, and on what."""

    target: Annotated[
        str,
        option(MODEL, "Alias, Hugging Face folder, GGUF file, hub id.", metavar="MODEL", envvar="FORERUN_TARGET"),
    ] = "smollm2-135m"
    drafter: Annotated[str, option(MODEL, f"Who guesses: {DRAFTER_USAGE}.", metavar="NAME")] = _CONFIG.drafter
    k: Annotated[str, option(MODEL, "Drafts a round.", metavar="auto|N")] = str(_CONFIG.k)
    verify: Annotated[str, option(MODEL, "The rule of verification.", metavar="|".join(VERIFY_RULES))] = _CONFIG.verify
    dtype: Annotated[str, option(MODEL, "What weights are kept in.", metavar="|".join(DTYPES))] = _CONFIG.dtype
    device: Annotated[str, option(MODEL, "Where to run.", metavar="auto|cpu|cuda")] = _CONFIG.device
    backend: Annotated[
        str, option(MODEL, "What computes: our kernels for CPUs, or torch.", metavar="|".join(BACKENDS))
    ] = _CONFIG.backend
    drafter_device: Annotated[
        str | None, option(MODEL, "Where a draft model runs, if not where the target does.", metavar="cpu|cuda")
    ] = _CONFIG.drafter_device
    threads: Annotated[
        int | None, option(MODEL, "Threads on a CPU (default: the cores that are there).", metavar="N")
    ] = _CONFIG.threads
    cache_dir: Annotated[
        Path | None, option(MODEL, "Where models are kept.", metavar="DIR", envvar="FORERUN_CACHE")
    ] = _CONFIG.cache_dir
    offline: Annotated[bool, option(MODEL, "Fetch nothing.", "--offline")] = _CONFIG.offline

    def config(self) -> Config:
        """Raises OptionError."""
        settings: dict[str, Any] = dataclasses.asdict(self)
        settings["k"] = int(self.k) if self.k.isdecimal() else self.k
        settings["cache_dir"] = self.cache_dir.expanduser() if self.cache_dir else None
        return Config(**settings)


@dataclass(frozen=True)
class SamplingOptions:
    """The law of the next token, and when to stop."""

    max_tokens: Annotated[int, option(SAMPLING, "The most tokens to write.", metavar="N")] = 256
    min_tokens: Annotated[int, option(SAMPLING, "No end before so many tokens.", metavar="N")] = _PARAMS.min_tokens
    temperature: Annotated[float, option(SAMPLING, "0 is greedy.", metavar="X")] = _PARAMS.temperature
    top_k: Annotated[int, option(SAMPLING, "Keep the N most likely tokens; 0 is off.", metavar="N")] = _PARAMS.top_k
    top_p: Annotated[float, option(SAMPLING, "Keep the most likely tokens of so much mass; 1 is off.", metavar="X")] = (
        _PARAMS.top_p
    )
    min_p: Annotated[
        float, option(SAMPLING, "Keep tokens of so much of the likeliest one's mass; 0 is off.", metavar="X")
    ] = _PARAMS.min_p
    repetition_penalty: Annotated[
        float, option(SAMPLING, "On tokens of prompt and answer, a factor; 1 is off.", metavar="X")
    ] = _PARAMS.repetition_penalty
    presence_penalty: Annotated[float, option(SAMPLING, "On tokens of the answer, once; 0 is off.", metavar="X")] = (
        _PARAMS.presence_penalty
    )
    frequency_penalty: Annotated[
        float, option(SAMPLING, "On tokens of the answer, for each time; 0 is off.", metavar="X")
    ] = _PARAMS.frequency_penalty
    logit_bias: Annotated[
        list[str] | None,
        option(SAMPLING, "Added to a token's logit, -inf forbids it; repeat it, or give JSON.", metavar="ID=BIAS"),
    ] = None
    stop: Annotated[
        list[str] | None, option(SAMPLING, "End the text before this; repeat it for more.", metavar="TEXT")
    ] = None
    seed: Annotated[int | None, option(SAMPLING, "Default: a fresh one, which is shown.", metavar="N")] = _PARAMS.seed
    ignore_eos: Annotated[bool, option(SAMPLING, "Write on after an end token.", "--ignore-eos")] = _PARAMS.ignore_eos
    isolated: Annotated[
        bool, option(SAMPLING, "Drafts learn nothing from this text for others, nor from others for it.", "--isolated")
    ] = _PARAMS.isolated

    def params(self, **more: Any) -> SamplingParams:
        """Raises RequestError or OptionError; `more` are further fields of SamplingParams."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["stop"] = tuple(self.stop or ())
        given["logit_bias"] = _parse_biases(self.logit_bias or [])
        return SamplingParams(**given, **more)


@dataclass(frozen=True)
class TemplateOptions:
    """What goes around a prompt."""

    system: Annotated[str | None, option(PROMPT, "A system message.", metavar="TEXT")] = None
    template_arg: Annotated[
        list[str] | None,
        option(PROMPT, "For the chat template; VALUE may be JSON. Repeat it for more.", metavar="KEY=VALUE"),
    ] = None

    def template_args(self) -> dict[str, Any]:
        """Raises OptionError."""
        result: dict[str, Any] = {}
        for item in self.template_arg or []:
            key, equals, value = item.partition("=")
            if not (equals and key.isidentifier()) or key in ("messages", "tools", "add_generation_prompt"):
                raise OptionError(f"--template-arg is {item!r}; expected KEY=VALUE, such as enable_thinking=false")
            try:
                result[key] = json.loads(value)
            except ValueError:
                result[key] = value
        return result


@dataclass(frozen=True)
class ShowOptions:
    """How an answer is shown."""

    color: Annotated[str, option(OUTPUT, "Colour text by the origin of its tokens.", metavar="auto|always|never")] = (
        "auto"
    )
    stats: Annotated[bool, option(OUTPUT, "Show more statistics, on stderr.", "--stats")] = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see an option for each field of the option dataclasses among a command's parameters."""
    flat: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = parameter.annotation
        if dataclasses.is_dataclass(group):
            assert isinstance(group, type)
            groups[name] = group
            hints = get_type_hints(group, include_extras=True)
            flat += [
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
                )
                for field in dataclasses.fields(group)
            ]
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def fix_seed(params: SamplingParams) -> SamplingParams:
    """Give a request that draws a seed that can be shown and used again."""
    if params.temperature == 0 or params.seed is not None:
        return params
    import secrets

    return replace(params, seed=secrets.randbits(32))


def _parse_biases(items: list[str]) -> dict[int, float]:
    result: dict[int, float] = {}
    for item in items:
        try:
            if item.lstrip().startswith("{"):
                result.update({int(token): float(bias) for token, bias in json.loads(item).items()})
            else:
                token, _, bias = item.partition("=")
                result[int(token)] = float(bias)
        except (ValueError, TypeError) as error:
            raise OptionError(f'--logit-bias is {item!r}; expected ID=BIAS or JSON like {{"42": -5}}') from error
    return result
