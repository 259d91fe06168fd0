"""Rendering the chat templates that models bring with them, in jinja2's sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forerun.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return the prompt that `template` makes of `messages`; `variables` are the other names that it may use.

    Raises RequestError when the template refuses the messages or fails on them.
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(messages=list(messages), **variables)
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error.message}") from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise RequestError(f"the model's chat template fails on these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> "Template":
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks the assistant's text for trainers; here it is plain text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's own filter but without HTML escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
