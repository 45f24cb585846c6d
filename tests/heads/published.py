"""What each kind of head computes, as it was published: plain torch in float64, a whole text at a time, no cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.models.heads.config import HeadConfig

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Text:
    """What a target knows: its weights in float64, the tokens of a text, and what its layers saw of all but the last
    of them."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    tokens: list[int]
    tapped: Mapping[int, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [n, H, d] at positions [n]."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Published:
    def __init__(self, config: HeadConfig, tensors: Tensors, text: Text) -> None:
        self.config, self.text = config, text
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        ids = torch.arange(config.draft_vocab_size)
        if config.reduced:
            ids = ids + tensors["d2t"].long()
        self.ids = ids
        self.embedding = self.tensors.get("embed_tokens.weight", text.embedding)
        self.head = self.tensors.get("lm_head.weight", text.head[ids])
        self.last = rms(text.tapped[config.taps[0]].double(), text.norm, text.norm_eps)
        """What the target's head reads, where the one tap is what leaves its last layer."""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.tensors[f"{name}.weight"], self.config.norm_eps)

    def heads(self, prefix: str, part: str, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        config = self.config
        out = self.linear(f"{prefix}.self_attn.{part}_proj", x).view(len(x), -1, config.head_dim)
        if part == "v":
            return out
        if config.qk_norm:
            out = self.norm(f"{prefix}.self_attn.{part}_norm", out)
        return rotated(out, positions, config.rope_theta)

    def attention(self, prefix: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Every query sees every key."""
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.config.head_dim ** -0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(f"{prefix}.self_attn.o_proj", mixed.flatten(1))

    def feed_forward(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(f"{prefix}.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(self.linear(f"{prefix}.mlp.gate_proj", normed))
        return self.linear(f"{prefix}.mlp.down_proj", gate * self.linear(f"{prefix}.mlp.up_proj", normed))

    def draft(self, drafted: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [K, draft vocabulary] of K = len(drafted) + 1 tokens, and what is said of their acceptance, where the
        tokens `drafted` (the target's ids) were chosen at the first ones."""
        if self.config.kind in ("dflash", "dspark"):
            return self.block(drafted)
        if self.config.kind in ("medusa", "hydra"):
            return self.stacked(drafted), None
        return self.chain(drafted), None

    # ------------------------------------------------------------ DFlash, DSpark

    def block(self, drafted: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        config, anchor = self.config, len(self.text.tokens) - 1
        context = torch.cat([self.text.tapped[tap].double() for tap in config.taps], dim=-1)
        context = self.norm("hidden_norm", self.linear("fc", context))
        x = self.embedding[[self.text.tokens[-1], *[config.mask_token_id] * (config.block_size - 1)]]
        positions = torch.arange(anchor + config.block_size)
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}"
            normed = self.norm(f"{prefix}.input_layernorm", x)
            seen = torch.cat((context, normed))
            k, v = (self.heads(prefix, part, seen, positions) for part in "kv")
            x = x + self.attention(prefix, self.heads(prefix, "q", normed, positions[anchor:]), k, v)
            x = x + self.feed_forward(prefix, x)
        hidden = self.norm("norm", x)[0 if config.sample_from_anchor else 1:]
        previous = [self.text.tokens[-1], *drafted]
        hidden = hidden[:len(previous)]
        logits, confidence = hidden @ self.head.T, None
        seen = hidden
        if config.markov_rank:
            before = self.tensors["markov_head.markov_w1.weight"][previous]
            logits = logits + self.markov(before, hidden) @ self.tensors["markov_head.markov_w2.weight"].T
            if config.confidence_head_with_markov:
                seen = torch.cat((hidden, before), dim=-1)
        if config.confidence_head:
            confidence = torch.sigmoid(self.linear("confidence_head.proj", seen))[:, 0]
        return logits, confidence

    def markov(self, before: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.markov_head_type == "gated":
            return before * torch.sigmoid(self.linear("markov_head.gate_proj", torch.cat((hidden, before), dim=-1)))
        if self.config.markov_head_type == "rnn":
            state, found = torch.zeros_like(before[0]), []
            for own, slot in zip(before, hidden):
                gate, candidate, out = self.linear("markov_head.joint_proj", torch.cat((state, own, slot))).chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                found.append(out.tanh())
            return torch.stack(found)
        return before

    # ------------------------------------------------------------ EAGLE-1, EAGLE-3, MTP

    def chain(self, drafted: Sequence[int]) -> torch.Tensor:
        """Pairs (feature of a token, the token after it), from the first token on; positions count the pairs."""
        kind, tokens = self.config.kind, self.text.tokens
        if kind == "eagle3":
            streams = torch.cat([self.text.tapped[tap].double() for tap in self.config.taps], dim=-1)
            features = self.linear("fc", self.norm("input_norm", streams) if self.config.norm_before_fc else streams)
        else:
            features = self.last
        prefix = "mtp_layers.0" if kind == "mtp" else "layers.0"
        logits = []
        after = tokens[1:]
        for step in range(len(drafted) + 1):
            embedded = self.embedding[after]
            past, seen = self.entered(embedded, features)
            positions = torch.arange(len(after))
            k, v = (self.heads(prefix, part, seen, positions) for part in "kv")
            x = past[-1:] + self.attention(prefix, self.heads(prefix, "q", seen[-1:], positions[-1:]), k, v)
            x = x + self.feed_forward(prefix, x)
            if kind == "eagle3":
                logits.append(self.norm("norm", x) @ self.head.T)
            elif kind == "mtp":
                x = self.norm("mtp_layers.0.final_layernorm", x)
                logits.append(x @ self.head.T)
            else:
                logits.append(x @ self.head.T)
            features, after = torch.cat((features, x)), [*after, *drafted[step:step + 1]]
        return torch.cat(logits)

    def entered(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.kind == "eagle3":
            normed = self.norm("layers.0.hidden_norm", features)
            seen = torch.cat((self.norm("layers.0.input_layernorm", embedded), normed), dim=-1)
            return normed if self.config.norm_before_residual else features, seen
        if self.config.kind == "eagle1":
            x = self.linear("fc", torch.cat((embedded, features), dim=-1))
            return x, x
        both = (self.norm("mtp_layers.0.token_layernorm", embedded),
                self.norm("mtp_layers.0.hidden_layernorm", features))
        x = self.linear("mtp_layers.0.input_proj", torch.cat(both, dim=-1))
        return x, self.norm("mtp_layers.0.input_layernorm", x)

    # ------------------------------------------------------------ Medusa, Hydra

    def stacked(self, drafted: Sequence[int]) -> torch.Tensor:
        logits, previous = [], [self.text.tokens[-1], *drafted]
        for head in range(len(previous)):
            x, mine = self.last[-1], f"{head}"
            if self.config.kind == "hydra":
                x, mine = torch.cat((x, self.embedding[previous[:head + 1]].flatten())), f"hydra_mlp.{head}"
            for layer in range(self.config.num_layers):
                past = f"{mine}.{layer}.res_connection"
                kept = self.linear(past, x) if f"{past}.weight" in self.tensors else x
                x = kept + torch.nn.functional.silu(self.linear(f"{mine}.{layer}.linear", x))
            out = f"hydra_lm_head.{head}" if self.config.kind == "hydra" else f"{head}.{self.config.num_layers}"
            logits.append(self.linear(out, x) if f"{out}.weight" in self.tensors else x @ self.head.T)
        return torch.stack(logits)
