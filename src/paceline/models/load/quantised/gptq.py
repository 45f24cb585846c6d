"""GPTQ's layout: codes of neighbouring inputs in an int32, groups possibly in order of activation."""

from __future__ import annotations

import torch

from paceline.errors import ModelFormatError
from paceline.models.load.quantised.codes import Codes, unpack_low_first
from paceline.models.load.quantised.parts import Parts
from paceline.models.load.quantised.settings import Settings


class GPTQ:
    """Scheme: qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out] and,
    where input i is not in group i / group_size, g_idx [in]."""

    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Settings) -> None:
        self._bits: int = settings.one_of("bits", (4, 8))
        self._group_size = settings.group_size()
        form = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        if settings.get("is_marlin_format"):
            raise settings.refusal("is_marlin_format true")
        if any(not key.startswith("-:") for key in settings.mapping("dynamic")):
            raise settings.refusal("'dynamic', settings that differ by module")
        self._stored_less_one = form == "gptq"
        """The first version of the format stores zero points less one, modulo the number of codes."""

    @property
    def stored_as(self) -> str:
        return "Q4_1" if self._bits == 4 else "Q8_0"

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        words, outputs = parts.shape(module, "qweight")
        return outputs, words * 32 // self._bits

    def read(self, parts: Parts, module: str) -> Codes:
        outputs, inputs = self.shape(parts, module)
        groups = parts.groups(module, inputs, self._group_size)
        words = inputs * self._bits // 32, -(-outputs * self._bits // 32)
        codes = unpack_low_first(parts.take(module, "qweight", (words[0], outputs), ("I32",)), self._bits, axis=0)
        packed = parts.take(module, "qzeros", (groups, words[1]), ("I32",))
        zeros = unpack_low_first(packed, self._bits, axis=1)[:, :outputs]
        if self._stored_less_one:
            zeros = (zeros.to(torch.int16) + 1 & 2 ** self._bits - 1).to(torch.uint8)
        scales = parts.take(module, "scales", (groups, outputs), ("F16", "BF16", "F32"))
        return Codes(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(),
                     self._group_of(parts, module, inputs, groups), self._bits)

    def _group_of(self, parts: Parts, module: str, inputs: int, groups: int) -> torch.Tensor | None:
        if not parts.has(module, "g_idx"):
            return None
        group_of = parts.take(module, "g_idx", (inputs,), ("I32", "I64")).to(torch.int64)
        if bool(((group_of < 0) | (group_of >= groups)).any()):
            raise ModelFormatError(f"tensor '{module}.g_idx' in {parts.folder.path} names groups outside of the "
                                   f"{groups} that there are: download it again.")
        in_order = torch.arange(inputs) // (inputs // groups)
        return None if torch.equal(group_of, in_order) else group_of
