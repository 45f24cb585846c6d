"""Shadows: a finished request once more, without speculation, and what the comparison says.

Under the coupled rule, and greedily, the shadow is the same request decoded plainly: the tokens must be the same. Under
rules that go by q texts differ by right; there the shadow reads prompt and text as one prompt, and the distributions
that the verify steps had must be those of that reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.engine.records.emitter import Emitter
from paceline.engine.records.record import Record
from paceline.request import SamplingParams, TokenLogprob
from paceline.sampling.noise import gumbel, token_bits
from paceline.speculation.verify import RULES
from paceline.watch.witness import TOP, RequestWitness, divergence

LOWEST = -(1 << 31)
"""The priority of shadows."""
TIE = 0.25
"""Nats by which two tokens may be apart, before temperature, for kernels whose bits depend on the batch to choose
either."""
MOVES_SCORES = {"logit_bias": None, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Parameters that move the scores of some tokens and not of others, and what they are where they do not."""
LONGEST_READ = 2048
"""Tokens of prompt and text that a shadow reads at most: the scores of all of them are computed."""
EXACT_KL, ROUNDED_KL = 1e-6, 0.1
"""The most that distributions may differ, in nats: where bits are promised (a device rounds scores to float32), and
where they are not."""


@dataclass(slots=True)
class Outcome:
    """What a shadow showed."""

    tokens: int
    """Tokens of the text that were compared."""
    difference: str | None = None
    """Where the texts part, in a sentence; None: they are the same."""
    tie: bool = False
    """They part where two tokens are all but equally likely, which is no fault of kernels that promise no bits."""
    divergences: list[float] = field(default_factory=list)
    """KL between verify step and plain step, one for each position that was compared."""


class Text(NamedTuple):
    """What a sample of the original wrote. Its record holds more, such as scores of a prompt, and shadows may wait."""

    sample: int
    seed: int
    token_ids: list[int]


class Shadow:
    """What is to be run for one finished request, and how it is judged."""

    __slots__ = ("drafted", "exact", "failed", "id", "method", "reads", "request", "rule", "texts", "tries", "witness")

    def __init__(self, original: Record, witness: RequestWitness, exact: bool) -> None:
        """`exact`: the kernels promise the same bits in every batch."""
        stats = original.speculation
        assert stats is not None  # only requests that speculate are watched
        self.request = original.request
        self.method, self.rule = stats.method, stats.rule
        self.texts = [Text(one.index, one.seed, one.token_ids) for one in original.emitters]
        self.drafted = stats.cycles > 0
        """Some step verified a draft of it: otherwise nothing of speculation is in its text."""
        self.failed = original.error is not None
        self.witness = witness
        self.exact = exact
        self.id = ""
        """While it runs."""
        self.tries = 0
        self.reads = RULES[stats.rule].reads_q
        """Whether it reads the text, in place of writing it anew."""

    @property
    def longest(self) -> int:
        return max(len(text.token_ids) for text in self.texts)

    @property
    def samples(self) -> int:
        """Seats that it takes."""
        return 1 if self.reads else len(self.texts)

    @property
    def most_tokens(self) -> int:
        """What it may have in the cache."""
        return len(self.request.prompt) + self.samples * self.longest

    @property
    def worth_it(self) -> bool:
        """Whether there is anything to compare, within reason."""
        if not self.longest or self.failed or not self.drafted:
            return False
        if not self.reads:
            return True
        return bool(self.witness.scores) and len(self.prompt()) <= LONGEST_READ

    def prompt(self) -> list[int]:
        """The same text and nobody else's."""
        return [*self.request.prompt, *self.texts[0].token_ids] if self.reads else self.request.prompt

    def params(self) -> SamplingParams:
        params = self.request.params
        if self.reads:
            return SamplingParams(max_tokens=0, prompt_logprobs=TOP, priority=LOWEST, seed=self.request.seed,
                                  cache_salt=params.cache_salt)
        longest = self.longest
        scored = bool(self.witness.scores) or not self.exact
        return replace(params, max_tokens=longest, min_tokens=min(params.min_tokens, longest), seed=self.request.seed,
                       priority=LOWEST, timeout_s=None, interrupt=None, trace=False, prompt_logprobs=None,
                       logprobs=TOP if scored else None)

    def judge(self, shadow: Record) -> Outcome:
        """Of a shadow that has ended by itself."""
        if self.reads:
            read = shadow.prompt_logprobs or []
            begin = len(self.request.prompt)
            seen = {(0, begin + at): score for at, score in enumerate(read[begin:]) if score is not None}
            return Outcome(len(seen), divergences=self._divergences(seen))
        outcome = Outcome(0)
        seen = {}
        for own, other in zip(self.texts, shadow.emitters):
            same = next((at for at, (a, b) in enumerate(zip(own.token_ids, other.token_ids)) if a != b),
                        min(len(own.token_ids), len(other.token_ids)))
            outcome.tokens += same
            for at, score in enumerate((other.logprobs or [])[:same]):
                seen[own.sample, len(self.request.prompt) + at] = score
            if same < len(own.token_ids) and outcome.difference is None:
                outcome.tokens += 1
                self._part(outcome, own, other, same)
        outcome.divergences = self._divergences(seen)
        return outcome

    def _divergences(self, seen: dict[tuple[int, int], TokenLogprob]) -> list[float]:
        return [divergence(score, seen[place]) for place, score in self.witness.scores.items() if place in seen]

    def _part(self, outcome: Outcome, own: Text, other: Emitter, at: int) -> None:
        gap = self._gap(own, other, at)
        outcome.tie = not self.exact and gap is not None and (gap < TIE or self._moved)
        apart = "" if gap is None else f", {gap:.3g} nats apart"
        outcome.difference = (f"output token {at} of sample {own.sample} is not the one of plain decoding"
                              f" (of {len(own.token_ids)}{apart})")

    @property
    def _moved(self) -> bool:
        """Whether tokens were chosen by other scores than the model's, which nobody has kept."""
        return any(getattr(self.request.params, name) not in (usual, {}) for name, usual in MOVES_SCORES.items())

    def _gap(self, own: Text, other: Emitter, at: int) -> float | None:
        """By how much, noise included, plain decoding preferred its token to the original's, at least; below 0: it did
        not, and something else kept it from that one, such as the edge of a truncation. None: it had ended."""
        if other.logprobs is None or at >= len(other.logprobs) or at >= len(other.token_ids):
            return None
        score, token = other.logprobs[at], own.token_ids[at]
        ahead = score.raw - score.top.get(token, min(score.top.values()))
        mine, theirs = gumbel(token_bits(own.seed, len(self.request.prompt) + at, [score.token, token])).tolist()
        return float(ahead + self.request.params.temperature * (mine - theirs))
