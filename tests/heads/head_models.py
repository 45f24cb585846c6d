"""Tiny targets with tiny heads, run by hand: what the engine does with a head, in one screenful."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import DictWeights, Hand, Rows
from harness import Sequence as Held
from published import Published, Text

from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.further import Further
from paceline.models.heads.interface import Head, Opened, StoredRows
from paceline.models.heads.rows import slots_before
from paceline.models.heads.tensors import expected
from paceline.models.packing import PackingWeights
from paceline.models.registry import build

VOCAB, HIDDEN, LAYERS, MAX_LEN = 96, 64, 4, 128
TARGET: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "norm_eps": 1e-5, "max_position_embeddings": MAX_LEN}
BLOCK = {"num_layers": 2, "block_size": 5, "mask_token_id": 3, "qk_norm": True, "taps": (1, 3)}
STACKED = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "intermediate_size": 0, "heads": 3, "num_layers": 2}
LAST = {"taps": (LAYERS,), "draft_vocab_size": VOCAB}
CONFIGS: dict[str, HeadConfig] = {name: HeadConfig(**(SHAPE | changes)) for name, changes in {
    "dspark": {"kind": "dspark", **BLOCK, "markov_rank": 32, "confidence_head": True},
    "dspark without confidence or norms of heads": {"kind": "dspark", **BLOCK, "markov_rank": 8, "qk_norm": False},
    "dspark gated": {"kind": "dspark", **BLOCK, "markov_rank": 32, "markov_head_type": "gated",
                     "confidence_head": True, "confidence_head_with_markov": False},
    "dspark rnn": {"kind": "dspark", **BLOCK, "markov_rank": 32, "markov_head_type": "rnn", "attention_bias": True},
    "dflash": {"kind": "dflash", **BLOCK, "sample_from_anchor": False, "num_layers": 1, "taps": (0, 2, 4),
               "draft_vocab_size": VOCAB, "own_embedding": True, "own_lm_head": True},
    "eagle3": {"kind": "eagle3", "taps": (1, 2, 3)},
    "eagle3 normed": {"kind": "eagle3", "taps": (1, 2, 3), "norm_before_residual": True, "norm_before_fc": True,
                      "fc_bias": True, "qk_norm": True, "own_embedding": True, "own_lm_head": True},
    "eagle1": {"kind": "eagle1", **LAST, "fc_bias": True},
    "mtp": {"kind": "mtp", **LAST, "qk_norm": True},
    "medusa": {"kind": "medusa", **LAST, **STACKED, "draft_vocab_size": 40, "own_lm_head": True},
    "medusa tied": {"kind": "medusa", **LAST, **STACKED, "draft_vocab_size": 40},
    "hydra": {"kind": "hydra", **LAST, **STACKED, "own_lm_head": True},
    "hydra tied": {"kind": "hydra", **LAST, **STACKED, "draft_vocab_size": 40},
}.items()}


def noise(shape: tuple[int, ...], seed: str, scale: float) -> torch.Tensor:
    source = torch.Generator().manual_seed(sum(ord(letter) * 31 ** (place % 5) for place, letter in enumerate(seed)))
    return torch.randn(shape, generator=source) * scale


class RandomWeights(DictWeights):
    """Made when they are asked for."""

    def __init__(self) -> None:
        super().__init__({})

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = 1 + noise(shape, name, 0.2) if "norm" in name else noise(shape, name, 0.15)
        return super().take(name, shape, dtype)


@functools.cache
def target(packed: bool = False, layers: int = LAYERS) -> Any:
    weights: Any = RandomWeights()
    shape = ModelConfig.from_dict(TARGET | {"num_hidden_layers": layers})
    return build(shape, PackingWeights(weights) if packed else weights, MAX_LEN)


@functools.cache
def tensors(name: str) -> dict[str, torch.Tensor]:
    return tensors_of(CONFIGS[name])


def tensors_of(config: HeadConfig) -> dict[str, torch.Tensor]:
    """Of a head, such that every part of it matters."""
    found = {}
    for key, shape in expected(config).items():
        if key == "d2t":
            ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(5))[:shape[0]].sort().values
            found[key] = ids - torch.arange(shape[0])
        elif "norm" in key:
            found[key] = 1 + noise(shape, key, 0.3)
        else:
            found[key] = noise(shape, key, 0.3 if "markov" in key else shape[-1] ** -0.5)
    return found


class DraftHand(Hand):
    """A target and a head beside it. `texts` of several sequences run together."""

    def __init__(self, model: Any, head: Head, kernels: Kernels, cache: torch.dtype = torch.float32) -> None:
        super().__init__(model, kernels)
        self.head = head
        slots = len(self.storage.keys[0])
        self.planes = {plane.name: torch.zeros((slots, *plane.shape), dtype=plane.dtype)
                       for plane in head.planes(cache, torch.float32)}
        for plane in self.planes.values():
            plane[self.block_size:] = torch.nan
        self.seen: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def step(self, groups: list[Rows]) -> list[torch.Tensor]:
        context = self.forward(groups, frozenset(self.head.config.taps))
        tokens = torch.tensor([token for rows in groups for token in rows.tokens])
        logits = self.model.logits(self.model.forward(tokens, context), self.kernels)
        view = context.layout.views[0]
        before = slots_before(context.layout, view)
        self.head.store(context.tapped, StoredRows(tokens, context.layout, view, before), self.planes, self.kernels)
        for rows in groups:
            if rows.parents is None:
                rows.seq.tokens = rows.seq.tokens + rows.tokens
        return list(logits.split([len(rows.tokens) for rows in groups]))

    def accept(self, rows: Rows, path: list[int]) -> None:
        """Rows of a tree, root first, become committed tokens: what lies at their slots moves together."""
        start, table, size = len(rows.seq.tokens), rows.seq.tables[0], self.block_size
        source, end = ([table[p // size] * size + p % size for p in places]
                       for places in ([start + row for row in path], range(start, start + len(path))))
        for plane in (*self.storage.planes[0], *self.planes.values()):
            plane[end] = plane[source].clone()
        rows.seq.tokens = rows.seq.tokens + [rows.tokens[row] for row in path]

    @torch.inference_mode()
    def draft(self, seqs: list[Held], anchors: list[int], drafted: list[list[int]],
              further: Further | None = None) -> tuple[Any, Any]:
        """Logits [S, K, draft vocabulary] and confidences [S, K] or None, where these tokens are chosen."""
        drafting = self.open(seqs, anchors, len(drafted[0]) + 1, further)
        found = [drafting.logits(torch.tensor(previous)) for previous in [anchors, *zip(*drafted)]]
        confidences = None if found[0][1] is None else torch.stack([one for _, one in found], dim=1)
        return torch.stack([one for one, _ in found], dim=1), confidences

    @torch.inference_mode()
    def open(self, seqs: list[Held], anchors: list[int], depth: int, further: Further | None = None) -> Any:
        """A round of so many tokens."""
        layouts = [self._pass_layout(seqs, one.first, one.rows, one.mutual) for one in self.head.passes(depth)]
        size = self.block_size
        before = [seq.tables[0][(len(seq.tokens) - 1) // size] * size + (len(seq.tokens) - 1) % size for seq in seqs]
        opened = Opened(torch.tensor(anchors), torch.tensor(before), layouts, depth, further)
        return self.head.open(opened, self.planes, self.kernels)

    def _pass_layout(self, seqs: list[Held], first: int, rows: int, mutual: bool) -> Layout:
        layout = self.layout([Rows(Held(seq.tokens + [0] * first, seq.tables), [0] * rows) for seq in seqs])
        layout.mutual = mutual
        return layout


def made(name: str, packed: bool = False, changed: Mapping[str, torch.Tensor] | None = None) -> Head:
    return build_head(CONFIGS[name], tensors(name) | dict(changed or {}), target(packed), MAX_LEN)


def published(name: str, tokens: list[int], packed: bool = False, tapped_by: Any = None,
              changed: Mapping[str, torch.Tensor] | None = None) -> Published:
    """For a text whose last token is the anchor. What the target saw of the others is its own to say."""
    read = seen(target(packed), CONFIGS[name].taps, tokens, tapped_by)
    return Published(CONFIGS[name], tensors(name) | dict(changed or {}), read)


def seen(model: Any, taps: Sequence[int], tokens: list[int], kernels: Any = None) -> Text:
    """What this target knows of a text, its streams at `taps` with it."""
    hand = Hand(model, kernels)
    seq = hand.new()
    context = hand.forward([Rows(seq, tokens[:-1])], frozenset(taps))
    with torch.inference_mode():
        model.forward(torch.tensor(tokens[:-1]), context)
    embedding = model.embed(torch.arange(VOCAB)).double()
    return Text(embedding, embedding, model.norm.weight.double(), model.norm.eps, tokens,
                {tap: stream.clone() for tap, stream in context.tapped.items()})


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def longest(config: HeadConfig, most: int = 4) -> int:
    return min(most, config.depth or most)


def choices(seqs: Sequence[Any], depth: int) -> list[list[int]]:
    return [text(100 + index, depth - 1) for index in range(len(seqs))]
