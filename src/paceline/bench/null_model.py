"""A model that costs nothing: what is left of a step is the host's own work."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import ModelTraits
from paceline.models.tokenizer import Tokenizer


class NullModel(ModelTraits):
    """Says the same token for ever in each place of a batch; looks at nothing, stores nothing."""

    def __init__(self, vocab_size: int, max_rows: int, context: int = 8192) -> None:
        self.config = ModelConfig.from_dict({
            "model_type": "llama", "vocab_size": vocab_size, "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "intermediate_size": 8, "max_position_embeddings": context})
        self.cache_groups = (CacheGroup("full", (0,), 1, 1),)
        self._hidden = torch.zeros(max_rows, 1)
        self._logits = torch.zeros(max_rows, vocab_size)
        self._logits[torch.arange(max_rows), torch.arange(max_rows) % vocab_size] = 1.0

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._hidden[:token_ids.shape[0]]

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return self._logits[:hidden.shape[0]]

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        return self._hidden[:token_ids.shape[0]]


def byte_tokenizer() -> Tokenizer:
    """One token a byte: the smallest real tokenizer, with 256 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)
