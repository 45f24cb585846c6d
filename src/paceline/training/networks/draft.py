"""A draft model: a decoder of the target's width with few of its layers, which learns to write as the target does.

Embedding and head are the target's own and stay as they are, so that few layers are all there is to learn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from paceline.models.config import ModelConfig
from paceline.models.load.opening import open_checkpoint
from paceline.training.loss import Judge
from paceline.training.networks.llama import Layer, LlamaShape
from paceline.training.networks.parts import RMSNorm, Rotation
from paceline.training.networks.slots import SlotHead
from paceline.training.target import Batch, States

DECAY = 0.8


class DraftModel(SlotHead):
    """Reads none of the target's states."""

    def __init__(self, config: LlamaShape, judge: Judge, slots: int) -> None:
        super().__init__(config, judge, slots, DECAY)
        target = judge.target
        self._rotate = Rotation(config, target.rows, target.device)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.initialise()
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm)

    def hidden(self, batch: Batch, states: States, anchors: torch.Tensor) -> torch.Tensor:
        x = self._judge.target.embed(batch.tokens)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        for layer in self.layers:
            x = layer(x, positions, self._rotate)
        out = self.norm(x)
        places = (anchors[..., None] + torch.arange(self.slots, device=x.device)).clamp(max=x.shape[1] - 1)
        index = places.flatten(1)[..., None].expand(-1, -1, out.shape[-1])
        return out.gather(1, index).view(*places.shape, -1)  # type: ignore[no-any-return]

    def runs(self, batch: Batch, states: States, at_once: int = 1 << 20) -> torch.Tensor:
        return super().runs(batch, states, at_once)

    def exported(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": one for name, one in super().exported().items()}
        target = self._judge.target
        every = torch.arange(self.config.vocab_size, device=target.device)
        found["model.embed_tokens.weight"] = target.embed(every).float().cpu()
        return found if self.config.tied else found | {"lm_head.weight": target.head.float().cpu()}

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        super().take({name.removeprefix("model."): one for name, one in tensors.items()})


def spread(layers: int, kept: int) -> list[int]:
    """Which layers of the target a draft model of `kept` layers begins with: the first, the last, and between them."""
    return [round(place * (layers - 1) / max(1, kept - 1)) for place in range(kept)]


def begin_like(model: DraftModel, path: Path, target: ModelConfig) -> None:
    """With weights of the target's layers where they are of this shape, and as drawn where they are not."""
    with open_checkpoint(path) as checkpoint, torch.no_grad():
        for own, layer in zip(model.layers, spread(target.num_layers, len(model.layers))):
            for name, one in own.named_parameters():
                full = f"model.layers.{layer}.{name}"
                if checkpoint.has(full) and tuple(checkpoint.shape(full)) == tuple(one.shape):
                    one.copy_(checkpoint.tensor(full, torch.float32))
