"""Tools, and which of them an answer may or must call, as bodies of requests have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from paceline.serve.body import Body, ListOf


class Function(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    grammar: dict[str, Any] | None = None


class Custom(Body):
    """A tool that takes a text as it is."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Body):
    type: Literal["custom"]
    custom: Custom


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(Body):
    type: Literal["custom"]
    custom: NamedFunction


def _kind(given: Any) -> Any:
    """By which a body's faults are those of the kind that was meant, not of all that it is not."""
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", "a word")


def _of(**kinds: str) -> Discriminator:
    """type -> tag. Tags are names of classes: paths of faults leave those out."""
    named = ", ".join(repr(kind) for kind in kinds)
    return Discriminator(lambda given: kinds.get(str(_kind(given))), custom_error_type="unknown_type",
                         custom_error_message=f"type should be one of {named}")


AnyTool = Annotated[Annotated[Tool, Tag("Tool")] | Annotated[CustomTool, Tag("CustomTool")],
                    _of(function="Tool", custom="CustomTool")]
AnyNamed = Annotated[Annotated[NamedTool, Tag("NamedTool")] | Annotated[NamedCustomTool, Tag("NamedCustomTool")],
                     _of(function="NamedTool", custom="NamedCustomTool")]


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: ListOf[AnyNamed]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")] | Annotated[NamedTool, Tag("NamedTool")]
    | Annotated[NamedCustomTool, Tag("NamedCustomTool")] | Annotated[AllowedTools, Tag("AllowedTools")],
    _of(**{"function": "NamedTool", "custom": "NamedCustomTool", "allowed_tools": "AllowedTools", "a word": "Word"})]


def name_of(tool: Tool | CustomTool | NamedTool | NamedCustomTool) -> str:
    return tool.custom.name if isinstance(tool, CustomTool | NamedCustomTool) else tool.function.name
