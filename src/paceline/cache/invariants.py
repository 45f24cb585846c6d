"""The cache's invariants, checked from scratch: slow, complete, for tests and idle engines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.kernels.groups import NULL_BLOCK

if TYPE_CHECKING:
    from paceline.cache.allocation import Allocation
    from paceline.cache.manager import CacheManager


class CacheInvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug in Paceline, never a user's mistake."""


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise CacheInvariantError(sentence)


def check_cache(cache: CacheManager, live: list[Allocation]) -> None:
    """`live` must be all open allocations."""
    _check_seats(cache, live)
    for group in range(len(cache.groups)):
        _check_holders(cache, live, group)
        _check_tables(cache, live, group)
        _check_entries(cache, group)
    _check_nodes(cache, live)


def _check_seats(cache: CacheManager, live: list[Allocation]) -> None:
    seats = sorted([allocation.seat for allocation in live] + cache.free_seats)
    _require(seats == list(range(cache.max_seats)), f"seats held and free are {seats}: one is lost or held twice")


def _check_holders(cache: CacheManager, live: list[Allocation], group: int) -> None:
    pool, name = cache.pools[group], cache.groups[group].name
    holders: Counter[int] = Counter()
    for allocation in live:
        held = [block for block in allocation.blocks[group] if block != NULL_BLOCK]
        _require(len(held) == len(set(held)), f"a sequence holds a block of group {name!r} twice: {held}")
        _require(all(block == NULL_BLOCK for block in allocation.blocks[group][:allocation.passed[group]]),
                 f"a block of group {name!r} that the window has passed is still held")
        _require(NULL_BLOCK not in allocation.blocks[group][allocation.passed[group]:],
                 f"a block of group {name!r} inside the window is missing")
        holders.update(held)
    _require(pool.refs[NULL_BLOCK] == 0 and not pool.cached[NULL_BLOCK], f"group {name!r} touched its null block")
    for block in range(1, pool.num_blocks):
        _require(pool.refs[block] == holders[block],
                 f"block {block} of group {name!r} counts {pool.refs[block]} holders but has {holders[block]}")
    free = pool.free_list()
    _require(len(free) == len(set(free)), f"the free list of group {name!r} has a block twice: {free}")
    _require(set(free) == {block for block in range(1, pool.num_blocks) if not holders[block]},
             f"the free list of group {name!r} is not exactly the blocks that nobody holds")
    _require(pool.free == len(free), f"group {name!r} counts {pool.free} free blocks but lists {len(free)}")
    flags = [pool.cached[block] for block in free]
    _require(flags == sorted(flags), f"group {name!r} would evict cached blocks before using plain ones")
    _require(pool.shared == sum(count > 1 for count in holders.values()),
             f"group {name!r} counts {pool.shared} shared blocks wrongly")


def _check_tables(cache: CacheManager, live: list[Allocation], group: int) -> None:
    table, name = cache.tables[group], cache.groups[group].name
    rows = {allocation.seat: allocation.blocks[group] for allocation in live}
    for seat in range(cache.max_seats):
        expected = rows.get(seat, [])
        padded = expected + [NULL_BLOCK] * (cache.max_blocks_per_seq - len(expected))
        _require(table[seat].tolist() == padded, f"the table of group {name!r} at seat {seat} is not what is held")


def _check_entries(cache: CacheManager, group: int) -> None:
    pool, name = cache.pools[group], cache.groups[group].name
    entries = cache.prefix.node_of[group]
    flagged = {block for block in range(pool.num_blocks) if pool.cached[block]}
    _require(flagged == set(entries), f"group {name!r}: blocks flagged as cached are not those with an entry")
    _require(pool.registered == len(flagged), f"group {name!r} counts {pool.registered} cached blocks wrongly")
    for block, node in entries.items():
        _require(node.blocks[group] == block, f"the prefix entry of block {block} of group {name!r} names another")
        _require(bool(node.ahead and group in node.ahead) == bool(cache.groups[group].lookahead),
                 f"the prefix entry of block {block} of group {name!r} lacks the tokens that it depends on")


def _check_nodes(cache: CacheManager, live: list[Allocation]) -> None:
    nodes = cache.prefix.nodes()
    known = set(nodes)
    _require(len(nodes) == len(known), "a prefix node is in the table twice")
    pins = Counter(allocation.chain[-1] for allocation in live if allocation.chain)
    for node in nodes:
        _require(node.held == sum(block != NULL_BLOCK for block in node.blocks), "a prefix node miscounts its blocks")
        _require(node.pins == pins[node], "a prefix node is pinned by other sequences than those that end there")
        _require(bool(node.held or node.pins or node.children), "a prefix node that nothing needs is kept")
        _require(node.children <= known, "a prefix node has a child that cannot be found")
        _require(node.parent is not None and node in node.parent.children, "a prefix node's parent does not know it")
    for allocation in live:
        for parent, child in zip(allocation.chain, allocation.chain[1:]):
            _require(child.parent is parent, "a sequence's chain of prefix nodes is broken")
        _require(set(allocation.chain) <= known, "a sequence's chain holds a node that was dropped")
