"""What becomes of a preempted sequence: computed again or swapped to the host, whichever was measured to be cheaper."""

from __future__ import annotations

from collections.abc import Sequence

AUTO, RECOMPUTE, SWAP = "auto", "recompute", "swap"
WEIGHT = 0.2
"""Of the newest measurement in the moving average."""


class Preemption:
    """Compares seconds: tokens to compute against bytes to copy, there and back."""

    def __init__(self, mode: str = RECOMPUTE, block_bytes: Sequence[int] = ()) -> None:
        """`block_bytes`: what a block of each cache group takes."""
        self.mode = mode
        self.block_bytes = tuple(block_bytes)
        self.token_seconds: float | None = None
        """What computing one token of a prompt takes; None: not measured yet."""
        self.byte_seconds: float | None = None
        """What copying one byte to the host and back takes; None: not measured yet."""

    def observe_prompt(self, rows: int, prompt_rows: int, seconds: float) -> None:
        """A step took so long. Only those that mostly compute prompts tell what a prompt's token takes."""
        if 2 * prompt_rows < rows or seconds <= 0.0:
            return
        newest = seconds / rows
        self.token_seconds = newest if self.token_seconds is None else (
            (1.0 - WEIGHT) * self.token_seconds + WEIGHT * newest)

    def observe_copies(self, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        self.byte_seconds = 1.0 / out_bytes_per_s + 1.0 / in_bytes_per_s

    @property
    def may_swap(self) -> bool:
        """Whether it is worth asking for memory to swap to: until a prompt was measured nothing can be compared."""
        return self.mode == SWAP or (self.mode == AUTO and self.token_seconds is not None)

    def swaps(self, tokens: int, blocks: Sequence[int]) -> bool:
        """Whether to swap a sequence with so many tokens to compute again and so many blocks in each group."""
        if self.mode != AUTO:
            return self.mode == SWAP
        if self.token_seconds is None or self.byte_seconds is None:
            return False
        return self.swap_seconds(blocks) < tokens * self.token_seconds

    def swap_seconds(self, blocks: Sequence[int]) -> float:
        copied = sum(count * size for count, size in zip(blocks, self.block_bytes))
        return copied * (self.byte_seconds or 0.0)
