"""What all heads have in common: embeddings and the head over the draft vocabulary, borrowed or their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.packed import PackedWeight, Weight
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.further import FurtherTokens
from paceline.models.heads.target import Target, head_rows
from paceline.models.layers import Linear, load_matrix
from paceline.models.weight_source import WeightSource


class BaseHead:
    """Part of interface.Head."""

    capturable = True
    reads_further = False
    """Whether its rounds know what to do with Opened.further."""

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

    @property
    def drafts_further(self) -> bool:
        # Where nothing is packed, such a head drafts from the whole vocabulary (build.widened).
        head = self._target.head
        return (self.reads_further and self.config.whole_vocabulary and self.target_ids is not None
                and isinstance(head.weight, PackedWeight) and head.bias is None)

    def further_tokens(self) -> FurtherTokens:
        weight = self._target.head.weight
        assert isinstance(weight, PackedWeight)
        return FurtherTokens(weight)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] ids of the target -> [N, h]."""
        if self._embedding is None:
            return self._target.embed(tokens)
        if isinstance(self._embedding, PackedWeight):
            return self._embedding.rows(tokens)
        return F.embedding(tokens, self._embedding)
