"""What bodies of requests are made of: how fields are read, and how a fault in one is told."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator


def number(**bounds: float) -> Any:
    """An optional number whose bounds are documented here; SamplingParams enforces them and says what to change."""
    return Field(default=None, json_schema_extra=dict(bounds))


Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A client hears of its first mistake only: nobody needs the list of a million others."""


class Body(BaseModel):
    """Unknown fields are refused: a control that is spelled wrongly must not be dropped in silence."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, given: Any) -> Any:
        """What asks for something: all that is known and not null, and the first field that is unknown: one is enough
        to be refused for. A null stands for the default, so it is as if the field were not there."""
        if not isinstance(given, dict):
            return given
        needed = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        asked = {name: value for name, value in given.items() if value is not None or needed.get(name)}
        unknown = next((name for name in asked if name not in needed), None)
        if unknown is None:
            return asked
        return {name: asked[name] for name in asked.keys() & needed.keys()} | {unknown: asked[unknown]}
