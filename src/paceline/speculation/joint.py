"""The joint choice: of all drafts of a step, the nodes that are worth their rows, whoever they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple


class Block(NamedTuple):
    """Nodes of one draft that are taken together or not at all."""

    nodes: int
    gain: float
    """Tokens that they should add, less what else they cost than rows."""

    @property
    def rate(self) -> float:
        return self.gain / self.nodes


def blocks(gains: Sequence[float], whole: bool = False) -> list[Block]:
    """A draft's nodes, in their order, as blocks each of which gains less a node than the one before it: a weak node
    is taken for what comes after it. `whole`: it is one block."""
    if whole:
        return [Block(len(gains), sum(gains))] if gains else []
    found: list[Block] = []
    for gain in gains:
        block = Block(1, gain)
        while found and found[-1].rate < block.rate:
            before = found.pop()
            block = Block(before.nodes + block.nodes, before.gain + block.gain)
        found.append(block)
    return found


class Choice(NamedTuple):
    """How many of each draft's nodes are taken, and what that wins."""

    nodes: list[int]
    win: float
    """Tokens, less those that the time would have brought."""


def best_choice(drafts: Sequence[Sequence[Block]], rows: int, cost: Callable[[int], float], pace: float,
                most: int = 1 << 30) -> Choice:
    """The best of all prefixes of all drafts together, of `most` nodes: what they should gain, less the tokens that
    the time of their rows would bring otherwise, `pace` a second, in a step that has so many rows without them.

    However many rows are taken, those are taken that gain most and still fit; how many, is searched over all numbers,
    since more can pay where fewer do not: a step's cost has stairs. Of equal gains the one nearer to its beginning
    comes first, then that of the draft that stands first.
    """
    start = cost(rows)
    heap = [(-own[0].rate, 0, place) for place, own in enumerate(drafts) if own]
    heapify(heap)
    taken = [0] * len(drafts)
    order: list[tuple[int, int]] = []
    """Of the blocks that were taken: whose, and how many nodes."""
    total = best = 0.0
    added = kept = 0
    while heap:
        rate, position, place = heap[0]
        if rate >= 0.0:
            break  # these cost more than they bring even where rows cost nothing
        block = drafts[place][position]
        if added + block.nodes > most:
            heappop(heap)
            continue
        total += block.gain
        added += block.nodes
        order.append((place, block.nodes))
        win = total - pace * (cost(rows + added) - start)
        if win > best:
            best, kept = win, len(order)
        if position + 1 < len(drafts[place]):
            heapreplace(heap, (-drafts[place][position + 1].rate, position + 1, place))
        else:
            heappop(heap)
    for place, nodes in order[:kept]:
        taken[place] += nodes
    return Choice(taken, best)
