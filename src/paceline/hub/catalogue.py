"""The catalogue: short names of models that are worth trying, and where the hub has them as GGUF files.

Only architectures that Paceline runs are here (docs/models.md). A short name stands for `owner/name:QUANT`, no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.hub.default_model import DEFAULT_MODEL

DEFAULT_FAMILY = "smollm2"
"""Of the default model, which comes through pip and has no entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One short name."""

    name: str
    family: str
    """Those of a family share a tokenizer, so that a small one can draft for a large one."""
    repo: str
    bytes: int
    """Of the file, about: what a download will take."""
    quant: str = "Q4_K_M"


def _entries(*found: Entry) -> dict[str, Entry]:
    return {entry.name: entry for entry in found}


CATALOGUE = _entries(
    Entry("smollm2-360m", "smollm2", "bartowski/SmolLM2-360M-Instruct-GGUF", 271_000_000),
    Entry("smollm2-1.7b", "smollm2", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", 1_060_000_000),
    Entry("qwen3-0.6b", "qwen3", "unsloth/Qwen3-0.6B-GGUF", 397_000_000),
    Entry("qwen3-1.7b", "qwen3", "unsloth/Qwen3-1.7B-GGUF", 1_110_000_000),
    Entry("qwen3-4b", "qwen3", "Qwen/Qwen3-4B-GGUF", 2_500_000_000),
    Entry("qwen3-8b", "qwen3", "Qwen/Qwen3-8B-GGUF", 5_030_000_000),
    Entry("qwen2.5-0.5b", "qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", 491_000_000),
    Entry("qwen2.5-1.5b", "qwen2.5", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", 1_120_000_000),
    Entry("llama-3.2-1b", "llama-3", "bartowski/Llama-3.2-1B-Instruct-GGUF", 808_000_000),
    Entry("llama-3.2-3b", "llama-3", "bartowski/Llama-3.2-3B-Instruct-GGUF", 2_020_000_000),
    Entry("llama-3.1-8b", "llama-3", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", 4_920_000_000),
    Entry("gemma-3-1b", "gemma-3", "ggml-org/gemma-3-1b-it-GGUF", 806_000_000),
    Entry("gemma-3-4b", "gemma-3", "ggml-org/gemma-3-4b-it-GGUF", 2_490_000_000),
    Entry("phi-4-mini", "phi-4", "unsloth/Phi-4-mini-instruct-GGUF", 2_490_000_000),
    Entry("mistral-7b", "mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", 4_370_000_000),
    Entry("olmo-2-1b", "olmo-2", "allenai/OLMo-2-0425-1B-Instruct-GGUF", 936_000_000),
)

SUGGESTED = ("qwen3-1.7b", "qwen3-0.6b", "smollm2-360m")
"""What a chat with the default model may suggest instead: the first that is small beside the free memory."""


def suggestion(free_memory: int) -> Entry | None:
    """A better model than the default one for a machine with so much memory to spare."""
    return next((CATALOGUE[name] for name in SUGGESTED if 4 * CATALOGUE[name].bytes <= free_memory), None)


def smaller_relatives(name: str) -> list[str]:
    """Models that spell as this one does and are smaller: they can draft for it."""
    entry = CATALOGUE.get(name)
    if entry is None:
        return []
    first = [DEFAULT_MODEL] if entry.family == DEFAULT_FAMILY else []
    return first + [other.name for other in CATALOGUE.values()
                    if other.family == entry.family and other.bytes < entry.bytes]
