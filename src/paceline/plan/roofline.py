"""How long a step takes: bytes over bandwidth, work over arithmetic, for matrices and for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.plan.hardware import Hardware
from paceline.plan.shape import ModelShape

REDUCTIONS = 2
"""Times a layer that is split between cards sums up what each of them has."""
REDUCTION_S = 10e-6
"""Seconds that a sum between cards takes at least."""
_MOST_TOKENS = 1 << 20


def decode_floor(weight_bytes: float, cache_bytes: float, bandwidth: float) -> float:
    """Seconds that a token takes at least: everything is read once."""
    return (weight_bytes + cache_bytes) / bandwidth


def mlp_intensity(tokens: float, weight_bytes: float = 2.0) -> float:
    """FLOP/byte of a matrix: two for each weight and token. With 16 bits that is the number of tokens."""
    return 2.0 * tokens / weight_bytes


def attention_intensity(queries: int, keys: int, heads: int, kv_heads: int, cache_bytes: float = 2.0) -> float:
    """FLOP/byte of attention, all pairs counted: S/2 for a prompt of S tokens, below 1 for a token of MHA and nearly
    the size of a group for one of GQA. A causal mask that is made use of halves the first."""
    return 2.0 * heads * queries * keys / (cache_bytes * (kv_heads * keys + heads * queries))


def forward_flops(parameters: float, tokens: float) -> float:
    """Two for each parameter and token; training's six are those and four backwards."""
    return 2.0 * parameters * tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, by what they go to."""

    matrices: float
    attention: float
    links: float = 0.0
    starts: float = 0.0
    compute_bound: bool = False
    """Of matrices, whether arithmetic takes longer than reading."""

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.links + self.starts


@dataclass(frozen=True)
class Roofline:
    """A model on hardware, both in given formats."""

    shape: ModelShape
    hardware: Hardware
    dtype: str
    kv_dtype: str

    def step(self, sequences: int, rows: int, context: float) -> StepTime:
        """`rows` new tokens of each sequence, behind `context` others: a decode step has one, a prompt all of its own,
        a step that verifies K drafted tokens K + 1."""
        return self.mixed([(sequences, rows, context)])

    def mixed(self, parts: Sequence[tuple[int, int, float]]) -> StepTime:
        """A step of several kinds of sequences, each as step() takes them: chunks of prompts beside those who
        decode."""
        hardware, shape = self.hardware, self.shape
        tokens = sum(sequences * rows for sequences, rows, _ in parts)
        reading, computing = self._matrices(tokens, sum(sequences for sequences, _, _ in parts))
        cards = shape.cache_cards(hardware.count)
        arithmetic = hardware.arithmetic("bfloat16" if self.dtype != "float32" else "float32")
        cached = sum(sequences * shape.attention_bytes(context + rows, self.kv_dtype) / cards / hardware.bandwidth
                     for sequences, rows, context in parts)
        paired = sum(sequences * shape.attention_flops(rows, context) / hardware.count / arithmetic
                     for sequences, rows, context in parts)
        return StepTime(self._together(reading, computing), self._together(cached, paired), self._links(tokens),
                        hardware.layer_s * len(shape.layers), computing > reading)

    def read_bytes(self, parts: Sequence[tuple[int, int, float]]) -> float:
        """Of memory, by each card, in such a step."""
        shape, hardware = self.shape, self.hardware
        weights = shape.read_bytes(sum(sequences * rows for sequences, rows, _ in parts), self.dtype) / hardware.count
        return weights + sum(sequences * shape.attention_bytes(context + rows, self.kv_dtype)
                             for sequences, rows, context in parts) / shape.cache_cards(hardware.count)

    def prefill(self, tokens: int) -> float:
        """Seconds of a whole prompt: the time to its first token when nobody else is there."""
        return self.step(1, tokens, 0).total

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a step that gives each of `batch` sequences a token."""
        return self.step(batch, 1, context).total

    def verify(self, batch: int, rows: int, context: float) -> float:
        """Seconds of a step with `rows` tokens of each sequence, drafted but for the first."""
        whole = self.step(batch, rows, context)
        if self.hardware.drafted_s is None:
            return whole.total
        more = sum(self._matrices(batch * rows, batch)) - sum(self._matrices(batch, batch))
        plain = self.step(batch, 1, context)
        return (whole.total - whole.matrices + plain.matrices + more
                + self.hardware.drafted_s * len(self.shape.layers))

    def compute_batch(self) -> int | None:
        """The smallest number of tokens in a step at which matrices are computed longer than they are read; None:
        there is none."""
        def bound(tokens: int) -> bool:
            flops = self._matrix_flops(tokens, tokens) / self.hardware.arithmetic(self.dtype)
            return flops >= self.shape.read_bytes(tokens, self.dtype) / self.hardware.bandwidth

        return smallest(bound, _MOST_TOKENS)

    def _matrices(self, tokens: int, sampled: int) -> tuple[float, float]:
        """Seconds in which they are read and in which they are computed with."""
        known = self._known.get((tokens, sampled))
        if known is None:
            known = self._known[tokens, sampled] = self._matrix_seconds(tokens, sampled)
        return known

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[float, float]]:
        """A simulation asks for the same few thousand steps millions of times."""
        return {}

    def _matrix_seconds(self, tokens: int, sampled: int) -> tuple[float, float]:
        hardware = self.hardware
        return (self.shape.read_bytes(tokens, self.dtype) / hardware.count / hardware.bandwidth,
                self._matrix_flops(tokens, sampled) / hardware.count / hardware.arithmetic(self.dtype))

    def _matrix_flops(self, tokens: int, sampled: int) -> float:
        """The head is for tokens that something is sampled after; of a prompt's that is the last."""
        heads = sampled if tokens > 64 * sampled else tokens
        return forward_flops(self.shape.active - self.shape.embedding, tokens) + forward_flops(
            self.shape.embedding, heads)

    def _together(self, reading: float, computing: float) -> float:
        return max(reading, computing) + (1.0 - self.hardware.overlap) * min(reading, computing)

    def _links(self, tokens: int) -> float:
        """Every sum goes around all cards once each way."""
        count = self.hardware.count
        if count == 1:
            return 0.0
        sent = 2.0 * (count - 1) / count * tokens * self.shape.hidden * 2 / (self.hardware.link or 1e9)
        return REDUCTIONS * len(self.shape.layers) * (sent + REDUCTION_S)


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """The least whole number from 1 to `most` for which something holds that, once it does, goes on to; None: none."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
