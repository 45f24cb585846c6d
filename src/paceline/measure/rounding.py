"""What a number format costs in quality, tried in torch: weights and activations are rounded to the format's values
and the arithmetic stays float32. Slow, but any format can be tried before a kernel for it exists."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.eager import EagerKernels
from paceline.kernels.packed import Weight
from paceline.models.weight_source import WeightSource

BLOCK = 32


def round_int8(x: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """x [N, K] to 255 levels, symmetric, with a scale for every `size` values of a row (None: one a row). The last
    group of a row may be shorter."""
    width = x.shape[1]
    groups = _grouped(x, size or width)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    levels = torch.round(groups / torch.where(scale == 0, 1.0, scale))
    return (levels * scale).reshape(x.shape[0], -1)[:, :width]


def round_int4(x: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """x [N, K] to 16 levels around zero as Q4_0 has them: -8 .. 7 times a half-precision scale for every `size`
    values, whose sign is chosen so that the value farthest from zero is level -8."""
    width = x.shape[1]
    groups = _grouped(x, size)
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (farthest / -8).half().float()
    levels = torch.clamp(torch.round(groups / torch.where(scale == 0, 1.0, scale)), -8, 7)
    return (levels * scale).reshape(x.shape[0], -1)[:, :width]


def spread(x: torch.Tensor) -> torch.Tensor:
    """x [N, K], K a multiple of BLOCK: the Hadamard transform of each block, of unit length, as native code spreads the
    blocks of activations and weights. Its own inverse."""
    out = x.reshape(len(x), -1, BLOCK)
    size = 1
    while size < BLOCK:
        pairs = out.reshape(len(x), -1, 2, size)
        out = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        size *= 2
    return out.reshape(x.shape).mul(BLOCK ** -0.5)


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """[N, K] -> [N, groups, size], the last group filled up with zeros: they change no group's largest value."""
    missing = -x.shape[1] % size
    return (F.pad(x, (0, missing)) if missing else x).reshape(x.shape[0], -1, size)


WEIGHTS = ("file", "int8_channel", "int8_block", "int4_block")


class RoundedWeights:
    """A WeightSource whose matrices are rounded: "file" leaves them, "int8_channel" has one scale per output row,
    "int8_block" and "int4_block" one for 32 values. Vectors stay as they are. Offers no blocks, so that a model that
    could keep the file's has to take the rounded floats."""

    def __init__(self, source: WeightSource, scheme: str = "file") -> None:
        if scheme not in WEIGHTS:
            raise ValueError(f"no weight format {scheme!r}: use one of {', '.join(WEIGHTS)}")
        self._source = source
        self._scheme = scheme

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._source.take(name, shape, dtype)
        if tensor.dim() != 2 or self._scheme == "file":
            return tensor
        if self._scheme == "int4_block":
            return round_int4(tensor)
        return round_int8(tensor, BLOCK if self._scheme == "int8_block" else None)


class RoundedKernels(EagerKernels):
    """Eager kernels that round what enters a linear layer, and what enters the cache, to int8.

    activations: values that share a scale; 0 a whole row; None leaves them in float. float_widths: inputs of these
    widths stay in float (a path for layers with outliers). int8_cache: keys and values with a scale a token and head.
    """

    name = "rounded"

    def __init__(self, activations: int | None, float_widths: frozenset[int] = frozenset(),
                 int8_cache: bool = False) -> None:
        super().__init__()
        self._activations = activations
        self._float_widths = float_widths
        self._int8_cache = int8_cache

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._activations is not None and x.shape[1] not in self._float_widths:
            x = round_int8(x, self._activations or None)
        return super().linear(x, weight, bias)

    def store(self, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        if self._int8_cache:
            k, v = (round_int8(part.reshape(-1, part.shape[-1])).view(part.shape) for part in (k, v))
        super().store(k_cache, v_cache, slots, k, v, scales)
