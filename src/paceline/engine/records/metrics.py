"""What a request and the engine went through, in seconds and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds on the engine's clock. Figures of sample 0 where a request has several."""

    arrival: float
    first_scheduled: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Over all samples."""
    cached_tokens: int = 0
    cache_miss: str | None = None
    """Why the prefix cache did not cover more of the prompt."""
    preemptions: int = 0
    steps: int = 0
    token_times: list[float] = field(default_factory=list)
    """When each token of sample 0 was committed; tokens of one step share a time."""

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def inter_token(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed (not found in the cache) a second, until the first token."""
        if self.first_token is None or self.first_scheduled is None:
            return None
        return _rate(self.prompt_tokens - self.cached_tokens, self.first_token - self.first_scheduled)

    @property
    def decode_rate(self) -> float | None:
        return 1.0 / self.tpot if self.tpot else None

    def figures(self) -> dict[str, Any]:
        """All but the list that has one entry per token."""
        return {"queue_time_s": self.queue_time, "ttft_s": self.ttft, "tpot_s": self.tpot,
                "prefill_tokens_per_s": self.prefill_rate, "decode_tokens_per_s": self.decode_rate,
                "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
                "cached_tokens": self.cached_tokens, "cache_miss": self.cache_miss,
                "preemptions": self.preemptions, "steps": self.steps}

    def as_dict(self) -> dict[str, Any]:
        return self.figures() | {"inter_token_s": self.inter_token}


class StepTimes(NamedTuple):
    """Where the seconds of a step went."""

    schedule: float
    forward: float
    sample: float
    commit: float
    draft: float = 0.0


class RepeatTimes(NamedTuple):
    """Seconds that a device took for a step which it repeats by itself, each time."""

    seconds: float
    plain: float | None
    """What it takes without drafts; None: that was not measured."""


@dataclass(slots=True)
class EngineMetrics:
    """Running totals since the engine started."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    """Of the prompts that were begun, whether computed or found in the cache."""
    cached_tokens: int = 0
    """Those found in the cache."""
    prefill_tokens: int = 0
    """Prompt rows computed: again after a preemption, and not where the cache had them."""
    decode_tokens: int = 0
    """Tokens that came out of steps without prompt rows."""
    output_tokens: int = 0
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Finished sequences by reason."""
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter_failures: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    draft_s: float = 0.0
    prefill_s: float = 0.0
    """Time of steps that held prompt tokens."""
    decode_s: float = 0.0
    """Time of steps that held none."""

    def account(self, rows: int, prompt_rows: int, tokens: int, times: StepTimes) -> None:
        """One finished step: its rows, those of prompts among them, the tokens it yielded."""
        self.steps += 1
        self.rows += rows
        self.output_tokens += tokens
        self.schedule_s += times.schedule
        self.forward_s += times.forward
        self.sample_s += times.sample
        self.commit_s += times.commit
        self.draft_s += times.draft
        if prompt_rows:
            self.prefill_tokens += prompt_rows
            self.prefill_s += sum(times)
        else:
            self.decode_tokens += tokens
            self.decode_s += sum(times)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        out["finished"] = dict(self.finished)
        out["prefill_tokens_per_s"] = _rate(self.prefill_tokens, self.prefill_s)
        out["decode_tokens_per_s"] = _rate(self.decode_tokens, self.decode_s)
        return out
