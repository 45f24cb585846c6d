"""What a GGUF block holds: whole numbers, and the scales and offsets that make weights of them.

Every type here is of one form, `weight = code * scale + offset` (the offset may be missing), so one description serves
both the tensors of torch and the packed matrices of the native code. Scales and offsets are exact in float32: those of
the K types are products of a float16 and a whole number of at most eight bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""What the sixteen codes of the IQ4 types stand for."""


class BlockCodes(NamedTuple):
    """Of n blocks with E elements each. Elements that follow one another share a scale, and an offset."""

    values: torch.Tensor
    """int8 [n, E]"""
    scales: torch.Tensor
    """float32 [n, E / elements that share one]"""
    offsets: torch.Tensor | None = None
    """float32, as `scales`"""

    def floats(self) -> torch.Tensor:
        """The weights, [n, E] float32: one multiplication and, with offsets, one addition each."""
        count = len(self.values)
        weights = self.values.to(torch.float32).view(count, self.scales.shape[1], -1).mul_(self.scales.unsqueeze(2))
        if self.offsets is not None:
            weights.add_(self.offsets.unsqueeze(2))
        return weights.view(count, -1)


class BlockLayout(NamedTuple):
    """A block type: `elements` weights in `size` bytes, which `read` takes apart (uint8 [n, size])."""

    elements: int
    size: int
    read: Callable[[torch.Tensor], BlockCodes]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).to(torch.float32)


def _fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """Bytes that hold fields of `width` bits, [n, bytes] -> [n, bytes * 8 / width]: the lowest field of `run` bytes in
    a row, then their next one, and so on; then the next `run` bytes."""
    runs = packed.view(len(packed), -1, 1, run)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((runs >> shifts) & ((1 << width) - 1)).view(len(packed), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [n, b] -> their bits [n, 8 b], lowest first."""
    return _fields(packed, 1, 1)


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    return codes.view(torch.int8) - middle


def _q8_0(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(_signed(_fields(blocks[:, 2:].contiguous(), 4, 16), 8), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> BlockCodes:
    codes = _fields(blocks[:, 4:].contiguous(), 4, 16)
    return BlockCodes(codes.view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _five_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 codes from 0 to 31: four bytes of highest bits, then sixteen of low halves."""
    high, low = blocks[:, start:start + 4].contiguous(), blocks[:, start + 4:].contiguous()
    return _fields(low, 4, 16) | _bits(high) << 4


def _q5_0(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(_signed(_five_bits(blocks, 2), 16), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(_five_bits(blocks, 4).view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _iq4_nl(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(_LEVELS[_fields(blocks[:, 2:].contiguous(), 4, 16).int()], _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> BlockCodes:
    low, high = _fields(blocks[:, 4:8].contiguous(), 4, 1), _fields(blocks[:, 2:4].contiguous(), 2, 1)
    scales = _signed(low | high << 4, 32).to(torch.float32)
    return BlockCodes(_LEVELS[_fields(blocks[:, 8:].contiguous(), 4, 16).int()], _half(blocks, 0) * scales)


def _q2_k(blocks: torch.Tensor) -> BlockCodes:
    scales, offsets = (blocks[:, :16] & 15).to(torch.float32), (blocks[:, :16] >> 4).to(torch.float32)
    codes = _fields(blocks[:, 16:80].contiguous(), 2, 32).view(torch.int8)
    return BlockCodes(codes, _half(blocks, 80) * scales, -_half(blocks, 82) * offsets)


def _q3_k(blocks: torch.Tensor) -> BlockCodes:
    low, high = _fields(blocks[:, 32:96].contiguous(), 2, 32), _fields(blocks[:, :32].contiguous(), 1, 32)
    codes = _signed(low | high << 2, 4)
    packed = blocks[:, 96:108].contiguous()
    scales = _fields(packed[:, :8].contiguous(), 4, 8) | _fields(packed[:, 8:].contiguous(), 2, 4) << 4
    return BlockCodes(codes, _half(blocks, 108) * _signed(scales, 32).to(torch.float32))


def _six_bit_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of Q4_K and Q5_K, float32 [n, 8] each. Of both the first four are the low six
    bits of a byte; the last four have their high bits on top of those, and share the last four bytes."""
    packed = blocks[:, 4:16]
    scale, offset, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, low & 15 | (scale >> 6) << 4), dim=1)
    offsets = torch.cat((offset & 63, low >> 4 | (offset >> 6) << 4), dim=1)
    return _half(blocks, 0) * scales.to(torch.float32), -_half(blocks, 2) * offsets.to(torch.float32)


def _q4_k(blocks: torch.Tensor) -> BlockCodes:
    return BlockCodes(_fields(blocks[:, 16:].contiguous(), 4, 32).view(torch.int8), *_six_bit_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> BlockCodes:
    low, high = _fields(blocks[:, 48:].contiguous(), 4, 32), _fields(blocks[:, 16:48].contiguous(), 1, 32)
    return BlockCodes((low | high << 4).view(torch.int8), *_six_bit_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> BlockCodes:
    low, high = _fields(blocks[:, :128].contiguous(), 4, 64), _fields(blocks[:, 128:192].contiguous(), 2, 32)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return BlockCodes(_signed(low | high << 4, 32), _half(blocks, 208) * scales)


LAYOUTS: dict[str, BlockLayout] = {
    "Q8_0": BlockLayout(32, 34, _q8_0), "Q4_0": BlockLayout(32, 18, _q4_0), "Q4_1": BlockLayout(32, 20, _q4_1),
    "Q5_0": BlockLayout(32, 22, _q5_0), "Q5_1": BlockLayout(32, 24, _q5_1), "Q2_K": BlockLayout(256, 84, _q2_k),
    "Q3_K": BlockLayout(256, 110, _q3_k), "Q4_K": BlockLayout(256, 144, _q4_k), "Q5_K": BlockLayout(256, 176, _q5_k),
    "Q6_K": BlockLayout(256, 210, _q6_k), "IQ4_NL": BlockLayout(32, 18, _iq4_nl),
    "IQ4_XS": BlockLayout(256, 136, _iq4_xs),
}
