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
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Keys further back than this many positions (own position counted) are not attended and their blocks freed."""
    lookahead: int = 0
    """A cached entry i also depends on this many tokens after i (1 for EAGLE-like drafters)."""

    def bytes_per_token(self, element_size: int, scale_size: int = 0) -> int:
        """`scale_size`: bytes of the scale that a head's vector has beside it, where it has one."""
        return 2 * len(self.layers) * self.kv_heads * (self.head_dim * element_size + scale_size)
