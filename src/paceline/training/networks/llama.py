"""A whole decoder of Llama's shape as a torch module: the draft model that `paceline train draft` distils."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.training.networks.parts import GatedMLP, LayerShape, Projections, RMSNorm, Rotation


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    positions: int
    tied: bool = True

    def config(self) -> dict[str, object]:
        """config.json."""
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size, "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim, "intermediate_size": self.intermediate_size,
                "max_position_embeddings": self.positions, "rms_norm_eps": self.norm_eps,
                "rope_theta": self.rope_theta, "hidden_act": "silu", "tie_word_embeddings": self.tied}


class Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Projections(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, rotate: Rotation) -> torch.Tensor:
        normed = self.input_layernorm(x)
        attention = self.self_attn
        q, k = rotate(attention.queries(normed), positions), rotate(attention.keys(normed), positions)
        v = attention.values(normed)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
            enable_gqa=attention.heads != attention.kv_heads).transpose(1, 2).flatten(2)
        x = x + attention.o_proj(mixed)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Tied: the embedding is the head too."""

    def __init__(self, shape: LlamaShape, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self._rotate = Rotation(shape, shape.positions, device)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] -> behind the final norm [B, T, h]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, positions, self._rotate)
        out: torch.Tensor = self.norm(x)
        return out
