"""A trained head as drafting runs it: what it makes of the target's rows, its passes, what it holds, what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.hardware import Hardware
from paceline.plan.roofline import Roofline
from paceline.plan.shape import CACHE_BITS, FeedForward, Layer, ModelShape, weight_bits

WIDE = 16
"""Bits, at least, of what heads keep of a token, and of matrices over a vocabulary."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes in parameters, where nothing else is said."""

    hidden: int
    vocab: int
    """Tokens that it can draft."""
    passes: tuple[tuple[Layer, ...], ...]
    """Layers of each pass; the last stands for all that follow."""
    rows: int | None = None
    """Of the one pass that drafts a whole block, however few tokens are wanted; None: a pass drafts one token."""
    taken: int = 0
    """What rows of the target go through once they are computed, so that passes can look back at them."""
    entry: int = 0
    """Of every pass, beside its layers."""
    following: int = 0
    """Of every token of a block, since it depends on the one before it."""
    at_once: bool = False
    """The matrix over the draft vocabulary is read once for all tokens; else in every pass."""
    body: int = 0
    """Of its own, but for what is next."""
    matrices: int = 0
    """Of its own over a vocabulary: output, embeddings."""
    copied: int = 0
    """Rows of the target's output matrix, for a draft vocabulary that is not the whole."""
    kept: int = 0
    """Numbers of a token."""

    @property
    def parameters(self) -> int:
        return self.body + self.matrices

    def weight_bytes(self, dtype: str) -> float:
        bits = weight_bits(dtype)
        return (self.body * bits + (self.matrices + self.copied) * max(bits, WIDE)) / 8

    def cache_bytes(self, tokens: int, kv_dtype: str) -> float:
        """Of one sequence: a window bounds what is read, and blocks are the target's."""
        return tokens * self.kept * max(CACHE_BITS[kv_dtype], WIDE) / 8

    def seconds(self, hardware: Hardware, dtype: str, kv_dtype: str, batch: int, context: int, k: int) -> float:
        """Of a draft of K tokens for each of `batch` sequences, and of what the K + 1 rows that verify it leave."""
        planes = kv_dtype if CACHE_BITS[kv_dtype] >= WIDE else "float16"

        def run(rows: int, layers: tuple[Layer, ...] = (), beside: int = 0, vocab: int = 0) -> float:
            part = ModelShape("a part of a head", self.hidden, vocab, layers, True, further=beside)
            return Roofline(part, hardware, dtype, planes).step(batch, rows, context).total

        found = run(k + 1, (Layer((), FeedForward(self.taken)),)) if self.taken else 0.0
        if self.at_once:
            found += run(k, vocab=self.vocab)
        if self.rows is not None:
            return found + run(self.rows, self.passes[0], self.entry) + k * run(1, beside=self.following)
        each = [run(1, layers, self.entry, 0 if self.at_once else self.vocab) for layers in self.passes[:k]]
        return found + sum(each) + (k - len(each)) * each[-1]


def attending(target: ModelShape) -> Layer:
    """The last layer of the target that has keys of its own, such as a head may have one more of."""
    return next((layer for layer in reversed(target.layers) if _cached(layer)), target.layers[-1])


def thin(target: ModelShape) -> Layer:
    """The first of them, without any experts: with one feed-forward as wide as a token's."""
    layer = next((layer for layer in target.layers if _cached(layer)), target.layers[0])
    return Layer(layer.mixers, FeedForward(layer.feed_forward.active), layer.norms)


def block(target: ModelShape, layers: int, vocab: int, rows: int) -> HeadShape:
    """So many thin layers of the target's, as many of its streams, and a part of its output matrix."""
    layer, hidden = thin(target), target.hidden
    vocab, fused = min(vocab, target.vocab), layers * hidden**2
    return HeadShape(
        hidden=hidden, vocab=vocab, passes=((layer,) * layers,), rows=rows, at_once=True,
        taken=fused + layers * _keys(layer, hidden), body=fused + layers * layer.parameters,
        copied=_copied(target, vocab), kept=layers * _cached(layer))


def chain(target: ModelShape, layer: Layer, vocab: int, streams: int, fused_once: bool) -> HeadShape:
    """A layer behind a projection of several streams: of the target's, once for each of its rows, or of token and
    feature, in every pass."""
    hidden, fused, vocab = target.hidden, streams * target.hidden**2, min(vocab, target.vocab)
    return HeadShape(
        hidden=hidden, vocab=vocab, passes=((layer,),), taken=fused + _keys(layer, hidden),
        entry=0 if fused_once else fused, body=fused + layer.parameters, copied=_copied(target, vocab),
        kept=_cached(layer) + hidden)


def networks(target: ModelShape, heads: int, sees_tokens: bool) -> HeadShape:
    """A square matrix and a whole output matrix for each token ahead; where the tokens before are seen, two as much
    wider."""
    hidden = target.hidden
    sizes = [2 * (2 + head) * hidden**2 if sees_tokens else hidden**2 for head in range(heads)]
    return HeadShape(hidden=hidden, vocab=target.vocab, passes=tuple((Layer((), FeedForward(size)),) for size in sizes),
                     body=sum(sizes), matrices=heads * target.embedding, kept=hidden)


def _cached(layer: Layer) -> int:
    return sum(mixer.cached for mixer in layer.mixers)


def _keys(layer: Layer, hidden: int) -> int:
    """What makes keys and values, or latents, of a row."""
    return _cached(layer) * hidden


def _copied(target: ModelShape, vocab: int) -> int:
    return vocab * target.hidden if vocab < target.vocab else 0
