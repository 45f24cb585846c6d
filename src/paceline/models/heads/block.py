"""BlockHead: DFlash and DSpark, which draft a whole block in one pass.

What is kept of a token is made of the target's hidden states alone: fc and a norm over the tapped streams, then keys
and values of every layer. A block is [anchor, mask, mask, ...]; its rows see all that is kept before the anchor, and
each other. DSpark adds to the logits of a slot what the token before it suggests (Markov head), and says how likely its
draft is to be accepted (confidence head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from paceline.kernels.cpu.backend import NativeKernels
from paceline.kernels.device.head_rounds import DraftSlot, Sureness
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.models.heads.base import BaseHead
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.further import Floats, Further, linear
from paceline.models.heads.interface import Best, Draw, Opened, Pass, Plane, Planes, StoredRows
from paceline.models.heads.layer import DraftLayer, context_rows, key_planes, load_norm, load_rope
from paceline.models.heads.markov import MarkovHead, markov_head
from paceline.models.heads.native import NativeLayers
from paceline.models.heads.slots import SlotChain
from paceline.models.heads.target import Target
from paceline.models.layers import Linear, load_linear
from paceline.models.weight_source import WeightSource


class BlockHead(BaseHead):
    reads_further = True

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        super().__init__(config, weights, target, target_ids)
        hidden, names = config.hidden_size, [f"layers.{layer}" for layer in range(config.num_layers)]
        self.fc = load_linear(weights, ["fc"], [hidden], len(config.taps) * hidden, False)
        self.hidden_norm = load_norm(config, weights, "hidden_norm")
        self.layers = [DraftLayer(config, weights, name, index) for index, name in enumerate(names)]
        self.norms = [load_norm(config, weights, f"{name}.input_layernorm") for name in names]
        self.context = context_rows(config, weights, names, self.layers)
        self.norm = load_norm(config, weights, "norm")
        self.markov = markov_head(config, weights)
        self.confidence: Linear | None = None
        if config.confidence_head:
            width = hidden + (config.markov_rank if config.confidence_head_with_markov else 0)
            self.confidence = Linear(weights.take("confidence_head.proj.weight", (1, width)),
                                     weights.take("confidence_head.proj.bias", (1,)))
        self.rope = load_rope(config, max_model_len, self.device)
        self.native: NativeLayers | None = None
        if NativeLayers.fits(config, self.layers, self.fc, self.context):
            self.native = NativeLayers(config, self.layers, self.norms, self.fc, self.context, self.hidden_norm,
                                       self.norm, self.rope)
        self.chains: SlotChain | None = None
        if SlotChain.fits(config, self.markov, self.confidence):
            assert self.markov is not None and self.confidence is not None
            self.chains = SlotChain(config, self.markov, self.confidence, self.norm, self.target_ids)
        assert config.mask_token_id is not None
        self.mask = self.embed(torch.tensor([config.mask_token_id], device=self.device))

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        return key_planes(self.config, cache, activations)

    def passes(self, depth: int) -> tuple[Pass, ...]:
        return (Pass(0, self.config.block_size, mutual=True),)

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        streams = [tapped[tap] for tap in self.config.taps]
        if self.native is not None and isinstance(kernels, NativeKernels) and self.native.takes(planes):
            self.native.keep(streams, rows.layout.positions, rows.view.slots, planes, kernels)
            return
        context = kernels.norm(self.fc(torch.cat(streams, dim=-1), kernels).contiguous(), self.hidden_norm)
        turned = self.rope.at(rows.layout.positions)
        for layer, kv in zip(self.layers, self.context(context, kernels).chunk(len(self.layers), dim=-1)):
            layer.keep(kv, turned, rows.view.slots, planes, kernels)

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> BlockRound:
        layout, = opened.passes
        sequences = len(opened.anchors)
        rows = len(layout.positions) // sequences
        first = 0 if self.config.sample_from_anchor else 1
        slots = min(opened.depth, rows - first)
        native = self.native
        if native is not None and isinstance(kernels, NativeKernels) and native.takes(planes):
            # In numpy: for so few rows torch takes longer to begin an operation than to do it.
            block = np.empty((sequences, rows, self.config.hidden_size), dtype=np.float32)
            block[:, 0], block[:, 1:] = self.embed(opened.anchors).numpy(), self.mask.numpy()
            native.run(block.reshape(sequences * rows, -1), layout, planes, kernels)
            wanted = np.ascontiguousarray(block[:, first:first + slots])
            logits = native.logits(wanted.reshape(sequences * slots, -1), self.lm_head, planes, kernels)
            further = None
            if opened.further is not None:
                further = opened.further.logits(wanted, lambda x, weight: native.product(x, weight, planes, kernels))
            return BlockRound(self, torch.from_numpy(wanted), kernels, opened.further, logits, further)
        x = torch.cat((self.embed(opened.anchors)[:, None], self.mask.expand(sequences, rows - 1, -1)), 1).flatten(0, 1)
        turned = self.rope.at(layout.positions)
        for layer, norm in zip(self.layers, self.norms):
            x = layer(x, norm, x, layout, layout.views[0], turned, planes, kernels)
        x = x.view(sequences, rows, -1)[:, first:first + slots].contiguous()
        return BlockRound(self, x, kernels, opened.further)


class BlockRound:
    """The Markov head and the confidence head, slot after slot."""

    def __init__(self, head: BlockHead, drafting: torch.Tensor, kernels: Kernels, further: Further | None,
                 logits: torch.Tensor | None = None, further_logits: Floats | None = None) -> None:
        """drafting [S, slots, h]: what the layers left. `logits` [S slots, V] and `further_logits` [S, slots, E]: of
        that, where somebody has made them of it already."""
        self._head, self._drafting, self._further, self._kernels = head, drafting, further, kernels
        if logits is None:
            logits = head.lm_head(self._hidden.flatten(0, 1), kernels)
        if further is not None and further_logits is None:
            further_logits = further.logits(self._hidden.numpy(), linear(kernels))
        self._raw = logits.view(*drafting.shape[:2], -1)
        """[S, slots, V], without what the token before adds."""
        self._further_logits = further_logits
        self._slot = 0
        self._state: torch.Tensor | None = None
        self._blocks: torch.Tensor | None = None
        """The block that each line goes through; None: line i through block i."""

    @cached_property
    def _hidden(self) -> torch.Tensor:
        """[S, slots, h], normed."""
        return self._kernels.norm(self._drafting.flatten(0, 1), self._head.norm).view(self._drafting.shape)

    @cached_property
    def _logits(self) -> torch.Tensor:
        return self._raw.float()

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, kernels, slot = self._head, self._kernels, self._slot
        self._slot += 1
        hidden, logits = self._of_lines(self._hidden[:, slot]), self._of_lines(self._logits[:, slot])
        markov: MarkovHead | None = head.markov
        before = None if markov is None else markov.embed(previous).to(hidden.dtype)
        if markov is not None and before is not None:
            bias, self._state = markov.bias(before, hidden, self._state, kernels)
            logits = logits + bias
        if self._further_logits is not None:
            more = torch.from_numpy(self._further_logits[:, slot])
            logits = torch.cat((logits, self._of_lines(more)), dim=-1)
        if head.confidence is None:
            return logits.contiguous(), None
        seen = hidden
        if before is not None and head.config.confidence_head_with_markov:
            seen = torch.cat((hidden, before), dim=-1)
        return logits.contiguous(), torch.sigmoid(head.confidence(seen, kernels).float()[:, 0])

    def _of_lines(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of each block -> of the one that each line goes through."""
        return blocks.contiguous() if self._blocks is None else blocks.index_select(0, self._blocks)

    def slot(self, previous: torch.Tensor) -> DraftSlot:
        head, slot = self._head, self._slot
        bigrams = None if head.markov is None else head.markov.bigrams
        if self._blocks is not None or (bigrams is None) != (head.markov is None):
            return self._finished(previous)
        self._slot += 1
        sure = None
        if head.confidence is not None:
            assert isinstance(head.confidence.weight, torch.Tensor) and head.confidence.bias is not None
            sure = Sureness(self._hidden[:, slot], head.confidence.weight[0], head.confidence.bias)
        return DraftSlot(self._raw[:, slot], bigrams, sure)

    def _finished(self, previous: torch.Tensor) -> DraftSlot:
        logits, chances = self.logits(previous)
        return DraftSlot(logits, chances=chances)

    def chain(self, previous: Sequence[int], least: Sequence[float],
              draws: Sequence[Draw] = ()) -> list[Best] | None:
        chains, kernels = self._head.chains, self._kernels
        if chains is None or not isinstance(kernels, NativeKernels) or self._slot or self._blocks is not None:
            return None
        further = None
        if self._further is not None and self._further_logits is not None:
            further = self._further_logits, self._further.ids
        return chains.chain(self._logits.numpy(), self._drafting.numpy(), previous, draws, least, further, kernels)

    def fork(self, lines: torch.Tensor, layout: Layout | None) -> None:
        self._blocks = lines if self._blocks is None else self._blocks.index_select(0, lines)
        self._state = None if self._state is None else self._state.index_select(0, lines)
