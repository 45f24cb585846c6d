"""What the scheduler may hand out."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_batch_tokens: int
    """Rows of one step, at most."""
    max_num_seqs: int
    """Sequences that hold cache at the same time, at most."""
    max_model_len: int
    """Tokens of one sequence (prompt + output), at most."""
    watermark: float = 0.01
    """Fraction of every group's blocks that an admission must leave free while others run."""
    max_queue: int | None = None
    """Samples that may wait; adding a request beyond raises QueueFullError, unless nobody waits. None: no limit."""
    max_chunk: int | None = None
    """Prompt tokens of one sequence in one step, at most. None: what the budget leaves."""
    max_step_s: float | None = None
    """Seconds that a step may take while somebody decodes. None: as long as it takes."""
    max_logit_rows: int | None = None
    """Rows of prompts in one step whose own log-probabilities are asked for, at most: each needs logits over the whole
    vocabulary. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ConfigError(f"max_chunk must be at least 1 or None, got {self.max_chunk}.")
        if self.max_logit_rows is not None and self.max_logit_rows < 1:
            raise ConfigError(f"max_logit_rows must be at least 1 or None, got {self.max_logit_rows}.")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be from 0 up to (not including) 1, got {self.watermark}.")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1 or None, got {self.max_queue}.")
