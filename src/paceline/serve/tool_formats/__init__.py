"""The formats in which models write calls, one file each, and which of them a chat template teaches."""

from __future__ import annotations

from paceline.serve.tool_formats.format import ToolFormat
from paceline.serve.tool_formats.harmony import Harmony
from paceline.serve.tool_formats.hermes import Hermes
from paceline.serve.tool_formats.llama3 import Llama3
from paceline.serve.tool_formats.mistral import Mistral, MistralArgs
from paceline.serve.tool_formats.qwen_coder import QwenCoder

FORMATS: dict[str, ToolFormat] = {one.name: one for one in (
    Harmony(), MistralArgs(), Mistral(), QwenCoder(), Llama3(), Hermes())}
"""By name; the first that recognises a template has it, so those whose marks others use too come last."""


def format_of(template: str | None) -> ToolFormat:
    """By what a model's chat template says; Hermes' where it says nothing."""
    return next((one for one in FORMATS.values() if one.recognises(template or "")), FORMATS["hermes"])
