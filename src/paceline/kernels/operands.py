"""What fused kernels take together: a norm, the shape of a layer's heads, a layer's cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last axis: weight [K], which may be kept in a wider dtype than what it norms. RMS norm, or, where
    `centred`, layer norm: the mean is taken away first and the bias [K], if there is one, added last."""

    weight: torch.Tensor
    eps: float
    centred: bool = False
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """`query` heads share `keys` key (and value) heads of `dim` features. Optionally queries and keys are normed: each
    head by itself where the norm's weight has `dim` elements, all of them together where it has as many as they.
    `keys` 0: the layer stores none and reads another's cache; `query` 0: rows that only store. `latent`: values are
    the first so many features of the keys (CacheGroup.latent)."""

    query: int
    keys: int
    dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    latent: int | None = None

    @property
    def normed_apart(self) -> bool:
        """Whether a head's norm, where there is one, needs that head alone, and no mean."""
        return all(norm is None or (norm.weight.shape[0] == self.dim and not norm.centred)
                   for norm in (self.query_norm, self.key_norm))


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layer's cache: [slots, kv_heads, dim] each; of a latent cache the values are a view of the keys' first
    features. 8-bit caches have float32 scales [slots, kv_heads] beside them:
    a value is its code times its scale."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.key_scales is None or self.value_scales is None:
            return None
        return self.key_scales, self.value_scales


def values_in_keys(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a cache is latent: a token's value is the beginning of its key, in the same memory."""
    return v_cache.data_ptr() == k_cache.data_ptr()
