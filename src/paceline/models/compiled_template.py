"""A chat template compiled: what Hugging Face's templates rely on beyond Jinja, and every fault a RequestError."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext

from paceline.errors import RequestError
from paceline.models.bounded_templates import BoundedEnvironment, LimitError, Limits

LONGEST_SOURCE = 1 << 20
_LONGEST_PATTERN = 200
_LONGEST_SAID = 500
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class CompiledTemplate:
    """Safe to share between threads."""

    def __init__(self, source: str, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._environment = _environment()
        try:
            if len(source) > LONGEST_SOURCE:
                raise LimitError(f"it has more than {LONGEST_SOURCE:,} characters")
            with self._environment.spending(self._limits):  # what is constant is computed now
                self._template = self._environment.compiled(source)
        except (jinja2.TemplateError, SyntaxError, *_FAULTS) as error:
            raise RequestError(f"The model's chat template is broken ({_said(error)}): pass a prompt to generate "
                               "instead, or repair the template.", "messages") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            with self._environment.spending(self._limits):
                return self._template.render(variables)
        except LimitError as error:
            raise RequestError(f"The model's chat template does not come to an end with these messages: {error}. Give "
                               "fewer or shorter ones, or repair the template.", "messages") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"The model's chat template refuses these messages: {_said(error)}. Check their order "
                               "and roles.", "messages") from error
        except _FAULTS as error:
            raise RequestError(f"The model's chat template cannot render these messages ({_said(error)}): give each "
                               "message a 'role' and a text 'content'.", "messages") from error


def _said(error: BaseException) -> str:
    return str(error)[:_LONGEST_SAID]


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that jinja2 asks for

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> BoundedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        # jinja2's own filter escapes for HTML, which no model was trained on.
        if isinstance(indent, int):
            environment.spent.room(1000 * indent)
        environment.spent.weight(value)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return environment.concat(encoder.iterencode(value))

    def strftime_now(pattern: str) -> str:
        if len(pattern) > _LONGEST_PATTERN:
            raise LimitError(f"it asks for the time in more than {_LONGEST_PATTERN} characters")
        return datetime.datetime.now().strftime(pattern)

    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                     extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.bound()
    return environment
