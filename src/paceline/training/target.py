"""The target as a teacher: what its layers hold of whole texts, and which tokens it would have written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.errors import ConfigError
from paceline.kernels import select
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.packed import plain
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.forward import Forward
from paceline.training.compiled import Compiled
from paceline.training.shards import Text

BLOCK = 16
MULTIPLE = 32
"""Batches are padded to such lengths: fewer shapes."""
SHORTEST = 160
"""On a card, where attention over shorter texts is another kernel."""
HEAD_BYTES = 256 << 20
"""Of logits that are held at once."""


@dataclass(frozen=True)
class Batch:
    """B texts, padded to T tokens."""

    tokens: torch.Tensor
    """[B, T] int64, 0 where a text has ended."""
    lengths: torch.Tensor
    """[B] int64."""
    prompts: torch.Tensor
    """[B] int64: tokens of the prompts."""
    answer_tokens: int
    """Of all texts."""

    @property
    def answers(self) -> torch.Tensor:
        """[B, T] bool: which tokens are of answers."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (places >= self.prompts[:, None]) & (places < self.lengths[:, None])


@dataclass(frozen=True)
class States:
    """What the target computed of a batch; rows behind a text's end mean nothing but are finite."""

    taps: torch.Tensor
    """[B, T, taps * h]: the tapped streams side by side."""
    final: torch.Tensor
    """[B, T, h]: behind the final norm; that of place t tells token t + 1."""


class Target:
    """A model, run over batches of whole texts with a cache of its own."""

    def __init__(self, llm: LLM, taps: tuple[int, ...], rows: int, compiles: bool) -> None:
        """`rows`: of a pass, at least as many as the longest text."""
        engine = llm.engine
        model = engine.model
        if not isinstance(model, Decoder) or not isinstance(model.embedding, torch.Tensor):
            raise ConfigError("Heads are trained against a model that torch runs in floats: this one cannot be tapped. "
                              "Name another one with --model.")
        self.model = model
        self.config = model.config
        self.device = model.embedding.device
        self.dtype = model.embedding.dtype
        self.taps = taps
        self._kernels = select(False, self.device)
        self._blocks = -(-rows // BLOCK) * 2
        groups = model.cache_groups
        self._storage = KVStorage(groups, [self._blocks + 1] * len(groups), BLOCK, self.dtype, self.device)
        self.rows = rows
        self._positions = engine.config.max_model_len
        # Copies: what was made in inference mode cannot be part of what is differentiated.
        self.head = plain(model.head.weight).detach().clone()
        self.final_norm = model.norm.weight.detach().clone()
        self._logsumexp = Compiled.of(_logsumexp, compiles)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., h]."""
        with torch.no_grad():
            return self.model.embed(tokens.reshape(-1)).view(*tokens.shape, -1).clone()

    def padded(self, length: int) -> int:
        """The length of a batch whose longest text has `length` tokens."""
        longest = max(SHORTEST if self.device.type == "cuda" else 1, length)
        return min(-(-longest // MULTIPLE) * MULTIPLE, self._positions)

    def batch(self, texts: list[Text]) -> Batch:
        longest = self.padded(max(len(text.tokens) for text in texts))
        tokens = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(tokens, texts):
            row[:len(text.tokens)] = text.tokens
        sizes = np.array([(len(text.tokens), text.prompt) for text in texts], np.int64)
        on_device = torch.from_numpy(tokens).to(self.device)
        lengths, prompts = torch.from_numpy(sizes).to(self.device).unbind(1)
        return Batch(on_device, lengths, prompts, sum(text.answer for text in texts))

    def batches(self, texts: list[Text]) -> list[Batch]:
        """Of like lengths, each of a pass or less."""
        ordered = sorted(texts, key=lambda text: len(text.tokens))
        size = max(1, min(16, self.rows // len(ordered[-1].tokens)))
        return [self.batch(ordered[begin:begin + size]) for begin in range(0, len(ordered), size)]

    def states(self, batch: Batch) -> States:
        size, longest = batch.tokens.shape
        at_once = max(1, self.rows // longest)
        parts = [self._pass(batch.tokens[begin:begin + at_once]) for begin in range(0, size, at_once)]
        return States(torch.cat([taps for taps, _ in parts]), torch.cat([final for _, final in parts]))

    @torch.no_grad()
    def _pass(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Padding is computed like the rest: nothing that counts sees it, and all texts have one length."""
        size, longest = tokens.shape
        pages = -(-longest // BLOCK)
        if size * pages > self._blocks:
            raise ConfigError(f"A text of {longest} tokens is longer than --target-rows ({self.rows}): raise it, or "
                              "lower --prompt-tokens and --new-tokens.")
        positions = torch.arange(longest, device=self.device)
        tables = torch.arange(1, size * pages + 1, device=self.device).view(size, pages)
        slots = (tables[:, positions // BLOCK] * BLOCK + positions % BLOCK).reshape(-1)
        views = [GroupView(tables, slots, group.window) for group in self.model.cache_groups]
        offsets = list(range(0, size * longest + 1, longest))
        layout = Layout(positions.repeat(size), offsets, [0] * size, [None] * size, BLOCK, views)
        context = Forward(self._kernels, layout, self._storage.keys, self._storage.values, self.model.cache_groups,
                          taps=frozenset(self.taps))
        hidden = self.model.forward(tokens.reshape(-1), context)
        taps = torch.cat([context.tapped[tap] for tap in self.taps], -1)
        final = self._kernels.norm(hidden, self.model.norm)
        return taps.view(size, longest, -1), final.view(size, longest, -1)

    @torch.no_grad()
    def normalisers(self, final: torch.Tensor) -> torch.Tensor:
        """[N, h] -> [N] float32: log of the sum of exp of all logits, in pieces of one size."""
        count, piece = len(final), max(1, HEAD_BYTES // (4 * self.head.shape[0]))
        out = torch.empty(count, device=self.device)
        for begin in range(0, count, piece):
            rows = final[begin:begin + piece]
            short = piece - len(rows)
            if short and self._logsumexp.compiles:
                rows = torch.nn.functional.pad(rows, (0, 0, 0, short))
            out[begin:begin + piece] = self._logsumexp(self.capped(wide_product(rows, self.head)))[:piece - short]
        return out

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits


def _logsumexp(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1)


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T in float32 or more, as it was summed. Not to be differentiated."""
    if x.is_cuda and x.dtype.itemsize < 4:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    product = torch.mm(x, weight.t())
    return product if product.dtype == torch.float64 else product.float()
