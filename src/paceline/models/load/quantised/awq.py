"""AWQ's "gemm" layout: 4-bit codes of eight outputs in an int32, interleaved."""

from __future__ import annotations

import torch

from paceline.models.load.quantised.codes import Codes, pack_low_first, unpack_low_first
from paceline.models.load.quantised.parts import Parts
from paceline.models.load.quantised.settings import Settings

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The i-th lowest four bits of an int32 hold output ORDER[i] of its eight."""
PER_WORD = 8


class AWQ:
    """Scheme: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]."""

    parts = ("qweight", "qzeros", "scales")
    stored_as = "Q4_1"

    def __init__(self, settings: Settings) -> None:
        settings.one_of("bits", (4,), settings.get("w_bit"))
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        settings.one_of("zero_point", (True,), True)
        self._group_size = settings.group_size("q_group_size" if settings.get("group_size") is None else "group_size")

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        inputs, words = parts.shape(module, "qweight")
        return words * PER_WORD, inputs

    def read(self, parts: Parts, module: str) -> Codes:
        outputs, inputs = self.shape(parts, module)
        groups = parts.groups(module, inputs, self._group_size)
        words = outputs // PER_WORD
        codes = unpack(parts.take(module, "qweight", (inputs, words), ("I32",)))
        zeros = unpack(parts.take(module, "qzeros", (groups, words), ("I32",)))
        scales = parts.take(module, "scales", (groups, outputs), ("F16", "BF16", "F32"))
        return Codes(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), bits=4)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 8 m], in order of the outputs."""
    stored = unpack_low_first(words, 4, axis=1).reshape(*words.shape, PER_WORD)
    plain = torch.empty_like(stored)
    plain[:, :, list(ORDER)] = stored
    return plain.flatten(1)


def pack(values: torch.Tensor) -> torch.Tensor:
    """The inverse of unpack."""
    return pack_low_first(values.reshape(values.shape[0], -1, PER_WORD)[:, :, list(ORDER)].flatten(1), 4, axis=1)
