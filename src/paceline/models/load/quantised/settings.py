"""What a quantization_config may say: read with care, refused with a sentence that lists what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.fields import shown

SUPPORTED = ("awq (4 bits, version gemm)", "gptq (4 or 8 bits, checkpoint_format gptq or gptq_v2)",
             "compressed-tensors (int-quantized, float-quantized and pack-quantized weights of 4 or 8 bits, per "
             "tensor, channel or group)", "bitsandbytes (8 bits)", "int8-outliers (written by `paceline quantize`)")


class Settings:
    """A quantization_config by its keys; every fault names the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        return self._raw.get(key, default)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Empty where nothing is said."""
        value = self._raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.refusal(f"{key} {shown(value)}, which is no object")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(f"{key} {shown(value)}, which is no whole number")
        return value

    def one_of(self, key: str, values: Sequence[Any], default: Any = None) -> Any:
        value = self._raw.get(key)
        value = default if value is None else value
        if not any(type(value) is type(one) and value == one for one in values):
            raise self.refusal(f"{key} {shown(value)}")
        return value

    def group_size(self, key: str = "group_size") -> int:
        size = self.number(key, -1)
        if size != -1 and size < 1:
            raise self.refusal(f"{key} {size}")
        return size

    def refusal(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where} has a quantization_config with {what}, which this version does not "
                                f"read. It reads {'; '.join(SUPPORTED)}; and GGUF files.")
