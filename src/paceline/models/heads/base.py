"""What all heads have in common: embeddings and the head over the draft vocabulary, borrowed or their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.packed import PackedWeight, Weight
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.target import Target, head_rows
from paceline.models.layers import Linear, load_matrix
from paceline.models.weight_source import WeightSource


class BaseHead:
    """Part of interface.Head."""

    capturable = True

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target,
                 target_ids: torch.Tensor | None) -> None:
        """`target_ids`: of the draft vocabulary, where it is not the target's."""
        self.config = config
        self._target = target
        self._embedding: Weight | None = None
        if config.own_embedding:
            self._embedding = load_matrix(weights, ["embed_tokens.weight"], [config.vocab_size], config.hidden_size)
        self.lm_head = self._load_head(config, weights, target_ids)
        self.device = torch.device(self.lm_head.weight.device)
        self.target_ids = None if target_ids is None else target_ids.to(self.device)

    def _load_head(self, config: HeadConfig, weights: WeightSource, ids: torch.Tensor | None) -> Linear:
        if config.own_lm_head:
            return Linear(load_matrix(weights, ["lm_head.weight"], [config.draft_vocab_size], config.hidden_size))
        return head_rows(self._target, ids)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] ids of the target -> [N, h]."""
        if self._embedding is None:
            return self._target.embed(tokens)
        if isinstance(self._embedding, PackedWeight):
            return self._embedding.rows(tokens)
        return F.embedding(tokens, self._embedding)
