"""What fits: weights, drafters and caches in memory; sequences at once; cards for a rate of requests; what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan.roofline import Roofline

GIB = 1 << 30
BLOCK = 16
"""Tokens of a cache block: of each sequence at most BLOCK - 1 places are empty."""
SPARE = GIB
"""Bytes of a card that steps compute with."""
USABLE = 0.9
"""Share of the memory that weights and caches may take (gpu_memory_utilization)."""
LOAD = 0.8
"""Share of what cards can do at most that is planned with: at all of it queues have no end."""
NEARLY = 0.95
"""Share of the most requests a second that is as good."""
MOST_SEQUENCES = 1 << 14


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on all cards together."""

    usable: float
    weights: float
    drafter: float
    sequence: float
    """Of one sequence's cache, the drafter's included, in whole blocks."""

    @property
    def left(self) -> float:
        """For caches; negative: the weights do not fit."""
        return self.usable - self.weights - self.drafter

    @property
    def sequences(self) -> int:
        """That fit at once."""
        if self.left <= 0:
            return 0
        return MOST_SEQUENCES if self.sequence <= 0 else min(MOST_SEQUENCES, int(self.left // self.sequence))


def blocks(tokens: int) -> int:
    """Tokens that the blocks of so many have room for."""
    return -(-tokens // BLOCK) * BLOCK


def memory_of(roofline: Roofline, tokens: int, drafter_weights: float = 0.0, drafter_sequence: float = 0.0) -> Memory:
    """`tokens`: of a whole text. What heads cannot be split by is on every card."""
    hardware, shape = roofline.hardware, roofline.shape
    usable = hardware.count * max(0.0, USABLE * hardware.memory - SPARE)
    copies = hardware.count / shape.cache_cards(hardware.count)
    sequence = shape.cache_bytes(blocks(tokens), roofline.kv_dtype) * copies + drafter_sequence
    return Memory(usable, shape.weight_bytes(roofline.dtype), drafter_weights, sequence)


@dataclass(frozen=True, slots=True)
class Serving:
    """What one copy of the model can do with a kind of request, `batch` of them at once."""

    batch: int
    tpot_s: float
    """Between two tokens of a request, prompts of others included."""
    requests_per_s: float
    tokens_per_s: float
    """Output tokens."""


def serving(roofline: Roofline, prompt: int, output: int, batch: int) -> Serving:
    """A request takes its prompt's time, and in each decode step its share; steady state."""
    decode = roofline.decode(batch, prompt + output // 2)
    request = roofline.prefill(prompt) + output * decode / batch
    return Serving(batch, request * batch / output, 1.0 / request, output / request)


def best_serving(roofline: Roofline, prompt: int, output: int, most: int, tpot_s: float | None = None
                 ) -> Serving | None:
    """Of batches that fit and keep the time between tokens, the smallest with nearly the most requests a second: beyond
    it everybody just waits longer. None: not even one sequence keeps it."""
    tried = [serving(roofline, prompt, output, batch)
             for batch in sorted({*(1 << power for power in range(most.bit_length())), most}) if batch]
    kept = [one for one in tried if tpot_s is None or one.tpot_s <= tpot_s]
    top = max((one.requests_per_s for one in kept), default=0.0)
    return next((one for one in kept if one.requests_per_s >= NEARLY * top), None)


def copies_for(rate: float, one: Serving) -> int:
    """Copies of the model that serve so many requests a second."""
    return max(1, math.ceil(rate / (LOAD * one.requests_per_s)))


def cost_per_million(price: float, cards: int, tokens_per_s: float) -> float:
    """Dollars for a million tokens, of cards that are never idle."""
    return price * cards / 3600.0 / tokens_per_s * 1e6
