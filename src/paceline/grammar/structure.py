"""Structure: what a request asks its text to be, as one canonical text that can be compiled, and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import GrammarError
from paceline.grammar.endless import check, embedded
from paceline.grammar.schemas import prepared
from paceline.request import SamplingParams

LONGEST = 512 * 1024
"""Characters of a structure's text, at most."""


@dataclass(frozen=True, slots=True)
class Structure:
    field: str
    """The parameter it was given in (request.STRUCTURES); errors name it."""
    text: str
    """A JSON schema as JSON, a regular expression, a grammar, or the choices as a JSON list."""
    after: str = ""
    """What may come before it, in Lark's notation."""


def structure_of(params: SamplingParams) -> Structure | None:
    """What `params` ask for; None: any text will do. Raises a GrammarError for what is no structure at all."""
    field = params.structure
    if field is None:
        return None
    text = _schema(params.json_schema, params.strict_schema) if field == "json_schema" else _text(
        field, getattr(params, field))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{field} holds half a character (a lone surrogate); repair it.", field) from None
    if len(text) > LONGEST:
        raise GrammarError(f"{field} has {len(text)} characters and {LONGEST} are the limit: make it smaller.", field)
    for schema in embedded(text) if field == "grammar" else ():
        check(schema, field)
    return Structure(field, text, params.structure_after or "")


def _text(field: str, value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if field == "choice" else str(value)


def _schema(value: Any, strict: bool) -> str:
    """The order of an object's properties is the order in which they are generated, so it is kept."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if value is True:
            value = {}
        if value is False:
            raise GrammarError("json_schema is false, which no text matches; leave it out or describe one.",
                               "json_schema")
        if not isinstance(value, Mapping):
            raise GrammarError(f"json_schema must hold an object or a boolean, got {type(value).__name__}.",
                               "json_schema")
        value = prepared(value, strict)
        check(value, "json_schema")
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"),
                          default=_mapping)
    except (ValueError, TypeError, RecursionError) as problem:
        if isinstance(problem, GrammarError):
            raise
        if isinstance(problem, RecursionError):
            problem = ValueError("it is nested too deeply")
        raise GrammarError(f"json_schema is not JSON ({problem}); correct it.", "json_schema") from None


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
