"""Heads of every kind with random weights, for tiny targets: they draft nonsense, all around them is real."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine.tiny import RandomWeights
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Head
from paceline.models.heads.tensors import expected
from paceline.speculation.spec import HEADS

MOST_TOKENS = 512
REDUCED = 61
"""Tokens that a head with a reduced vocabulary drafts."""


def head_config(kind: str, model: Any, reduced: bool = True, own: bool = False) -> HeadConfig:
    config = model.config
    layers = config.num_layers
    more: dict[str, Any] = {}
    if kind in ("dspark", "dflash"):
        more = {"block_size": 5, "mask_token_id": 3, "num_layers": 2, "sample_from_anchor": kind == "dspark"}
    if kind == "dspark":
        more |= {"markov_rank": 32, "confidence_head": True}
    taps = (1, layers - 1) if kind in ("dspark", "dflash", "eagle3") else (layers,)
    if kind in ("medusa", "hydra"):
        more = {"heads": 3}
    return HeadConfig(
        kind=kind, hidden_size=config.hidden_size, vocab_size=config.vocab_size,
        draft_vocab_size=REDUCED if reduced else config.vocab_size, taps=taps, own_lm_head=own,
        num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, max_position_embeddings=MOST_TOKENS, **more)


def random_tensors(config: HeadConfig) -> dict[str, torch.Tensor]:
    weights = RandomWeights(salt=config.kind)
    tensors = {name: weights.take(name, shape) for name, shape in expected(config).items()}
    if config.reduced:
        ids = torch.arange(config.vocab_size)[torch.arange(config.vocab_size) % 3 != 1][:config.draft_vocab_size]
        tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
    return tensors


@functools.cache
def random_head(kind: str, model: Any, reduced: bool = True, own: bool = False) -> Head:
    """own: with its own output head."""
    config = head_config(kind, model, reduced, own)
    return build_head(config, random_tensors(config), model, MOST_TOKENS)


def heads_for(wishes: Any, model: Any) -> dict[str, Head]:
    """Those that some wishes ask for by their kind, wherever they stand in them."""
    if isinstance(wishes, str):
        return {wishes: random_head(wishes, model)} if wishes in HEADS else {}
    inner = wishes.values() if isinstance(wishes, dict) else wishes if isinstance(wishes, list | tuple) else ()
    found: dict[str, Head] = {}
    for wish in inner:
        found |= heads_for(wish, model)
    return found
