"""int8 with the largest value of each row: bitsandbytes' files, and those with outlier columns in floats."""

from __future__ import annotations

import math

import torch

from paceline.errors import ModelFormatError
from paceline.models.load.quantised.codes import Codes, Outliers
from paceline.models.load.quantised.parts import Parts
from paceline.models.load.quantised.settings import Settings

OUTLIER_COLUMNS = "outlier_columns"


class BitsAndBytes:
    """Scheme: `weight` int8 [out, in] and SCB float32 [out], the row's largest absolute value: code 127 stands for
    it. Which columns are outliers is decided by what is multiplied, so the file does not say."""

    parts = ("SCB", "weight", "weight_format")
    stored_as = "Q8_0"

    def __init__(self, settings: Settings) -> None:
        if not settings.get("load_in_8bit") or settings.get("load_in_4bit"):
            raise settings.refusal("quant_method 'bitsandbytes' in 4 bits")

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        rows, columns = parts.shape(module, "weight")
        return rows, columns

    def read(self, parts: Parts, module: str) -> Codes:
        shape = self.shape(parts, module)
        if parts.has(module, "weight_format") and bool(parts.folder.stored(f"{module}.weight_format").any()):
            raise ModelFormatError(f"tensor '{module}.weight' in {parts.folder.path} is laid out for one kind of card "
                                   "(weight_format); this version reads plain rows.")
        largest = parts.take(module, "SCB", (shape[0],), ("F32", "F16"))
        return Codes(parts.take(module, "weight", shape, ("I8",)), largest.to(torch.float32)[:, None] / 127)


class OutlierColumns:
    """Scheme: `weight` int8 [out, in] and weight_scale [out, 1]; the columns outlier_columns [n] are kept in
    outlier_weight [out, n] instead (LLM.int8's decomposition, with columns chosen beforehand)."""

    parts = ("weight_scale", "weight", OUTLIER_COLUMNS, "outlier_weight")
    stored_as = "Q8_0"

    def __init__(self, settings: Settings) -> None:
        settings.one_of("bits", (8,))

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        rows, columns = parts.shape(module, "weight")
        return rows, columns

    def read(self, parts: Parts, module: str) -> Codes:
        rows, columns = self.shape(parts, module)
        codes = parts.take(module, "weight", (rows, columns), ("I8",))
        scales = parts.take(module, "weight_scale", (rows, 1), ("F32", "F16", "BF16"))
        if not parts.has(module, OUTLIER_COLUMNS):
            return Codes(codes, scales)
        count = math.prod(parts.folder.shape(f"{module}.{OUTLIER_COLUMNS}"))
        chosen = parts.take(module, OUTLIER_COLUMNS, (count,), ("I64", "I32")).to(torch.int64)
        if bool(((chosen < 0) | (chosen >= columns)).any()) or bool((chosen.diff() <= 0).any()):
            raise ModelFormatError(f"tensor '{module}.outlier_columns' in {parts.folder.path} names columns that are "
                                   f"not among the {columns}, or not in order: the file is broken.")
        values = parts.take(module, "outlier_weight", (rows, len(chosen)), ("F32", "F16", "BF16"))
        return Codes(codes, scales, outliers=Outliers(chosen, values))
