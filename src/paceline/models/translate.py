"""Checkpoints of other families under Llama's names and in its layout, so that one frame loads them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError
from paceline.models.load.quantised.codes import Outliers
from paceline.models.packing import PackingWeights
from paceline.models.part import Part
from paceline.models.shard import Shard, shard_of
from paceline.models.weight_source import WeightSource, take_part

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A tensor that is stored otherwise: the shape it then has, and the way back."""

    stored: Callable[[Shape], Shape]
    restore: Callable[[torch.Tensor], torch.Tensor]
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Outputs in their order, along the first axis, to ours; None: the orders are the same."""


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer, or one of several whose weights lie stacked, as those who train the model know it."""

    names: tuple[str, ...]
    """Those of a text model by itself first, then those it has as a part of others."""
    size: int
    """Outputs."""
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None
    """As in StoredLayout."""

    @property
    def name(self) -> str:
        return self.names[0]


TRANSPOSED = StoredLayout(lambda shape: shape[::-1], lambda tensor: tensor.t().contiguous())
"""[inputs, outputs], as GPT-2's Conv1D has its weights."""


def by_head(heads: int) -> StoredLayout:
    """Query, key and value of a head together, head after head; restored to all queries, all keys, all values."""

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    return StoredLayout(lambda shape: shape, restore, restore)


class Translated:
    """WeightSource around another one. A name is translated word by word; what the source has under Llama's own name
    (a GGUF file, whose tensors are renamed when it is opened) is taken as it is."""

    def __init__(self, weights: WeightSource, words: Mapping[str, str],
                 layouts: Mapping[str, StoredLayout] | None = None, prefixes: tuple[str, ...] = ("",)) -> None:
        """words: parts of Llama's names -> theirs, replaced in order. layouts: ends of their names -> how those tensors
        are stored. prefixes: what all their names may begin with; the first that fits counts."""
        self._weights = weights
        self._words = words
        self._layouts = layouts or {}
        self._prefixes = prefixes

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        theirs, layout = self._find(name)
        if layout is None:
            return self._weights.take(theirs, shape, dtype)
        return layout.restore(self._weights.take(theirs, layout.stored(shape), dtype))

    def take_part(self, name: str, shape: Shape, part: Part, dtype: torch.dtype | None = None) -> torch.Tensor:
        theirs, layout = self._find(name)
        if layout is None:
            return take_part(self._weights, theirs, shape, part, dtype)
        if layout.reorder is None:  # a matrix stored the other way round
            return layout.restore(take_part(self._weights, theirs, layout.stored(shape), part.turned(), dtype))
        if part.axis == 0:
            order = layout.reorder(torch.arange(shape[0])).tolist()
            return take_part(self._weights, theirs, shape, part.reordered(order), dtype)
        return layout.restore(take_part(self._weights, theirs, layout.stored(shape), part, dtype))

    @property
    def shard(self) -> Shard:
        return shard_of(self._weights)

    def has(self, name: str) -> bool:
        return self._weights.has(self._find(name)[0])

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A matrix as the file stores it in blocks, where it does and nothing is to be rearranged."""
        theirs, layout = self._find(name)
        source = getattr(self._weights, "blocks", None)
        return None if source is None or layout is not None else source(theirs, shape)

    def outliers(self, name: str) -> Outliers | None:
        """Columns of a matrix that the file keeps in floats."""
        theirs, layout = self._find(name)
        source = getattr(self._weights, "outliers", None)
        found: Outliers | None = None if source is None else source(theirs)
        if found is not None and layout is not None:
            raise ModelFormatError(f"tensor '{theirs}' keeps outlier columns in floats, which this version cannot run "
                                   "natively in this architecture's layout: use --kernels reference.")
        return found

    def let_go(self) -> None:
        source = getattr(self._weights, "let_go", None)
        if source is not None:
            source()

    def module(self, name: str, size: int) -> Module:
        """A linear layer as their model calls it, whatever names and layouts a file has."""
        theirs, layout = self._theirs(f"{name}.weight")
        inside = name.startswith("model.")
        names = tuple((prefix if inside else _beside(prefix)) + theirs.removesuffix(".weight")
                      for prefix in self._prefixes)
        return Module(names, size, None if layout is None else layout.reorder)

    def _theirs(self, name: str) -> tuple[str, StoredLayout | None]:
        theirs = name
        for ours, word in self._words.items():
            theirs = theirs.replace(ours, word)
        return theirs, next((layout for end, layout in self._layouts.items() if theirs.endswith(end)), None)

    def _find(self, name: str) -> tuple[str, StoredLayout | None]:
        """What the source has it under, and in which layout."""
        if self._weights.has(name):
            return name, None
        theirs, layout = self._theirs(name)
        found = next((prefix for prefix in self._prefixes if self._weights.has(prefix + theirs)), self._prefixes[0])
        return found + theirs, layout


def _beside(prefix: str) -> str:
    """What the names of a head begin with, where those of the layers begin with `prefix`."""
    parts = prefix.split(".")
    return "".join(f"{part}." for part in parts[:parts.index("model")]) if "model" in parts else ""


def module_of(weights: WeightSource, name: str, size: int) -> Module:
    """The module of a weight that is taken under Llama's name."""
    source = weights.source if isinstance(weights, PackingWeights) else weights
    return source.module(name, size) if isinstance(source, Translated) else Module((name,), size)


def translate(weights: WeightSource, words: Mapping[str, str], layouts: Mapping[str, StoredLayout] | None = None,
              prefixes: tuple[str, ...] = ("",)) -> WeightSource:
    """Translated, with what packs matrices still outermost."""
    if isinstance(weights, PackingWeights):
        return weights.around(lambda source: Translated(source, words, layouts, prefixes))
    return Translated(weights, words, layouts, prefixes)
