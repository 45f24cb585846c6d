"""Paceline: LLM inference with speculative decoding as the first-class citizen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.request import SamplingParams

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM
    from paceline.speculation.spec import Speculation

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "PacelineError", "SamplingParams", "Speculation", "__version__"]


def __getattr__(name: str) -> Any:
    """The engine brings torch in; the command line's --help and the scheduler should not wait for that."""
    if name == "LLM":
        from paceline.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from paceline.async_llm import AsyncLLM

        return AsyncLLM
    if name == "Speculation":
        from paceline.speculation.spec import Speculation

        return Speculation
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
