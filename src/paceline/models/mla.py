"""Multi-head latent attention (MLA), absorbed: keys and values of a token are one latent vector, never unfolded.

What is cached of a token is its latent c (d_c features, normed) and one rotated key k_r (d_r features) for all heads.
Head h has keys W_UK[h] c and values W_UV[h] c. Since q . (W_UK c) = (W_UK^T q) . c, queries are brought into the
latent space instead, attention runs over the cache as it is (one KV head whose values are the beginning of its keys),
and what comes out, a mean of latents, goes through W_UV. Decoding, verification and prompts all take this one form: a
second one for prompts would give their rows other bits than the same rows decoded, and break the promise that chunking
and speculation change nothing.

W_UK^T and W_UV are laid out by head once, at load. They are not multiplied into W_Q and W_O: products of a rank as low
as these (128 of a head's features between 512 latent ones) would be several times larger than their factors, and
decoding is bound by the bytes it reads.
"""

from __future__ import annotations

import math

import torch

from paceline.errors import ModelFormatError
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Norm
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.deepseek_config import LatentConfig
from paceline.models.forward import Forward
from paceline.models.layers import Linear, load_linear, load_return
from paceline.models.part import Part
from paceline.models.shard import shard_of
from paceline.models.weight_source import WeightSource, take_part

NORM_EPS = 1e-6
"""Of the norms inside attention: DeepSeek's own, whatever rms_norm_eps says."""


class LatentAttention:
    """x + attention(norm x) of one layer."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        shape = config.latent
        if shape is None:
            raise ModelFormatError(f"config.json has no kv_lora_rank; a {config.model_type} model needs it.")
        shard = shard_of(weights)
        share = shard.heads(config)
        self.layer, self.shape, self.heads = layer, shape, share.query
        self.scale = score_scale(shape, config.rope)
        prefix, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        own, end = share.first, share.first + share.query
        wide = shape.nope_dim + shape.rope_dim
        queries, by_rank = config.num_heads * wide, Part(0, ((own * wide, end * wide),)) if share.split else None

        def linear(name: str, out: int, inputs: int, bias: bool = False, rows: Part | None = None) -> Linear:
            return load_linear(weights, [f"{prefix}.{name}"], [out], inputs, bias, [rows])

        def norm(name: str, size: int) -> Norm:
            return Norm(weights.take(f"{prefix}.{name}.weight", (size,)), NORM_EPS)

        self.query_down: Linear | None = None
        self.query_norm: Norm | None = None
        if shape.query_rank is None:
            self.query = linear("q_proj", queries, hidden, rows=by_rank)
        else:
            self.query_down = linear("q_a_proj", shape.query_rank, hidden, config.attention_bias)
            self.query_norm = norm("q_a_layernorm", shape.query_rank)
            self.query = linear("q_b_proj", queries, shape.query_rank, rows=by_rank)
        self.key_down = linear("kv_a_proj_with_mqa", shape.rank + shape.rope_dim, hidden, config.attention_bias)
        self.key_norm = norm("kv_a_layernorm", shape.rank)
        wide = shape.nope_dim + shape.value_dim
        unfold = take_part(weights, f"{prefix}.kv_b_proj.weight", (config.num_heads * wide, shape.rank),
                           Part(0, ((own * wide, end * wide),)))
        by_head = unfold.view(self.heads, -1, shape.rank)
        self.into_latent = by_head[:, :shape.nope_dim].transpose(1, 2).contiguous()
        """[H, d_c, d_nope]: W_UK^T."""
        self.out_of_latent = by_head[:, shape.nope_dim:].contiguous()
        """[H, d_v, d_c]: W_UV."""
        widths = [self.heads * shape.value_dim] * (shard.size if share.split else 1)
        self.out = load_return(weights, f"{prefix}.o_proj", hidden, widths, config.attention_bias)

    def __call__(self, x: torch.Tensor, norm: Norm | None, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """As Attention: of these rows only where some are named; x may be overwritten."""
        kernels, cache, view = context.kernels, context.cache(self.layer), context.view(self.layer)
        normed = kernels.norm(x, norm)
        kernels.store_keys(cache.keys, view.slots, self.keys(normed, kernels, cos, sin))
        mixed = kernels.attend(self.queries(normed, kernels, cos, sin), cache.keys, cache.values, context.layout, view,
                               self.scale)
        if rows is not None:
            mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
            kernels = context.keep(rows)
        values = kernels.linear_by_head(mixed, self.out_of_latent).reshape(x.shape[0], -1)
        return self.out.add(x, values, kernels)

    def linears(self) -> list[Linear]:
        """For adapters; what is laid out by head is not among them."""
        return [linear for linear in (self.query_down, self.query, self.key_down, self.out) if linear is not None]

    def keys(self, normed: torch.Tensor, kernels: Kernels, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """What is cached of each row: [N, 1, d_c + d_r]."""
        down, rank = self.key_down(normed, kernels)[:, None], self.shape.rank
        latent = kernels.rms_norm(down[..., :rank], self.key_norm.weight, self.key_norm.eps)
        return torch.cat((latent, self.turned(down[..., rank:], kernels, cos, sin)), dim=-1)

    def queries(self, normed: torch.Tensor, kernels: Kernels, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[N, H, d_c + d_r]: of each head what is compared with latents, then with rotated keys."""
        q, still = self.queries_by_head(normed, kernels), self.shape.nope_dim
        latent = kernels.linear_by_head(q[..., :still], self.into_latent)
        return torch.cat((latent, self.turned(q[..., still:], kernels, cos, sin)), dim=-1)

    def queries_by_head(self, normed: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[N, H, d_nope + d_r], as the checkpoint has them: outside the latent space, not rotated."""
        if self.query_down is not None and self.query_norm is not None:
            normed = kernels.rms_norm(self.query_down(normed, kernels), self.query_norm.weight, self.query_norm.eps)
        return self.query(normed, kernels).reshape(normed.shape[0], self.heads, -1)

    def turned(self, x: torch.Tensor, kernels: Kernels, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[N, H, d_r] rotated, pairs in halves. Checkpoints have the features of a pair side by side; queries and keys
        are reordered alike, which their products do not see. The weights stay as they are stored."""
        if self.shape.interleaved:
            x = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return kernels.rotate(x, cos, sin)


def score_scale(shape: LatentConfig, rope: RopeConfig) -> float:
    """What scores are multiplied with. Where yarn stretches the positions, DeepSeek sharpens all features of queries
    and keys by mscale_all_dim, and takes that out of the rotated ones again (models.rope)."""
    scale: float = (shape.nope_dim + shape.rope_dim) ** -0.5
    stretch, mscale = float(rope.settings.get("factor") or 1.0), float(rope.settings.get("mscale_all_dim") or 0.0)
    sharper = 0.1 * mscale * math.log(stretch) + 1.0 if rope.kind != "default" and stretch > 1 else 1.0
    return scale * sharper * sharper
