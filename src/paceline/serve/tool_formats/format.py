"""ToolFormat: how a family of models writes calls of functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.serve.tool_formats.events import AnswerParser

if TYPE_CHECKING:
    from paceline.serve.tool_formats.lark import Lark

Tools = Mapping[str, Mapping[str, Any]]
"""Functions' names and the schemas of their arguments."""


class ToolFormat(ABC):
    """One of each is enough: it keeps nothing."""

    name: str
    """What operators call it."""
    tags: tuple[str, ...] = ()
    """Those that are special tokens in the vocabularies of its models: the text has to show them."""
    channels = False
    """Whether an answer without calls has to be read by it as well."""

    @abstractmethod
    def recognises(self, template: str) -> bool:
        """Whether models with this chat template were taught it."""

    @abstractmethod
    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        """For one answer. Only calls of `tools` are calls, and all beyond `most` are dropped."""

    @abstractmethod
    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        """What has a model call one of `tools`, and more if it likes, up to `most` (1, or None: any number)."""
