"""CacheGroup: layers that share a block table. Torch-free, so that the scheduler can import it."""

from __future__ import annotations

from dataclasses import dataclass

NULL_BLOCK = 0
"""Block 0 of every pool is never handed out and stays zero: masked positions read it, so no stale value can leak."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table, a page shape and a freeing rule."""

    name: str
    layers: tuple[int, ...]
    """Those that store something of their own."""
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Keys further back than this many positions (own position counted) are not attended and their blocks freed."""
    lookahead: int = 0
    """A cached entry i also depends on this many tokens after i (1 for EAGLE-like drafters)."""
    latent: int | None = None
    """Where set, a token's value is the first so many features of its key: values have no plane of their own."""
    readers: tuple[tuple[int, int], ...] = ()
    """(layer, owner): layers that store nothing and read what the layer `owner` of this group has stored."""

    @property
    def planes(self) -> int:
        """What a layer stores of a token: its key, and its value where that is something else."""
        return 2 if self.latent is None else 1

    def bytes_per_token(self, element_size: int, scale_size: int = 0) -> int:
        """`scale_size`: bytes of the scale that a head's vector has beside it, where it has one."""
        return self.planes * len(self.layers) * self.kv_heads * (self.head_dim * element_size + scale_size)
