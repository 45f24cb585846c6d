"""The Markov head of DSpark: what the token before a slot adds to the slot's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.device.head_rounds import Bigrams
from paceline.kernels.interface import Kernels
from paceline.kernels.packed import PackedWeight
from paceline.models.heads.config import HeadConfig
from paceline.models.layers import load_linear, load_matrix
from paceline.models.weight_source import WeightSource

NAME = "markov_head"


class MarkovHead:
    """W2 W1[token]: a bigram model of low rank."""

    def __init__(self, config: HeadConfig, weights: WeightSource) -> None:
        rank = config.markov_rank
        self.w1 = load_matrix(weights, [f"{NAME}.markov_w1.weight"], [config.vocab_size], rank)
        self.w2 = load_linear(weights, [f"{NAME}.markov_w2"], [config.draft_vocab_size], rank, False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[S] ids of the target -> [S, rank]."""
        return self.w1.rows(tokens) if isinstance(self.w1, PackedWeight) else F.embedding(tokens, self.w1)

    @property
    def bigrams(self) -> Bigrams | None:
        """All there is to it; None: there is more, or the matrices are packed."""
        if isinstance(self.w1, torch.Tensor) and isinstance(self.w2.weight, torch.Tensor):
            return Bigrams(self.w1, self.w2.weight)
        return None

    def bias(self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None,
             kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None]:
        """before [S, rank]: of the token before; hidden [S, h] of the slot -> what is added to the logits, float32, and
        the state for the next slot."""
        return self.w2(before, kernels).float(), state


class GatedMarkovHead(MarkovHead):
    """What is seen of the token is gated by the slot's hidden state."""

    def __init__(self, config: HeadConfig, weights: WeightSource) -> None:
        super().__init__(config, weights)
        self.gate = load_linear(weights, [f"{NAME}.gate_proj"], [config.markov_rank],
                                config.hidden_size + config.markov_rank, True)

    @property
    def bigrams(self) -> Bigrams | None:
        return None

    def bias(self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None,
             kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate = torch.sigmoid(self.gate(torch.cat((hidden, before), dim=-1), kernels))
        return self.w2(gate * before, kernels).float(), None


class RecurrentMarkovHead(MarkovHead):
    """A state runs through the block, so that a slot knows of all tokens before it."""

    def __init__(self, config: HeadConfig, weights: WeightSource) -> None:
        super().__init__(config, weights)
        rank = config.markov_rank
        self.joint = load_linear(weights, [f"{NAME}.joint_proj"], [3 * rank], 2 * rank + config.hidden_size, True)

    @property
    def bigrams(self) -> Bigrams | None:
        return None

    def bias(self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None,
             kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.zeros_like(before) if state is None else state
        gate, candidate, out = self.joint(torch.cat((state, before, hidden), dim=-1), kernels).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        new = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.w2(torch.tanh(out).contiguous(), kernels).float(), new


def markov_head(config: HeadConfig, weights: WeightSource) -> MarkovHead | None:
    if not config.markov_rank:
        return None
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return kinds[config.markov_head_type](config, weights)
