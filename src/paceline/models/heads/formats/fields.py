"""HeadFields: a config.json read key by key, so that one that is set and that nobody read is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.fields import Fields, shown

IDLE = frozenset({
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "model_type", "initializer_range",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp",
    "tie_word_embeddings", "_name_or_path", "name_or_path", "return_dict", "output_attentions", "output_hidden_states",
    "is_encoder_decoder", "id2label", "label2id", "chunk_size_feed_forward", "_attn_implementation",
    "task_specific_params", "problem_type", "torchscript", "pruned_heads", "unsloth_version", "quantization_config",
    "compression_config",
    "max_window_layers", "use_bfloat16", "tf_legacy_loss", "num_return_sequences", "attn_implementation", "qkv_bias"})
"""Keys that change nothing of what a head computes."""


class HeadFields(Fields):
    """Of one object of a head's config."""

    needed_by = "the head"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self.raw = raw
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def part(self, key: str) -> HeadFields:
        """An object inside; an empty one where there is none."""
        return HeadFields(self.mapping(key), f"{self.where}, {key}")

    def done(self, harmless: Iterable[str] = ()) -> None:
        """Every key that is set (to something other than false, null, 0 or nothing) was read, or is harmless."""
        unknown = [key for key, value in self.raw.items()
                   if value and key not in self._read and key not in IDLE and key not in set(harmless)]
        if unknown:
            named = ", ".join(f"{key} = {shown(self.raw[key])}" for key in sorted(unknown)[:4])
            raise ModelFormatError(
                f"{self.where} sets {named}, which this version does not know: the head would draft badly, or not at "
                "all, without it. Load another head, or a newer Paceline.")
