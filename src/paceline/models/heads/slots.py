"""SlotChain: the tokens that follow each other in a block with a Markov head, drawn in one native call.

Each token hangs on the one before it, so that token by token most of the time goes to calls that do next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.kernels import cpu
from paceline.kernels.cpu.backend import NativeKernels
from paceline.kernels.operands import Norm
from paceline.kernels.packed import OutlierWeight, PackedWeight
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import GREEDY, Best, Draw
from paceline.models.heads.markov import MarkovHead
from paceline.models.layers import Linear

EVERYTHING = np.zeros(0, dtype=np.int64)
"""In place of the draft vocabulary's ids: they are the target's."""


class SlotChain:
    """W2 W1[token before] on top of the slots' logits, and how sure the confidence head is of each slot."""

    def __init__(self, config: HeadConfig, markov: MarkovHead, confidence: Linear, norm: Norm,
                 target_ids: torch.Tensor | None) -> None:
        """`norm`: of what the slots' logits, and their confidences, are made."""
        assert isinstance(markov.w1, PackedWeight) and isinstance(markov.w2.weight, PackedWeight)
        assert isinstance(confidence.weight, torch.Tensor) and confidence.bias is not None
        self._w1, self._w2 = markov.w1, markov.w2.weight
        self._ids = EVERYTHING if target_ids is None else target_ids.numpy()
        self._eps = norm.eps
        # Whatever a norm multiplies may as well be multiplied afterwards, once and for all.
        weight = confidence.weight[0].float().numpy()
        self._of_hidden = weight[:config.hidden_size] * norm.weight.float().numpy()
        self._of_token = weight[config.hidden_size:].copy()
        self._bias = float(confidence.bias[0])
        self._native: dict[int, Any] = {}
        """By the number of threads."""

    @staticmethod
    def fits(config: HeadConfig, markov: MarkovHead | None, confidence: Linear | None) -> bool:
        """Whether there are both heads, the Markov head is the plain one, and its matrices are packed."""
        if markov is None or confidence is None or config.markov_head_type != "vanilla":
            return False
        return all(isinstance(weight, PackedWeight) and not isinstance(weight, OutlierWeight)
                   for weight in (markov.w1, markov.w2.weight))

    def chain(self, logits: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32], previous: Sequence[int],
              draws: Sequence[Draw], least: Sequence[float],
              further: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]] | None,
              kernels: NativeKernels) -> list[Best]:
        """Slot after slot: logits [S, slots, V] without the Markov head, hidden [S, slots, h] before the last norm;
        previous [S]: before the first slot; further: Further.logits, and Further.ids. Draws and ends as Round.chain
        does."""
        native = self._native.get(kernels.threads)
        if native is None:
            native = self._native[kernels.threads] = cpu.require().Markov(
                self._w1.matrix, self._w2.matrix, self._w2.shape[0], self._ids, self._of_hidden, self._of_token,
                self._bias, self._eps, kernels.threads)
        tokens, chances = np.empty(logits.shape[:2], dtype=np.int64), np.empty(logits.shape[:2], dtype=np.float32)
        nothing = np.empty((*tokens.shape, 0), dtype=np.float32), np.empty((len(tokens), 0), dtype=np.int64)
        temperatures, seeds, positions = zip(*(draws or [GREEDY] * len(tokens)))
        count = native.best(np.ascontiguousarray(logits), hidden, *(further or nothing),
                            np.array(previous, dtype=np.int64), np.array(temperatures, dtype=np.float32),
                            np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64),
                            np.array(least, dtype=np.float32), tokens, chances)
        return [Best(*both) for both in zip(tokens.T[:count].tolist(), chances.T[:count].tolist())]
