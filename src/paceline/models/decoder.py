"""Decoder: the frame every architecture here fills: embed, pre-norm blocks with a residual stream, norm, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.errors import ModelFormatError
from paceline.kernels.groups import CacheGroup
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Norm
from paceline.kernels.packed import PackedWeight, Weight, part_of, plain
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import ModelTraits
from paceline.models.layers import AttentionLayer, FeedForward, Linear, load_matrix
from paceline.models.packing import PackingWeights
from paceline.models.part import Held
from paceline.models.rope import Rope
from paceline.models.shard import WHOLE, Shard, shard_of
from paceline.models.split import parted
from paceline.models.translate import module_of
from paceline.models.weight_source import WeightSource


class Block:
    """x + attention(norm x), then + feed_forward(norm x): of what came of the attention, or, where both are parallel,
    of x as well. Either norm may be none."""

    def __init__(self, attention_norm: Norm | None, attention: AttentionLayer, mlp_norm: Norm | None, mlp: FeedForward,
                 *, parallel: bool = False) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.parallel = parallel

    def __call__(self, x: torch.Tensor, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """`rows`: those that are wanted, where not all are."""
        if self.parallel:
            # Normed first: attention may overwrite x.
            normed = context.kernels.norm(x if rows is None else x.index_select(0, rows), self.mlp_norm)
            attended = self.attention(x, self.attention_norm, context, cos, sin, rows)
            return self.mlp(normed, None, context.kernels, attended)
        x = self.attention(x, self.attention_norm, context, cos, sin, rows)
        return self.mlp(x, self.mlp_norm, context.kernels)

    def reduced(self, x: torch.Tensor, context: Forward, cos: torch.Tensor, sin: torch.Tensor, attention: bool,
                mlp: bool) -> torch.Tensor:
        """The same with a part, or both, left out."""
        if attention and mlp:
            return self(x, context, cos, sin)
        if attention:
            x = self.attention(x, self.attention_norm, context, cos, sin)
        return self.mlp(x, self.mlp_norm, context.kernels) if mlp else x


class Decoder(ModelTraits, ABC):
    """Implements CausalLM. An architecture says what its attention and its feed-forward are made of and, where they are
    not the usual ones, its norms, the shape of its blocks and how its checkpoints lay out their tensors."""

    def __init__(self, config: ModelConfig, weights: WeightSource, max_model_len: int) -> None:
        """Takes the tensors out of `weights`; positions up to max_model_len - 1 can be run."""
        if max_model_len < 1:
            raise ModelFormatError(f"max_model_len must be at least 1, got {max_model_len}.")
        self.config = config
        self.built_for = max_model_len
        self.shard = shard_of(weights)
        self.cache_groups = cache_groups(config, self.shard)
        weights = self.translated(weights)
        self.embedding = self._vocabulary(weights, "model.embed_tokens.weight")
        factors = None
        if config.rope.kind == "factors":
            factors = weights.take(ROPE_FACTORS, (config.rope.rotary_dim // 2,), torch.float32)
        self.rope = self.local_rope = Rope(config, max_model_len, self.embedding.device, factors)
        if config.local_rope is not None:
            self.local_rope = Rope(replace(config, rope=config.local_rope), max_model_len, self.embedding.device)
        self.positions = self._learned_positions(weights, max_model_len) if config.learned_positions else None
        self.blocks = [self.block(weights, layer) for layer in range(config.num_layers)]
        self.norm = self.load_norm(weights, "model.norm")
        tied = config.tie_word_embeddings
        self.head = Linear(self.embedding if tied else self._vocabulary(weights, "lm_head.weight"),
                           modules=[module_of(weights, "lm_head", config.vocab_size)],
                           held=Held((config.vocab_size, config.hidden_size), self.shard.rows(config.vocab_size)))
        if isinstance(weights, PackingWeights):
            self.bits, self.quantization = weights.bits, weights.quantization
        dtype = self.embedding.dtype if isinstance(self.embedding, torch.Tensor) else torch.float32
        self.embedding_scale = torch.tensor(self.embedding_factor, dtype=dtype).item()
        """Rounded to what the model computes in, as checkpoints were trained with."""

    @property
    def embedding_factor(self) -> float:
        """What embeddings are multiplied by."""
        return 1.0

    def translated(self, weights: WeightSource) -> WeightSource:
        """The checkpoint under Llama's names and in its layout."""
        return weights

    def load_norm(self, weights: WeightSource, name: str, size: int | None = None) -> Norm:
        """The norm of this name, over the residual stream or `size` features: RMS norm unless overridden."""
        return Norm(weights.take(f"{name}.weight", (size or self.config.hidden_size,)), self.config.norm_eps)

    def block(self, weights: WeightSource, layer: int) -> Block:
        """One layer: norms before attention and feed-forward unless overridden."""
        prefix = f"model.layers.{layer}"
        return Block(self.load_norm(weights, f"{prefix}.input_layernorm"), self.attention(weights, layer),
                     self.load_norm(weights, f"{prefix}.post_attention_layernorm"), self.feed_forward(weights, layer),
                     parallel=self.config.parallel_residual)

    @abstractmethod
    def attention(self, weights: WeightSource, layer: int) -> AttentionLayer:
        """The attention of one layer, built from its tensors."""

    @abstractmethod
    def feed_forward(self, weights: WeightSource, layer: int) -> FeedForward:
        """The feed-forward part of one layer, built from its tensors."""

    def linears(self) -> list[Linear]:
        """Those through which all rows of a step go, by calls of kernels with the weight itself: adapters can add to
        them. A sublayer that has such names them by a method of the same name."""
        parts = [part for block in self.blocks for part in (block.attention, block.mlp)]
        return [linear for part in parts for linear in getattr(part, "linears", list)()] + [self.head]

    def _vocabulary(self, weights: WeightSource, name: str) -> Weight:
        """A matrix with a row for each token, of which this rank has some."""
        size, width = self.config.vocab_size, self.config.hidden_size
        part = self.shard.rows(size)
        if part is None:
            return load_matrix(weights, [name], [size], width)
        return part_of(load_matrix(parted(weights, {name: ((size, width), part)}), [name], [part.count], width), size)

    def _learned_positions(self, weights: WeightSource, max_model_len: int) -> torch.Tensor:
        known = self.config.max_position_embeddings
        if max_model_len > known:
            raise ModelFormatError(f"This model has learned {known} positions and no others: max_model_len must be at "
                                   f"most {known}, got {max_model_len}.")
        return weights.take("model.embed_positions.weight", (known, self.config.hidden_size))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            rows = self._rows(token_ids)
        else:
            begin, end = self.shard.span(self.config.vocab_size)
            elsewhere = (token_ids < begin) | (token_ids >= end)
            rows = self.shard.merged(self._rows((token_ids - begin).masked_fill(elsewhere, 0))
                                     .masked_fill(elsewhere[:, None], 0))
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding.rows(ids) if isinstance(self.embedding, PackedWeight) else F.embedding(
            ids, self.embedding)

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        end = len(self.blocks) if last is None else last
        positions = context.layout.positions
        if self.positions is not None and first == 0 < end:
            hidden = hidden + F.embedding(positions, self.positions)
        wide = self.rope.at(positions)
        local = wide if self.local_rope is self.rope else self.local_rope.at(positions)
        taps = context.taps
        for index in range(first, end):
            if index in taps:
                context.tapped[index] = hidden.clone()
            block = self.blocks[index]
            cos, sin = wide if self.config.windows[index] is None else local
            if context.skip:
                hidden = block.reduced(hidden, context, cos, sin, (index, "attn") not in context.skip,
                                       (index, "mlp") not in context.skip)
            else:
                hidden = block(hidden, context, cos, sin, context.leaving if index + 1 == len(self.blocks) else None)
        if end == len(self.blocks) and end in taps:
            context.tapped[end] = hidden.clone()  # as above: who taps may keep it for some steps
        return hidden

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        logits = self.shard.joined(kernels.head(hidden, self.norm, self.head.weight, self.head.bias),
                                   self.shard.widths(self.config.vocab_size))
        return kernels.softcap(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def whole_head(self) -> torch.Tensor:
        """[vocabulary, h] in floats, where ranks have some rows each: for draft heads, which borrow it."""
        if self.shard.size == 1:
            return plain(self.head.weight)
        widths = self.shard.widths(self.config.vocab_size)
        return self.shard.joined(plain(self.head.weight).t().contiguous(), widths).t().contiguous()

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        return self.layers(self.embed(token_ids), context)


ROPE_FACTORS = "rope_freqs.weight"
"""GGUF files of models with scaled rotary positions carry the divisors of their frequencies as this tensor."""


def cache_groups(config: ModelConfig, shard: Shard = WHOLE) -> tuple[CacheGroup, ...]:
    """Layers with the same window share a block table; full attention first. Of the heads' keys a rank has its own."""
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    return tuple(
        CacheGroup(name="full" if window is None else f"window-{window}",
                   layers=tuple(layer for layer, own in enumerate(config.windows)
                                if own == window and config.kv_source(layer) == layer),
                   kv_heads=shard.heads(config).keys, head_dim=config.head_dim, window=window,
                   latent=None if config.latent is None else config.latent.rank,
                   readers=tuple((layer, config.kv_source(layer)) for layer, own in enumerate(config.windows)
                                 if own == window and config.kv_source(layer) != layer))
        for window in windows)
