"""ModelShape: what a model weighs, keeps of a text and computes, layer by layer, without a single weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import ConfigError

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5,
        "int4": 4.16}
"""Of a weight, scales included: int4 has a scale and a zero for every 128, mxfp4 and nvfp4 one for every 32 and 16."""
CACHE_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0, "int2": 2.0}
SCALED = frozenset({"int8", "int4", "int2"})
"""Formats of a cache with a float32 scale for every vector of a head."""
STATE_BYTES = 4
"""Of an element of a recurrent state: it is a sum over the whole text, and kept in float32."""


def weight_bits(dtype: str) -> float:
    return _bits(dtype, BITS, "dtype")


def _bits(dtype: str, known: dict[str, float], option: str) -> float:
    if dtype not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {dtype!r}.")
    return known[dtype]


@dataclass(frozen=True, slots=True)
class Mixer:
    """What lets a token see others: attention of any kind, or a recurrence. Sizes in elements."""

    parameters: int
    kind: str
    """mha, mqa, gqa, mla, or recurrent."""
    cached: int = 0
    """Of a token in the cache; 0: there is no cache, or another layer's is read."""
    read: int = 0
    """Of a token in the cache that a query reads."""
    vectors: int = 0
    """Heads' vectors among those read, each with a scale where the cache's format has scales."""
    heads: int = 1
    kv_heads: int = 1
    """Among how many cards the cache can be split."""
    window: int | None = None
    """Tokens that are seen, and need to be kept; None: all."""
    pair_flops: int = 0
    """Of a query with one key and its value, all heads."""
    state: int = 0
    """Of a sequence, whatever its length."""

    def seen(self, tokens: float) -> float:
        return tokens if self.window is None else min(tokens, self.window)

    def pairs(self, queries: int, before: float) -> float:
        """Of queries and keys, when `queries` tokens follow `before` others."""
        if self.window is None or before + queries <= self.window:
            return queries * before + queries * (queries + 1) // 2
        growing = max(0, min(queries, self.window - before))
        return growing * before + growing * (growing + 1) / 2 + (queries - growing) * self.window

    def token_bytes(self, kv_dtype: str, elements: int) -> float:
        """Of so many elements of a token's."""
        bits = _bits(kv_dtype, CACHE_BITS, "kv_dtype")
        scales = 4 * self.vectors if kv_dtype in SCALED and elements else 0
        return elements * bits / 8 + scales


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Sizes in parameters."""

    dense: int = 0
    """What every token passes: a feed-forward, or a router and the experts that all share."""
    experts: int = 0
    chosen: int = 0
    expert: int = 0
    """Of one expert."""

    @property
    def parameters(self) -> int:
        return self.dense + self.experts * self.expert

    @property
    def active(self) -> int:
        return self.dense + self.chosen * self.expert

    def touched(self, tokens: float) -> float:
        """Parameters that so many tokens read."""
        return self.dense + coverage(self.experts, self.chosen, tokens) * self.expert


def coverage(experts: int, chosen: int, tokens: float) -> float:
    """Distinct experts that so many tokens are sent to, on average, if every expert is as likely as any other."""
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens) if experts else 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    mixers: tuple[Mixer, ...]
    """Usually one; some hybrids have attention and a recurrence side by side."""
    feed_forward: FeedForward
    norms: int = 0

    @property
    def parameters(self) -> int:
        return sum(mixer.parameters for mixer in self.mixers) + self.feed_forward.parameters + self.norms


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    """One matrix is embedding and head."""
    context: int | None = None
    """Tokens the model was made for, where its config says."""
    dtype: str = "bfloat16"
    """Of the weights, unless told otherwise."""
    further: int = 0
    """Parameters besides layers, embedding and head: the last norm, learned positions."""
    model_type: str = ""

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def body(self) -> int:
        """All but embedding and head: what quantising rounds."""
        return sum(layer.parameters for layer in self.layers) + self.further

    @property
    def parameters(self) -> int:
        return self.body + self.embedding * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: chosen experts alone, and of the embedding just its head."""
        return sum(sum(mixer.parameters for mixer in layer.mixers) + layer.feed_forward.active + layer.norms
                   for layer in self.layers) + self.embedding

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of mixers, each once, in the order in which they come."""
        return tuple(dict.fromkeys(mixer.kind for mixer in self.mixers))

    @property
    def is_mixture(self) -> bool:
        return any(layer.feed_forward.experts for layer in self.layers)

    def weight_bytes(self, dtype: str | None = None) -> float:
        """On the device. Formats of fewer than 16 bits leave embedding and head in 16, as their files do."""
        bits = weight_bits(dtype or self.dtype)
        return (self.body * bits + (self.parameters - self.body) * max(bits, 16.0)) / 8

    def read_bytes(self, tokens: float, dtype: str | None = None) -> float:
        """Weights that a step of so many tokens reads: of experts those that are chosen, of an embedding that is not
        the head as well next to nothing."""
        bits = weight_bits(dtype or self.dtype)
        body = self.further + sum(sum(mixer.parameters for mixer in layer.mixers) + layer.feed_forward.touched(tokens)
                                  + layer.norms for layer in self.layers)
        return (body * bits + self.embedding * max(bits, 16.0)) / 8

    def cache_bytes(self, tokens: int, kv_dtype: str = "bfloat16") -> float:
        """Of one sequence of so many tokens: keys and values, or latents, within windows, and recurrent states."""
        return sum(mixer.token_bytes(kv_dtype, mixer.cached) * mixer.seen(tokens) + mixer.state * STATE_BYTES
                   for mixer in self.mixers)

    def cache_bytes_per_token(self, kv_dtype: str = "bfloat16") -> float:
        """That a token adds as long as no window is full."""
        return sum(mixer.token_bytes(kv_dtype, mixer.cached) for mixer in self.mixers)

    def cache_cards(self, cards: int) -> int:
        """Among how many cards a cache is split: by its heads. A latent is on each."""
        return max(1, min(cards, max((mixer.kv_heads for mixer in self._alike if mixer.cached), default=cards)))

    @property
    def state_bytes(self) -> int:
        """Recurrent states of a sequence."""
        return sum(mixer.state for mixer in self.mixers) * STATE_BYTES

    def attention_bytes(self, tokens: float, kv_dtype: str = "bfloat16") -> float:
        """That one query reads behind so many tokens. Layers that share a cache read it each; states are read and
        written."""
        return sum(count * (mixer.token_bytes(kv_dtype, mixer.read) * mixer.seen(tokens)
                            + 2 * mixer.state * STATE_BYTES) for mixer, count in self._alike.items())

    def attention_flops(self, queries: int, before: float) -> float:
        return float(sum(count * (mixer.pair_flops * mixer.pairs(queries, before) + 6 * mixer.state * queries)
                         for mixer, count in self._alike.items()))

    @cached_property
    def _alike(self) -> Counter[Mixer]:
        """How many mixers there are of each kind and size: few are different."""
        return Counter(self.mixers)
