"""PrefixExchange: finished blocks of one engine's prefix cache, taken in by another's as if it had computed them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from paceline.cache.block_bytes import BlockBytes, PlaneFormat
from paceline.cache.handover import Piece
from paceline.cache.keys import scope_key
from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy
from paceline.errors import TransferError
from paceline.sampling.setup import Setup

FACTS = ("model", "device", "dtype", "kv_dtype", "quantization", "kernels", "native_forward", "deterministic",
         "built_for", "processor", "torch", "version")
"""What of an engine's setup decides the bits that its cache holds of a text. The last three are not meant to: but torch
adds products up as suits a processor, and nobody compares what comes with what would have been computed."""
MOST_BYTES = 16 << 20
"""That are copied between two steps: those who decode wait for it."""


@dataclass(frozen=True)
class PrefixBlocks:
    """What an engine's cache holds of the beginning of a text, with all that says whether another one can use it."""

    facts: dict[str, str]
    """FACTS of the engine that computed it."""
    block_size: int
    planes: tuple[tuple[PlaneFormat, ...], ...]
    """Of each cache group."""
    scope: str
    """A hash of it (cache/keys.py), in hexadecimal."""
    tokens: tuple[int, ...]
    """The text, whole blocks."""
    pieces: tuple[tuple[Piece, ...], ...]
    """Of each group, in the order of the text."""
    data: tuple[torch.Tensor, ...]
    """Of each group [pieces, bytes of a block] uint8."""

    @property
    def nbytes(self) -> int:
        return sum(rows.numel() for rows in self.data)

    def parts(self, most_bytes: int = MOST_BYTES) -> Iterator[PrefixBlocks]:
        """The same in pieces that are copied in no time, from the beginning of the text on."""
        wide = sum(rows.shape[1] for rows in self.data)
        step = max(1, most_bytes // max(1, wide))
        for first in range(0, len(self.tokens) // self.block_size, step):
            spans = [slice(*(bisect_left(own, place, key=_place) for place in (first, first + step)))
                     for own in self.pieces]
            if any(own[span] for own, span in zip(self.pieces, spans)):
                yield replace(self, pieces=tuple(own[span] for own, span in zip(self.pieces, spans)),
                              data=tuple(rows[span] for rows, span in zip(self.data, spans)))


def _place(piece: Piece) -> int:
    return piece.place


def joined(parts: Sequence[PrefixBlocks]) -> PrefixBlocks:
    """The parts of one text again, in their order."""
    groups = range(len(parts[0].data))
    return replace(parts[-1], pieces=tuple(tuple(piece for part in parts for piece in part.pieces[g]) for g in groups),
                   data=tuple(torch.cat([part.data[g] for part in parts]) for g in groups))


class PrefixExchange:
    """Of one engine, in its thread, between two steps. Nothing is held in between: blocks that had to make room are
    computed again, and who vanishes leaves nothing behind."""

    def __init__(self, cache: CacheManager, storage: KVStorage, setup: Setup, lost_heads: Callable[[], Collection[str]],
                 catch_up: Callable[[Sequence[BlockCopy]], bool]) -> None:
        """`catch_up`: Loop.catch_up. `lost_heads`: what they keep is not kept up any more."""
        self._cache = cache
        self._storage = storage
        self._bytes = BlockBytes(storage)
        self._lost = lost_heads
        self._catch_up = catch_up
        self.facts = {name: str(getattr(setup, name)) for name in FACTS}

    def held(self, tokens: Sequence[int], scope: str) -> int:
        """How many blocks of these tokens need not be handed over."""
        return self._cache.handover.held(tokens, scope)

    def export_prefix(self, tokens: Sequence[int], scope: str, first: int = 0, *, most_bytes: int = MOST_BYTES,
                      on_device: bool = False) -> PrefixBlocks | None:
        """What the cache holds of these tokens from block `first` on, as many blocks as may be copied at once, in host
        memory unless `on_device`. Without any piece: there is no more. None: not now, ask again after the next step."""
        self._check_model()
        if not self._catch_up(()):
            return None
        found = [(piece, block) for piece, block in self._cache.handover.find(tokens, scope) if piece.place >= first]
        places = list(dict.fromkeys(piece.place for piece, _ in found))
        last = places[:max(1, most_bytes // sum(self._storage.block_bytes))][-1] if places else -1
        groups = range(len(self._cache.groups))
        planes = tuple(tuple(one for one in self._bytes.formats[g] if not self._is_lost(one)) for g in groups)
        own = [[(piece, block) for piece, block in found if piece.group == g and piece.place <= last] for g in groups]
        data = [self._bytes.read(g, [block for _, block in own[g]], [one.name for one in planes[g]]) for g in groups]
        if on_device and self._storage.device.type == "cuda":  # others read it on streams of their own
            torch.cuda.current_stream(self._storage.device).synchronize()
        return PrefixBlocks(self.facts, self._cache.block_size, planes, scope_key(scope).hex(),
                            tuple(tokens[:(1 + last) * self._cache.block_size]),
                            tuple(tuple(piece for piece, _ in pieces) for pieces in own),
                            tuple(data if on_device else [rows.cpu() for rows in data]))

    def import_prefix(self, blocks: PrefixBlocks, tokens: Sequence[int], scope: str) -> int | None:
        """Take blocks in for a text that begins with these tokens; how many of its pieces were new here. Raises
        TransferError where they are not that text's, or not such as this engine would have computed. None: not now."""
        self.check(blocks, tokens, scope)
        rows = {piece: row for g, own in enumerate(blocks.pieces) for row, piece in enumerate(own)
                if piece.ahead == self._after(tokens, piece.place, self._cache.groups[g].lookahead)}
        if not rows or not self._cache.enable_prefix_caching:
            return 0
        if not self._catch_up(()):
            return None
        intake, copies = self._cache.begin_intake(tokens, scope, list(rows))
        arrived = False
        try:
            if not self._catch_up(copies):
                return None
            for g, planes in enumerate(blocks.planes):
                taken = [(rows[piece], block) for piece, _, block in intake.taken if piece.group == g]
                if taken:
                    came = blocks.data[g]
                    came = came.index_select(0, torch.tensor([row for row, _ in taken], device=came.device))
                    self._bytes.write(g, [block for _, block in taken], *self._known(g, planes, came))
            arrived = True
        finally:
            self._cache.handover.end(intake, arrived)
        return len(intake.taken)

    def check(self, blocks: PrefixBlocks, tokens: Sequence[int], scope: str) -> None:
        """Raises TransferError unless these blocks are what this engine would compute of these tokens."""
        self._check_model()
        if blocks.facts != self.facts:
            names = [name for name in FACTS if blocks.facts.get(name) != self.facts[name]]
            raise TransferError("Blocks were computed otherwise than here: " + "; ".join(
                f"{name} is {blocks.facts.get(name)!r} there and {self.facts[name]!r} here" for name in names)
                + ". Give prefill and decode workers the same options.")
        if blocks.block_size != self._cache.block_size:
            raise TransferError(f"Blocks of {blocks.block_size} tokens do not fit a cache of blocks of "
                                f"{self._cache.block_size}: give prefill and decode workers the same block_size.")
        if blocks.scope != scope_key(scope).hex() or blocks.tokens != tuple(tokens[:len(blocks.tokens)]):
            raise TransferError("The blocks are those of another text.")
        self._check_shape(blocks)

    def _check_shape(self, blocks: PrefixBlocks) -> None:
        most = len(blocks.tokens) // blocks.block_size
        if len(blocks.planes) != len(self._bytes.formats):
            raise TransferError("Blocks have other cache groups than this model's.")
        for g, (there, here) in enumerate(zip(blocks.planes, self._bytes.formats)):
            if [one for one in there if not one.extra] != [one for one in here if not one.extra]:
                raise TransferError("Blocks lie otherwise than in this cache: give prefill and decode workers the same "
                                    "model and kv_dtype.")
            pieces, rows = blocks.pieces[g], blocks.data[g]
            if (tuple(rows.shape) != (len(pieces), sum(one.bytes for one in there)) or rows.dtype != torch.uint8
                    or len({one.name for one in there}) != len(there) or min(one.bytes for one in there) < 1
                    or any(one.place >= after.place for one, after in pairwise(pieces))
                    or any(piece.group != g or not 0 <= piece.place < most for piece in pieces)):
                raise TransferError("The blocks that came are not those that were announced.")

    def _after(self, tokens: Sequence[int], place: int, count: int) -> tuple[int, ...]:
        """So many tokens after a block of theirs."""
        end = (place + 1) * self._cache.block_size
        return tuple(tokens[end:end + count])

    def _known(self, group: int, planes: Sequence[PlaneFormat],
               rows: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        """Of what came the planes that this cache has too, with their names: workers may have other heads."""
        here = set(self._bytes.formats[group])
        begins = [sum(one.bytes for one in planes[:i]) for i in range(len(planes))]
        kept = [(begin, one) for begin, one in zip(begins, planes) if one in here]
        if len(kept) == len(planes):
            return rows, [one.name for one in planes]
        return (torch.cat([rows[:, begin:begin + one.bytes] for begin, one in kept], dim=1),
                [one.name for _, one in kept])

    def _is_lost(self, plane: PlaneFormat) -> bool:
        return plane.extra and any(plane.name.startswith(f"{head}.") for head in self._lost())

    def _check_model(self) -> None:
        if not self.facts["model"]:
            raise TransferError("This model has no revision by which another worker could tell that it has the same.")
        if getattr(self._storage, "mirror", None) is not None:
            raise TransferError("Several ranks hold this cache together (tensor parallel): their blocks are not handed "
                                "over in this version.")
