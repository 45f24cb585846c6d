"""Medusa and Hydra: small networks side by side, one for each token to come, on the state that the target's head read
last, which is that of the token before the anchor. Hydra's also see the tokens from the anchor on.

Their outputs go through the target's own head, its rows of the draft vocabulary: published heads have a matrix each,
ours none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.slots import SlotHead
from paceline.training.target import Batch, States

DECAY = 0.8


class Residual(nn.Module):
    """past(x) + silu(linear(x)): nothing is changed on its way past unless its width has to be."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection = nn.Linear(inputs, outputs) if inputs != outputs else None
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if self.res_connection is not None:
            # At first what the target's head read last, and nothing of the tokens.
            with torch.no_grad():
                self.res_connection.weight.zero_()
                self.res_connection.weight[:, :outputs] = torch.eye(outputs)
                self.res_connection.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = x if self.res_connection is None else self.res_connection(x)
        out: torch.Tensor = past + F.silu(self.linear(x))
        return out


class Stacked(SlotHead):
    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config, judge, config.heads, DECAY)
        self.sees_tokens = config.kind == "hydra"
        width = config.hidden_size
        blocks = [nn.ModuleList(Residual((2 + head) * width if self.sees_tokens and layer == 0 else width, width)
                                for layer in range(config.num_layers)) for head in range(config.heads)]
        self.hydra_mlp = nn.ModuleList(blocks)

    def hidden(self, batch: Batch, states: States, anchors: torch.Tensor) -> torch.Tensor:
        width, length = states.final.shape[-1], batch.tokens.shape[1]
        last = (anchors - 1).clamp(min=0)[..., None].expand(-1, -1, width)
        seen, out = [states.final.gather(1, last)], list[torch.Tensor]()
        for head, blocks in enumerate(self.hydra_mlp):
            if self.sees_tokens:
                places = (anchors + head).clamp(max=length - 1)
                seen.append(self._judge.target.embed(batch.tokens.gather(1, places)))
            x = torch.cat(seen, -1)
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x = block(x)
            out.append(x)
        return torch.stack(out, 2)

    def exported(self) -> dict[str, torch.Tensor]:
        found = super().exported()
        return found if self.sees_tokens else {name.removeprefix("hydra_mlp."): one for name, one in found.items()}

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        prefix = "" if self.sees_tokens else "hydra_mlp."
        super().take({f"{prefix}{name}": one for name, one in tensors.items()})
