"""Tiny models that several threads hold together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.tiny import BASE, HEADS_OF_THEIR_OWN, SHAPES, RandomWeights
from paceline.engine.parallel.leader import Leader
from paceline.engine.parallel.together import together
from paceline.kernels.eager import EagerKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config import ModelConfig
from paceline.models.interface import CausalLM
from paceline.models.registry import build
from paceline.models.shard import WHOLE, Shard


class SharedWeights(RandomWeights):
    """Those of one rank; the same numbers as everybody's."""

    def __init__(self, shard: Shard, **more: Any) -> None:
        super().__init__(**more)
        self.shard = shard


def shape_of(name: str, **changes: Any) -> ModelConfig:
    own_head = name in HEADS_OF_THEIR_OWN
    return ModelConfig.from_dict(BASE | SHAPES[name] | {"tie_word_embeddings": not own_head} | changes)


def builder(name: str, **changes: Any) -> Callable[[Shard], CausalLM]:
    """A rank's share of tiny_model(name)."""
    shape, salt = shape_of(name, **changes), HEADS_OF_THEIR_OWN.get(name, "")

    def of(shard: Shard = WHOLE) -> CausalLM:
        weights = SharedWeights(shard, salt=salt, head=name in HEADS_OF_THEIR_OWN)
        return build(shape, weights, shape.max_position_embeddings)

    return of


def shared_model(name: str = "llama", size: int = 2, exact: bool = True, patience: float = 60.0,
                 **changes: Any) -> Leader:
    return together(size, builder(name, **changes), ReferenceKernels if exact else EagerKernels, torch.device("cpu"),
                    patience)
