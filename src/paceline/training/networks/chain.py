"""EAGLE-3 and MTP: one layer that is fed with its own output, trained as it will be used.

Of each token t the layer reads its embedding and a feature of token t - 1. In pass 0 that feature is the target's; in
pass i it is what pass i - 1 gave for token t - 1. A row of pass i, whose anchor is token t - i, attends to the entries
of pass 0 up to its anchor and to one entry of each later pass, those between the anchor and itself.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.parts import GatedMLP, Projections, RMSNorm, Rotation, TapProjection
from paceline.training.networks.slots import SlotHead
from paceline.training.target import Batch, States

DECAY = 0.8


def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """q [B, T, H, d] of pass i = len(keys) - 1 over entries [B, T, G, d] of passes 0 .. i -> [B, T, H * d]. A text's
    first token has no entry; rows that see none at all mean nothing."""
    size, length, heads, dim = q.shape
    last, groups = len(keys) - 1, keys[0].shape[2]
    q = q.view(size, length, groups, heads // groups, dim) * dim ** -0.5
    by_group = q.permute(0, 2, 3, 1, 4)  # [B, G, R, T, d]
    far = (by_group @ keys[0].permute(0, 2, 3, 1)[:, :, None]).float()  # [B, G, R, T, T]
    places = torch.arange(length, device=q.device)
    seen = (places[None] <= places[:, None] - last) & (places[None] >= 1)
    seen[:last + 1, 0] = True
    far = far.masked_fill(~seen, -torch.inf)
    # The entry of pass j for a row at t lies at t - last + j.
    near = [(q * one.roll(last - step, 1)[:, :, :, None]).sum(-1).float().permute(0, 2, 3, 1)
            for step, one in enumerate(keys[1:], 1)]  # [B, G, R, T]
    peak = far.amax(-1)
    for one in near:
        peak = torch.maximum(peak, one)
    peak = peak.detach()
    far = (far - peak[..., None]).exp()
    total = far.sum(-1)
    mixed = far.to(q.dtype) @ values[0].transpose(1, 2)[:, :, None]
    for step, one in enumerate(near, 1):
        weight = (one - peak).exp()
        total = total + weight
        own = values[step].roll(last - step, 1).transpose(1, 2)[:, :, None]  # [B, G, 1, T, d]
        mixed = mixed + weight[..., None].to(q.dtype) * own
    mixed = (mixed / total[..., None]).to(q.dtype)
    return mixed.permute(0, 3, 1, 2, 4).reshape(size, length, heads * dim)


class ChainLayer(nn.Module):
    """A decoder layer without its first norm."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        self.self_attn = Projections(config, inputs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def run(self, x: torch.Tensor, onto: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor],
            rotate: Rotation) -> torch.Tensor:
        """onto + attention(x), then + feed-forward; the keys and values of x are added to the lists."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        keys.append(rotate(self.self_attn.keys(x), positions))
        values.append(self.self_attn.values(x))
        onto = onto + self.self_attn.o_proj(attend(rotate(self.self_attn.queries(x), positions), keys, values))
        out: torch.Tensor = onto + self.mlp(self.post_attention_layernorm(onto))
        return out


class ChainHead(SlotHead):
    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config, judge, config.speculative_tokens, DECAY)
        self._rotate = Rotation(config, judge.target.rows, judge.target.device)

    @abstractmethod
    def feature(self, states: States) -> torch.Tensor:
        """What pass 0 reads of the target: [B, T, h]."""

    @abstractmethod
    def layer_pass(self, embedded: torch.Tensor, feature: torch.Tensor, keys: list[torch.Tensor],
                   values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and the features before them -> the feature for the next pass, and what logits are made of."""

    def hidden(self, batch: Batch, states: States, anchors: torch.Tensor) -> torch.Tensor:
        embedded = self._judge.target.embed(batch.tokens)
        feature = self.feature(states)
        keys, values, found = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for step in range(self.slots):
            before = torch.cat([torch.zeros_like(feature[:, :1]), feature[:, :-1]], 1)
            feature, out = self.layer_pass(embedded, before, keys, values)
            places = (anchors + step).clamp(max=batch.tokens.shape[1] - 1)
            found.append(out.gather(1, places[..., None].expand(-1, -1, out.shape[-1])))
        return torch.stack(found, 2)

    def runs(self, batch: Batch, states: States, at_once: int = 1 << 20) -> torch.Tensor:
        return super().runs(batch, states, at_once)


class Eagle3Layer(ChainLayer):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)


class Eagle3(ChainHead):
    """The feature: fc over several streams of the target. What leaves the layer is the next one."""

    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config, judge)
        self.fc = TapProjection(len(config.taps) * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.initialise()
        with torch.no_grad():
            self.norm.weight.copy_(judge.target.final_norm)

    def feature(self, states: States) -> torch.Tensor:
        out: torch.Tensor = self.fc(states.taps)
        return out

    def layer_pass(self, embedded: torch.Tensor, feature: torch.Tensor, keys: list[torch.Tensor],
                   values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], -1)
        out = layer.run(x, feature, keys, values, self._rotate)
        return out, self.norm(out)


class MtpLayer(ChainLayer):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.token_layernorm, self.hidden_layernorm, self.input_layernorm, self.final_layernorm = (
            RMSNorm(config.hidden_size, config.norm_eps) for _ in range(4))


class Mtp(ChainHead):
    """The feature: what the target's head reads. A norm of what leaves the layer is the next one, and read by the
    head."""

    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config, judge)
        layer = MtpLayer(config)
        self.mtp_layers = nn.ModuleList([layer])
        self.initialise()
        with torch.no_grad():
            layer.final_layernorm.weight.copy_(judge.target.final_norm)

    def feature(self, states: States) -> torch.Tensor:
        return states.final

    def layer_pass(self, embedded: torch.Tensor, feature: torch.Tensor, keys: list[torch.Tensor],
                   values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.mtp_layers[0]
        assert isinstance(layer, MtpLayer)
        x = layer.input_proj(torch.cat([layer.token_layernorm(embedded), layer.hidden_layernorm(feature)], -1))
        out = layer.final_layernorm(layer.run(layer.input_layernorm(x), x, keys, values, self._rotate))
        return out, out
