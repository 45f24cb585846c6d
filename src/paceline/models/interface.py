"""What the engine needs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from paceline.errors import ConfigError, ParallelError
from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward

if TYPE_CHECKING:
    from paceline.models.layers import Linear


class CausalLM(Protocol):
    """A decoder over the rows of a step. Knows nothing of requests, sampling or speculation. What most models have in
    common is in ModelTraits, from which they inherit."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Which layers share a block table, in the order of Layout.views."""
        ...

    @property
    def bits(self) -> int:
        """Of a weight in the layers; 16 stands for floats of any kind. Fewer are made for the native kernels."""
        ...

    @property
    def quantization(self) -> str | None:
        """How its weights were packed for the native kernels (EngineOptions.quantization); None: they are floats."""
        ...

    @property
    def built_for(self) -> int:
        """Positions that it was built for, by which some rotate; 0: it does not matter."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """What its cache must hold; None: any type that torch can run it with."""
        ...

    @property
    def self_contained(self) -> bool:
        """It computes everything itself: the kernels that it is handed are not called."""
        ...

    @property
    def skips_sublayers(self) -> bool:
        """Forward.skip may name one half of a layer; else whole layers only."""
        ...

    @property
    def capturable(self) -> bool:
        """Its forward can be captured: nothing in it is decided or planned on the host."""
        ...

    @property
    def lost(self) -> ParallelError | None:
        """Why it cannot run any more: another rank that held a share of it is gone."""
        ...

    def linears(self) -> list[Linear]:
        """Those that adapters can add to. A ConfigError where there are none."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, h]."""
        ...

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Run layers first .. last - 1 (None: to the end) on the residual stream [N, h]; stores their keys and values.
        layers(layers(x, c, 0, b), c, b) is layers(x, c). `hidden` may be overwritten."""
        ...

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Final norm and head: residual stream [R, h] -> [R, vocabulary] float32."""
        ...

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        """embed, then all layers: [N] -> [N, h], before the final norm."""
        ...


class ModelTraits:
    """What is so of a model in floats, written in torch on Kernels; the contracts are on CausalLM."""

    config: ModelConfig
    cache_groups: tuple[CacheGroup, ...]
    bits: int = 16
    quantization: str | None = None
    built_for: int = 0
    kv_dtype: torch.dtype | None = None
    self_contained: bool = False
    skips_sublayers: bool = True
    lost: ParallelError | None = None

    @property
    def capturable(self) -> bool:
        return not self.config.num_experts  # which are chosen on the host

    def linears(self) -> list[Linear]:
        raise ConfigError(f"A {type(self).__name__} takes no adapters.")


def attention_heads(config: ModelConfig) -> Heads:
    """As attention over the cache sees them, the same in every layer."""
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim,
                 latent=None if config.latent is None else config.latent.rank)


def activations(model: CausalLM, device: torch.device) -> torch.dtype:
    """What a model computes in; its cache may hold something else."""
    return model.embed(torch.zeros(1, dtype=torch.int64, device=device)).dtype
