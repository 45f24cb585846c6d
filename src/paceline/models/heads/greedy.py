"""GreedySlots: the tokens that follow each other greedily in a block with a Markov head, in one native call.

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
from paceline.models.heads.interface import Best
from paceline.models.heads.markov import MarkovHead
from paceline.models.layers import Linear

EVERYTHING = np.zeros(0, dtype=np.int64)
"""In place of the draft vocabulary's ids: they are the target's."""


class GreedySlots:
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
        weight = confidence.weight[0].double().numpy()
        self._of_hidden = weight[:config.hidden_size] * norm.weight.double().numpy()
        self._of_token = weight[config.hidden_size:] if config.confidence_head_with_markov else None
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

    def best(self, logits: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32], previous: Sequence[int],
             kernels: NativeKernels) -> list[Best]:
        """Slot after slot: logits [S, slots, V] without the Markov head, hidden [S, slots, h] before the last norm;
        previous [S]: before the first slot."""
        native = self._native.get(kernels.threads)
        if native is None:
            native = self._native[kernels.threads] = cpu.require().Markov(
                self._w1.matrix, self._w2.matrix, self._w2.shape[0], self._ids, kernels.threads)
        lines, slots = logits.shape[:2]
        tokens = np.empty((lines, slots), dtype=np.int64)
        native.best(np.ascontiguousarray(logits), np.array(previous, dtype=np.int64), tokens)
        chances = self._chances(hidden, tokens, previous)
        return [Best(*both) for both in zip(tokens.T.tolist(), chances.T.tolist())]

    def _chances(self, hidden: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64],
                 previous: Sequence[int]) -> npt.NDArray[np.float64]:
        x = hidden.astype(np.float64)
        sure = np.einsum("abc,c->ab", x, self._of_hidden)
        sure /= np.sqrt(np.einsum("abc,abc->ab", x, x) / x.shape[2] + self._eps)
        if self._of_token is not None:
            before = np.concatenate((np.array(previous, dtype=np.int64)[:, None], tokens[:, :-1]), axis=1)
            rows = self._w1.rows(torch.from_numpy(before.reshape(-1))).numpy()
            sure += np.einsum("ab,b->a", rows, self._of_token).reshape(sure.shape)
        chances: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-(sure + self._bias)))
        return chances
