"""HeadConfig: the shape of a trained draft head, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig

BLOCK_KINDS = ("dflash", "dspark")
"""Draft a whole block in one pass."""
CHAIN_KINDS = ("eagle1", "eagle3", "mtp")
"""Draft one token a pass, fed with their own output."""
HEAD_KINDS = ("medusa", "hydra")
"""One small network a token, all of them on the same hidden state."""
KINDS = (*BLOCK_KINDS, *CHAIN_KINDS, *HEAD_KINDS)
MOST_DRAFTED = 256
"""Tokens of a block, or heads side by side: a file does not make rows or networks without number."""
MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a head and of the target that it was trained for. Names are those of the speculators format where it
    has them; a field that a kind has no use for keeps its default."""

    kind: str
    hidden_size: int
    """Of the head and of the target's residual stream."""
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Tokens that the head can draft: draft id i stands for the target's id i + d2t[i]. As large as the target's
    vocabulary: ids are the target's own."""
    taps: tuple[int, ...]
    """What is read of the target, as Forward.taps names it: i is the residual stream that ENTERS layer i, the number of
    layers what leaves the last one, before the final norm."""
    num_layers: int = 1
    """Decoder layers of the head; Medusa: residual layers of each head."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """As in a config.json."""
    max_position_embeddings: int = 2048
    block_size: int = 0
    """Rows of a block: the anchor and the masks."""
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    """Slot j of a block predicts the token after position anchor + j; else (DFlash) that position itself."""
    markov_rank: int = 0
    """0: no Markov head."""
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = True
    """The confidence head also sees W1 of the token before."""
    qk_norm: bool = False
    """Queries and keys are normed, each head by itself."""
    attention_bias: bool = False
    """On the projections of queries, keys and values."""
    heads: int = 0
    """Medusa and Hydra: how many there are."""
    norm_before_residual: bool = False
    """EAGLE-3: what goes past the attention is normed as well."""
    norm_before_fc: bool = False
    """EAGLE-3: the tapped streams, side by side, are normed before `fc`."""
    fc_bias: bool = False
    target_layer: bool = False
    """MTP: the layer is one more of the target's own kind, with latent attention or experts as those have."""
    own_embedding: bool = False
    """The checkpoint brings `embed_tokens`; else the target's is used."""
    own_lm_head: bool = False
    """The checkpoint brings `lm_head` (Medusa, Hydra: one for each of the networks, as published); else it is the
    target's, its rows of the draft vocabulary."""
    whole_vocabulary: bool = False
    """It has learned to draft any token of the target's; those of the draft vocabulary come most often, and are the
    ones that a Markov head knows. Needs the target's lm_head."""
    window: int | None = None
    """Tokens up to a row's own that its layers see: behind more than a head has learned to read it drafts badly, and
    what is nearest is enough. None: all there are."""
    speculative_tokens: int = 0
    """How many it was trained to draft; 0: nothing is said."""
    tokenizer: str | None = None
    """Fingerprint of the target's tokenizer, where it was written down."""
    target: str | None = None
    """What the target was called."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelFormatError(f"A draft head of kind {self.kind!r} is not supported; supported are "
                                   f"{', '.join(KINDS)}.")
        for name in ("hidden_size", "vocab_size", "draft_vocab_size", "num_layers", "max_position_embeddings"):
            if getattr(self, name) < (0 if name == "num_layers" and self.kind == "medusa" else 1):
                raise self._wrong(name, "a positive whole number")
        if self.draft_vocab_size > self.vocab_size:
            raise self._wrong("draft_vocab_size", f"at most the target's vocabulary ({self.vocab_size})")
        if not self.taps or min(self.taps) < 0:
            raise self._wrong("taps", "layers of the target, at least one")
        if self.norm_eps <= 0 or self.rope_theta <= 0:
            raise ModelFormatError(f"A {self.kind} head needs a positive norm_eps and rope_theta, got {self.norm_eps} "
                                   f"and {self.rope_theta}.")
        if self.kind in HEAD_KINDS and not 1 <= self.heads <= MOST_DRAFTED:
            raise self._wrong("heads", f"at least 1, and no more than {MOST_DRAFTED}")
        if self.attends:
            self._check_attention()
        if self.kind in BLOCK_KINDS:
            self._check_block()
        if self.whole_vocabulary and (self.own_lm_head or not self.attends):
            raise ModelFormatError(f"A {self.kind} head with a matrix of its own for the draft vocabulary cannot draft "
                                   "from the whole one (whole_vocabulary).")
        if self.kind in ("eagle1", "mtp", *HEAD_KINDS) and len(self.taps) != 1:
            raise self._wrong("taps", "one layer")
        if self.kind in CHAIN_KINDS and self.num_layers != 1:
            raise self._wrong("num_layers", "1")

    def sees(self, window: int | None) -> int | None:
        """The window of its layers where the cache that they read has this one."""
        return min((one for one in (window, self.window) if one is not None), default=None)

    def _check_attention(self) -> None:
        if self.window is not None and self.window < 1:
            raise self._wrong("window", "at least 1, or nothing")
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise self._wrong(name, "a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise self._wrong("num_heads", f"a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise self._wrong("head_dim", "even")

    def _check_block(self) -> None:
        if self.block_size < 2 and not (self.block_size == 1 and self.sample_from_anchor):
            raise self._wrong("block_size", "so large that a token can be drafted")
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise self._wrong("mask_token_id", f"a token of the target's vocabulary ({self.vocab_size})")
        if self.kind == "dflash" and (self.markov_rank or self.confidence_head):
            raise ModelFormatError("A dflash head has neither a Markov nor a confidence head; call it dspark.")
        if self.confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ModelFormatError("A dspark head whose confidence head sees the Markov head"
                                   " (confidence_head_with_markov) needs a markov_rank above 0.")
        if self.markov_rank < 0 or (self.markov_rank and self.markov_head_type not in MARKOV_KINDS):
            raise self._wrong("markov_head_type" if self.markov_rank > 0 else "markov_rank",
                              f"one of {', '.join(MARKOV_KINDS)}" if self.markov_rank > 0 else "at least 0")

    def _wrong(self, name: str, wanted: str) -> ModelFormatError:
        return ModelFormatError(f"A {self.kind} head needs {name} to be {wanted}, got {getattr(self, name)!r}.")

    @property
    def attends(self) -> bool:
        """Whether it has attention of its own, and so keys and values to keep."""
        return self.kind not in HEAD_KINDS

    @property
    def depth(self) -> int | None:
        """The most tokens that a round can draft; None: as many as are asked for."""
        if self.kind in BLOCK_KINDS:
            return self.block_size if self.sample_from_anchor else self.block_size - 1
        return self.heads if self.kind in HEAD_KINDS else None

    @property
    def reduced(self) -> bool:
        """Whether draft ids are other than the target's."""
        return self.draft_vocab_size < self.vocab_size

    def check_target(self, target: ModelConfig, tokenizer: str | None = None) -> None:
        """Raises a ModelFormatError where this head was made for another target than this one."""
        for name, own, found in (("hidden_size", self.hidden_size, target.hidden_size),
                                 ("vocab_size", self.vocab_size, target.vocab_size)):
            if own != found:
                raise ModelFormatError(f"This {self.kind} head was trained for a target with {name} {own}, and the "
                                       f"model's is {found}: load the model it was trained for"
                                       f"{f' ({self.target})' if self.target else ''}, or another head.")
        if max(self.taps) > target.num_layers:
            raise ModelFormatError(f"This {self.kind} head reads layer {max(self.taps)} of its target, and the model "
                                   f"has {target.num_layers}: load the model it was trained for"
                                   f"{f' ({self.target})' if self.target else ''}, or another head.")
        if self.tokenizer is not None and tokenizer is not None and self.tokenizer != tokenizer:
            raise ModelFormatError(f"This {self.kind} head was trained with another tokenizer than the model's: load "
                                   "the model it was trained for, or another head.")
