"""Fields: a config.json read key by key, so that one that is set and that nobody read is found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import ModelFormatError

IDLE = frozenset({
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "model_type", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp",
    "tie_word_embeddings", "_name_or_path", "name_or_path", "return_dict", "output_attentions", "output_hidden_states",
    "is_encoder_decoder", "id2label", "label2id", "chunk_size_feed_forward", "_attn_implementation",
    "task_specific_params", "problem_type", "torchscript", "pruned_heads", "unsloth_version", "quantization_config",
    "compression_config",
    "max_window_layers", "use_bfloat16", "tf_legacy_loss", "num_return_sequences", "attn_implementation", "qkv_bias"})
"""Keys that change nothing of what a head computes."""


class Fields:
    """Of one object of a config."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.where} has no {key}; the head cannot be built without it.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFormatError(f"{self.where}: {key} must be a whole number, got {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFormatError(f"{self.where}: {key} must be a finite number, got {value!r}.")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.where}: {key} must be true or false, got {value!r}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(f"{self.where}: {key} must be a text, got {value!r}.")
        return value

    def counts(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None: there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(one, int) and one >= 0 for one in value):
            raise ModelFormatError(f"{self.where}: {key} must be a list of whole numbers, got {value!r}.")
        return tuple(value)

    def part(self, key: str) -> Fields:
        """An object inside; an empty one where there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{self.where}: {key} must be an object, got {value!r}.")
        return Fields(value, f"{self.where}, {key}")

    def done(self, harmless: Iterable[str] = ()) -> None:
        """Every key that is set (to something other than false, null, 0 or nothing) was read, or is harmless."""
        unknown = [key for key, value in self.raw.items()
                   if value and key not in self._read and key not in IDLE and key not in set(harmless)]
        if unknown:
            raise ModelFormatError(
                f"{self.where} sets {', '.join(f'{key} = {self.raw[key]!r}' for key in sorted(unknown)[:4])}, which "
                "this version does not know: the head would draft badly, or not at all, without it. Load another head, "
                "or a newer Paceline.")
