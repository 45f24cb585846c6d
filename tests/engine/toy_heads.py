"""Heads that were never trained: what they keep can be looked up, and what they draft depends on all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.tiny import VOCAB
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Opened, Pass, Plane, Planes, StoredRows

BLOCK = 4


def shape_of(kind: str, model: Any, taps: tuple[int, ...] | None = None, **more: Any) -> HeadConfig:
    config = model.config
    block = {"block_size": BLOCK, "mask_token_id": 0} if kind in ("dspark", "dflash") else {}
    one = (config.num_layers,) if kind in ("eagle1", "mtp", "medusa", "hydra") else (0, config.num_layers - 1)
    return HeadConfig(**{
        "kind": kind, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size, "taps": taps or one, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "intermediate_size": 32, "max_position_embeddings": 512, "heads": 3} | block | more)


class KeepingHead:
    """Keeps of each token its id, the id of the one before it and the sum of its tapped streams. Drafts by a number
    that all that is kept of the text before the anchor goes into, by position."""

    capturable = True
    drafts_further = False
    target_ids: torch.Tensor | None = None

    def __init__(self, config: HeadConfig) -> None:
        self.config = config
        self.stored = 0
        """Rows, padding included."""
        self._out = torch.randn(config.hidden_size, config.draft_vocab_size,
                                generator=torch.Generator().manual_seed(5))

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        return (Plane("ids", (2,), torch.int64), Plane("sums", (self.config.hidden_size,), torch.float32))

    def passes(self, depth: int) -> tuple[Pass, ...]:
        if self.config.kind in ("dspark", "dflash"):
            return (Pass(0, self.config.block_size, mutual=True),)
        return tuple(Pass(place, 1) for place in range(depth))

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        assert set(tapped) == set(self.config.taps)
        slots = rows.view.slots
        live = slots >= 0
        self.stored += len(slots)
        total = sum(tapped[tap].float() for tap in self.config.taps)
        assert isinstance(total, torch.Tensor) and total.shape == (len(slots), self.config.hidden_size)
        planes["sums"][slots[live]] = total[live]
        planes["ids"][slots[live], 0] = rows.tokens[live]
        if len(rows.before):
            known = planes["ids"][rows.before, 0].where(rows.before > 0, -1)
            planes["ids"][slots[live], 1] = known[live]

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> KeepingRound:
        assert len(opened.passes) == len(self.passes(opened.depth))
        first = opened.passes[0]
        kept = [self._text(first, group, planes) for group in range(len(first.starts))]
        for layout in opened.passes:  # what a round writes, nobody may ever read
            slots = layout.views[0].slots
            planes["ids"][slots[slots >= 0]] = -7
            planes["sums"][slots[slots >= 0]] = 1e9
        # Row by row: what a product of several rows rounds to may depend on how many they are.
        return KeepingRound(torch.stack([(own[:, None] * self._out.double()).sum(0) for own in kept]).float(), self)

    def _text(self, layout: Layout, group: int, planes: Planes) -> torch.Tensor:
        """All that is kept of a sequence below its anchor, as one vector."""
        slots = before_anchor(layout, group)
        places = torch.arange(len(slots))
        weights = torch.cos(places.double() + 1.0)[:, None]
        ids = planes["ids"][slots, 0].double()[:, None]
        vector = (planes["sums"][slots].double() * weights).sum(0) + (ids * weights).sum()
        return torch.sin(vector)


def before_anchor(layout: Layout, group: int) -> torch.Tensor:
    """Slots of all tokens before the first row of a group."""
    places = torch.arange(int(layout.positions[layout.offsets[group]]))
    return layout.views[0].tables[group, places // layout.block_size].long() * layout.block_size \
        + places % layout.block_size


class KeepingRound:
    def __init__(self, logits: torch.Tensor, head: KeepingHead) -> None:
        self._logits = logits
        self._head = head
        self.calls = 0

    def chain(self, previous: Any, least: Any, draws: Any = ()) -> None:
        return None

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls += 1
        assert len(previous) == len(self._logits)
        shift = previous.float()[:, None] * torch.arange(self._logits.shape[1])
        chance = torch.sigmoid(self._logits[:, 0] + self.calls) if self._head.config.confidence_head else None
        return 3.0 * torch.sin(self._logits + shift + self.calls), chance


class KnowingHead(KeepingHead):
    """Knows how texts go on: token after token, whatever came before."""

    def __init__(self, config: HeadConfig, texts: Sequence[Sequence[int]], wrong: int = 0) -> None:
        """`wrong`: every so manyth token of a draft is another one."""
        super().__init__(config)
        self._texts = [list(text) for text in texts]
        self._wrong = wrong

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> Any:
        super().open(opened, planes, kernels)
        known = [self._known(layout, group, planes, int(opened.anchors[group]))
                 for layout in opened.passes[:1] for group in range(len(layout.starts))]
        return KnowingRound(known, self.config.draft_vocab_size, self._wrong)

    def _known(self, layout: Layout, group: int, planes: Planes, anchor: int) -> list[int]:
        """How the text goes on, which is found by what is kept of it."""
        slots = before_anchor(layout, group)
        text = [*planes["ids"][slots, 0].tolist(), anchor]
        return next((own[len(text):] for own in self._texts if own[:len(text)] == text), [])


class KnowingRound:
    def __init__(self, texts: list[list[int]], width: int, wrong: int) -> None:
        self._texts = texts
        self._width = width
        self._wrong = wrong
        self._calls = 0

    def chain(self, previous: Any, least: Any, draws: Any = ()) -> None:
        return None

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = torch.zeros(len(previous), self._width)
        for row, text in enumerate(self._texts):
            if self._calls < len(text):
                token = text[self._calls]
                if self._wrong and self._calls % self._wrong == self._wrong - 1:
                    token = (token + 1) % VOCAB
                out[row, token] = 50.0
        self._calls += 1
        return out, torch.full((len(previous),), 0.9)
