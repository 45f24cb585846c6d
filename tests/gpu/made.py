"""What is made for a run of the matrix: the target in few bits, and heads of the kinds that nobody has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Head
from paceline.models.heads.tensors import expected
from paceline.quantize.plan import TARGETS, Job
from paceline.quantize.run import quantize

QUANTIZATIONS = TARGETS
"""What `paceline quantize` writes: a CPU computes with the codes, a card with what they stand for."""


def in_few_bits(model: str, to: str, text: str, out: Path, device: str) -> Path:
    """The folder of the model, rounded as `paceline quantize --to` does; AWQ looks at `text`."""
    sample = out / "text.txt"
    sample.write_text(text)
    quantize(Job(model=model, to=to, out=out / to, text=sample if to == "awq" else None, device=device),
             lambda *_: None)
    return out / to


def random_head(kind: str, target: Any) -> Head:
    """A head of random weights and of the target's shape: EAGLE-1, or a DFlash that drafts five tokens behind its
    anchor. Greedy requests hardly ever find its drafts right. Its logits are small, so that those who sample find some,
    by the noise that both are drawn with."""
    shape: ModelConfig = target.config
    own: dict[str, Any] = {
        "eagle1": {"taps": (shape.num_layers,), "fc_bias": True},
        "dflash": {"taps": (1, shape.num_layers - 1), "num_layers": 2, "block_size": 6, "mask_token_id": 0,
                   "sample_from_anchor": False, "qk_norm": True}}[kind]
    config = HeadConfig(
        kind=kind, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, draft_vocab_size=shape.vocab_size,
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, max_position_embeddings=shape.context, **own)
    drawn = torch.Generator().manual_seed(1)
    tensors = {name: 1 + 0.1 * torch.randn(size, generator=drawn) if "norm" in name
               else torch.randn(size, generator=drawn) * (0.5 / size[-1] ** 0.5)
               for name, size in expected(config).items()}
    tensors["fc.weight" if kind == "eagle1" else "norm.weight"] *= 0.1
    return build_head(config, tensors, target, shape.context)
