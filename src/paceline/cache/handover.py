"""Handover: blocks of the prefix cache that another engine's may have, and those that come from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.cache.blocks import BlockPool
from paceline.cache.prefix import Node, PrefixCache
from paceline.cache.sharing import Sharing
from paceline.kernels.groups import NULL_BLOCK


class Piece(NamedTuple):
    """What one cache group keeps of one block of a text."""

    group: int
    place: int
    """Which block of the text, from 0."""
    ahead: tuple[int, ...] = ()
    """The tokens after it that its content depends on too."""


class Intake:
    """Blocks that are about to be written with what came from elsewhere; nobody finds them before that is done."""

    def __init__(self, tip: Node) -> None:
        self.tip = tip
        self.taken: list[tuple[Piece, Node, int]] = []
        """With the block of the pool that each piece is to be written to."""
        self.held: list[tuple[int, int]] = []
        """(group, block) of the same text that were here before: they must not make room for the others."""


class Handover:
    """A part of CacheManager, which owns what it is given here."""

    def __init__(self, prefix: PrefixCache, pools: Sequence[BlockPool], block_size: int, sharing: Sharing) -> None:
        self._prefix = prefix
        self._pools = pools
        self._block_size = block_size
        self._sharing = sharing

    def held(self, tokens: Sequence[int], salt: str) -> int:
        """How many blocks a sequence of these tokens would take over from the cache, the host's counted."""
        return self._sharing.agreed(tokens, self._prefix.match(tokens, salt, (len(tokens) - 1) // self._block_size))

    def find(self, tokens: Sequence[int], salt: str) -> list[tuple[Piece, int]]:
        """What a sequence of these tokens could take over if the host had nothing, with the blocks that hold it, in the
        order of the text. Nobody holds the blocks: read them before anything else runs."""
        nodes = self._prefix.match(tokens, salt, (len(tokens) - 1) // self._block_size)
        usable = self._sharing.agreed(tokens, nodes, cold=False)
        first = [self._sharing.first_needed(group, usable) for group in range(len(self._pools))]
        return [(Piece(group, place, self._prefix.ahead_of(node, group)), node.blocks[group])
                for place, node in enumerate(nodes[:usable]) for group in range(len(self._pools))
                if place >= first[group]]

    def begin(self, tokens: Sequence[int], salt: str, pieces: Sequence[Piece]) -> Intake:
        """Take blocks for those pieces of a text that are not here yet, as far as blocks are to be had, and hold what
        is here of it. `pieces`: one at least, each once, with their `ahead` as `tokens` go on."""
        size, node = self._block_size, self._prefix.root(salt)
        nodes = []
        for end in range(size, (1 + max(piece.place for piece in pieces)) * size + 1, size):
            node = self._prefix.child(node, tuple(tokens[end - size:end]))
            nodes.append(node)
        self._prefix.pin(node)
        intake = Intake(node)
        for group, pool in enumerate(self._pools):
            for own in nodes:
                if own.blocks[group] != NULL_BLOCK:
                    pool.share(own.blocks[group])
                    intake.held.append((group, own.blocks[group]))
        for piece in sorted(pieces, key=lambda one: one.place):
            pool, own = self._pools[piece.group], nodes[piece.place]
            if pool.free and not own.keeps(piece.group):
                intake.taken.append((piece, own, pool.allocate()))
        return intake

    def end(self, intake: Intake, arrived: bool) -> None:
        """`arrived`: the blocks are written, and can be found from now on."""
        for piece, node, block in intake.taken:
            if arrived and self._prefix.attach(node, piece.group, block, piece.ahead):
                self._pools[piece.group].register(block)
        for piece, _, block in reversed(intake.taken):  # of a text the end is forgotten first
            self._pools[piece.group].release(block)
        for group, block in reversed(intake.held):
            self._pools[group].release(block)
        self._prefix.unpin(intake.tip)
