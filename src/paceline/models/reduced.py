"""Reduced forms of a model: fewer layers, fewer sublayers, fewer bits. Same cache groups, so they read its cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels.interface import Kernels
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM, ModelTraits
from paceline.models.weight_source import WeightSource

BLOCK = 32
"""Weights that share a scale."""


class ShorterModel(ModelTraits):
    """CausalLM: the first `last` layers of a model without the sublayers in `skip`, then its norm and head."""

    def __init__(self, model: CausalLM, last: int | None = None,
                 skip: frozenset[tuple[int, str]] = frozenset()) -> None:
        self._model = model
        self._last = last
        self._skip = skip
        self.config, self.cache_groups = model.config, model.cache_groups
        self.bits, self.kv_dtype, self.self_contained = model.bits, model.kv_dtype, model.self_contained
        self.quantization, self.built_for = model.quantization, model.built_for
        self.skips_sublayers = model.skips_sublayers

    @property
    def capturable(self) -> bool:
        return self._model.capturable

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(token_ids)

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        """`first` and `last` count the whole model's layers; those this one lacks are passed by."""
        context.skip = self._skip
        end = last if self._last is None else self._last if last is None else min(last, self._last)
        return self._model.layers(hidden, context, first, end)

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self._model.logits(hidden, kernels)

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        return self.layers(self.embed(token_ids), context)


class LowBitWeights:
    """WeightSource: another one's tensors, its matrices rounded to 8 or 4 bits with a scale (and, of 4 bits, an
    offset) per 32 values. `blocks` hands out the 4-bit ones packed, for the native code."""

    def __init__(self, weights: WeightSource, bits: int) -> None:
        self._weights = weights
        self._bits = bits

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._weights.take(name, shape, dtype)
        if len(shape) != 2 or shape[1] % BLOCK:
            return tensor
        whole = tensor.detach().float().cpu().numpy()
        if self._bits == 4:
            codes, scale, low = four_bit_codes(whole)
            rounded = codes * scale.astype(np.float32) + low.astype(np.float32)
        else:
            blocks = whole.reshape(shape[0], -1, BLOCK)
            step = (np.abs(blocks).max(axis=2, keepdims=True) / 127.0).astype(np.float16).astype(np.float32)
            rounded = np.rint(blocks / np.where(step > 0.0, step, 1.0)).clip(-127, 127) * step
        return torch.from_numpy(rounded.reshape(shape).astype(np.float32)).to(tensor.device, tensor.dtype)

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A matrix as 4-bit blocks, the file's own where it has some; None where 8 bits were asked for (the native code
        rounds those itself)."""
        if self._bits != 4 or shape[1] % BLOCK:
            return None
        source = getattr(self._weights, "blocks", None)
        stored: tuple[str, npt.NDArray[np.uint8]] | None = None if source is None else source(name, shape)
        if stored is not None and stored[0] in ("Q4_0", "Q4_1"):
            return stored
        return "Q4_1", four_bit_blocks(self._weights.take(name, shape).detach().float().cpu().numpy())


def four_bit_codes(matrix: npt.NDArray[np.float32]) -> tuple[
        npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """[rows, cols] -> codes 0..15 [rows, cols / 32, 32], scale and lowest value [rows, cols / 32, 1]: a weight is
    code * scale + lowest."""
    blocks = matrix.reshape(matrix.shape[0], -1, BLOCK)
    low = blocks.min(axis=2, keepdims=True)
    scale = (blocks.max(axis=2, keepdims=True) - low) / np.float32(15.0)
    inverse = np.where(scale > 0.0, 1.0 / np.where(scale > 0.0, scale, 1.0), 0.0)
    codes = np.rint((blocks - low) * inverse).clip(0, 15).astype(np.uint8)
    return codes, scale.astype(np.float16), low.astype(np.float16)


def four_bit_blocks(matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """[rows, cols] -> [rows, cols / 32 * 20] bytes as GGUF's Q4_1: scale, lowest value, then 16 bytes that hold column
    k in the low and column k + 16 in the high half."""
    codes, scale, low = four_bit_codes(matrix)
    rows, count, _ = codes.shape
    packed = np.empty((rows, count, 20), dtype=np.uint8)
    packed[:, :, 0:2] = scale.view(np.uint8)
    packed[:, :, 2:4] = low.view(np.uint8)
    packed[:, :, 4:] = codes[:, :, :16] | codes[:, :, 16:] << 4
    return packed.reshape(rows, count * 20)
