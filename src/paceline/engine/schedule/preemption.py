"""What becomes of a preempted sequence: computed again or swapped to the host, whichever was measured to be cheaper."""

from __future__ import annotations

from collections.abc import Sequence

AUTO, RECOMPUTE, SWAP = "auto", "recompute", "swap"
FADING = 0.9
"""How much of its weight a measured step keeps with every later one."""


class Preemption:
    """Compares seconds: tokens to compute against bytes to copy, there and back."""

    def __init__(self, mode: str = RECOMPUTE, block_bytes: Sequence[int] = ()) -> None:
        """`block_bytes`: what a block of each cache group takes."""
        self.mode = mode
        self.block_bytes = tuple(block_bytes)
        self._rows = 0.0
        self._seconds = 0.0
        """Of the latest steps that computed prompts, older ones weighing less."""
        self.byte_seconds: float | None = None
        """What copying one byte to the host and back takes; None: not measured yet."""

    def observe_prompt(self, rows: int, prompt_rows: int, seconds: float) -> None:
        """A step took so long. Only those that mostly compute prompts tell what a prompt's token takes."""
        if 2 * prompt_rows < rows or seconds <= 0.0:
            return
        self._rows = FADING * self._rows + rows
        self._seconds = FADING * self._seconds + seconds

    @property
    def token_seconds(self) -> float | None:
        """What computing one token of a prompt takes; None: not measured yet."""
        return self._seconds / self._rows if self._rows else None

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
        copied = sum(count * size for count, size in zip(blocks, self.block_bytes))
        return copied * self.byte_seconds < tokens * self.token_seconds
