"""Weights: how an architecture takes its tensors, each checked against the shape it expects."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.compensation import compensation
from paceline.models.load.quantised.codes import Outliers
from paceline.models.part import Part
from paceline.models.shard import WHOLE, Shard
from paceline.models.spelling import spelled

log = logging.getLogger("paceline.models")
EMBEDDING = "model.embed_tokens.weight"
EMPTY = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of names under which files keep what a program computes by itself."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of names of heads: that of a text model beside others has their prefix."""


class Weights:
    """Hands out tensors of `checkpoint` in the engine's dtype on its device, and remembers which were taken."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", shard: Shard = WHOLE) -> None:
        """`shard`: for which rank of those that hold the model together."""
        self.shard = shard
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = torch.device(device)
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, contiguous, in `dtype` (default: the engine's). Do not write to it: it may share the file's
        memory. ModelFormatError names it when it is missing, of another shape, or not stored as floats."""
        self._check_shape(name, shape)
        tensor = self.checkpoint.tensor(name, dtype or self.dtype).to(self.device).contiguous()
        self._taken.add(name)
        return tensor

    def take_part(self, name: str, shape: tuple[int, ...], part: Part, dtype: torch.dtype | None = None
                  ) -> torch.Tensor:
        """The same of a part of it; where the file allows, nothing else of it is read."""
        self._check_shape(name, shape)
        tensor = self.checkpoint.part(name, part, dtype or self.dtype).to(self.device).contiguous()
        self._taken.add(name)
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.checkpoint.shape(name)
        if found != tuple(shape):
            raise ModelFormatError(
                f"tensor '{name}' in {self.checkpoint.path} has shape {list(found)}, but the config asks for "
                f"{list(shape)}: config and weights do not belong together.")

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A matrix as the file stores it (type, bytes of each row), checked like take(); None: not in blocks."""
        packed = self.checkpoint.packed(name) if self.checkpoint.has(name) else None
        if packed is None or self.checkpoint.shape(name) != shape:
            return None
        self._taken.add(name)
        return packed

    def outliers(self, name: str) -> Outliers | None:
        """Columns of a matrix that the file keeps in floats."""
        return self.checkpoint.outliers(name)

    def compensation(self, name: str) -> npt.NDArray[np.float32] | None:
        """How columns of a matrix make up for each other's rounding errors, where that was measured."""
        return compensation(self.checkpoint.revision, name)

    def let_go(self) -> None:
        """Whoever took tensors has copied them: the file's pages need not stay in memory."""
        self.checkpoint.let_go()

    def unused(self) -> list[str]:
        """Tensors nobody took, apart from those that carry nothing of their own (stored rotary frequencies and masks,
        the head of a model that ties it to the embedding, by its config or by its family's custom). A reason to warn:
        the model may be another one."""
        nothing = EMPTY + (HEADS if spelled(self.checkpoint.config).get("tie_word_embeddings") else ())
        return [name for name in self.checkpoint.names() if name not in self._taken and not name.endswith(nothing)]


def check_vocabulary(checkpoint: Checkpoint, token_ids: int, added: int = 0) -> None:
    """`token_ids`: one more than the tokenizer's highest id, of which the last `added` are tokens added to its
    vocabulary. Padding rows are fine, missing rows are not, but for added tokens: models of text only may come with the
    tokenizer of those that see as well (Gemma 3), and whoever uses such a token is told."""
    if not checkpoint.has(EMBEDDING):
        return
    rows = checkpoint.shape(EMBEDDING)[0]
    if rows < token_ids <= rows + added:
        log.warning("the tokenizer of %s has added tokens up to id %d, of which this model knows those below %d",
                    checkpoint.path, token_ids - 1, rows)
    elif token_ids > rows:
        raise ModelFormatError(
            f"tensor '{EMBEDDING}' in {checkpoint.path} has {rows} rows, but the tokenizer has ids up to "
            f"{token_ids - 1}: tokenizer and weights do not belong together.")
