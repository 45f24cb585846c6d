"""The cache's invariants, checked from scratch: slow, complete, for tests and idle engines."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.cache.allocation import Allocation
from paceline.cache.blocks import BlockPool
from paceline.cache.offload import ColdBlocks
from paceline.cache.prefix import PrefixCache
from paceline.cache.swap import Swapped, SwapSpace
from paceline.kernels.groups import NULL_BLOCK, CacheGroup


class CacheInvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug in Paceline, never a user's mistake."""


class CheckedCache(Protocol):
    """What the checks read of a CacheManager, and never change."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    max_seats: int
    max_blocks_per_seq: int
    free_seats: list[int]
    pools: list[BlockPool]
    """One per group, as are `tables`."""
    tables: list[npt.NDArray[np.int64]]
    """Per group [max_seats, max_blocks_per_seq]."""
    prefix: PrefixCache
    swap: SwapSpace
    cold: ColdBlocks


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise CacheInvariantError(sentence)


def check_cache(cache: CheckedCache, live: list[Allocation], swapped: list[Swapped]) -> None:
    """`live` must be all open allocations, `swapped` all that were swapped out and not back."""
    _check_seats(cache, live)
    for group in range(len(cache.groups)):
        _check_holders(cache, live, group)
        _check_tables(cache, live, group)
        _check_entries(cache, group)
    _check_nodes(cache, live)
    _check_swap(cache, swapped)
    _check_cold(cache)


def _check_seats(cache: CheckedCache, live: list[Allocation]) -> None:
    seats = sorted([allocation.seat for allocation in live] + cache.free_seats)
    _require(seats == list(range(cache.max_seats)), f"seats held and free are {seats}: one is lost or held twice")


def _check_holders(cache: CheckedCache, live: list[Allocation], group: int) -> None:
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
    _check_free_list(pool, holders, f"group {name!r}")
    _require(pool.shared == sum(count > 1 for count in holders.values()),
             f"group {name!r} counts {pool.shared} shared blocks wrongly")


def _check_free_list(pool: BlockPool, holders: Counter[int], name: str) -> None:
    free = pool.free_list()
    _require(len(free) == len(set(free)), f"the free list of {name} has a block twice: {free}")
    _require(set(free) == {block for block in range(1, pool.num_blocks) if not holders[block]},
             f"the free list of {name} is not exactly the blocks that nobody holds")
    _require(pool.free == len(free), f"{name} counts {pool.free} free blocks but lists {len(free)}")
    flags = [pool.cached[block] for block in free]
    _require(flags == sorted(flags), f"{name} would evict cached blocks before using plain ones")


def _check_tables(cache: CheckedCache, live: list[Allocation], group: int) -> None:
    table, name = cache.tables[group], cache.groups[group].name
    rows = {allocation.seat: allocation.blocks[group] for allocation in live}
    for seat in range(cache.max_seats):
        expected = rows.get(seat, [])
        padded = expected + [NULL_BLOCK] * (cache.max_blocks_per_seq - len(expected))
        _require(table[seat].tolist() == padded, f"the table of group {name!r} at seat {seat} is not what is held")


def _check_entries(cache: CheckedCache, group: int) -> None:
    pool, name = cache.pools[group], cache.groups[group].name
    entries = cache.prefix.node_of[group]
    flagged = {block for block in range(pool.num_blocks) if pool.cached[block]}
    _require(flagged == set(entries), f"group {name!r}: blocks flagged as cached are not those with an entry")
    _require(pool.registered == len(flagged), f"group {name!r} counts {pool.registered} cached blocks wrongly")
    for block, node in entries.items():
        _require(node.blocks[group] == block, f"the prefix entry of block {block} of group {name!r} names another")
        _require(bool(node.ahead and group in node.ahead) == bool(cache.groups[group].lookahead),
                 f"the prefix entry of block {block} of group {name!r} lacks the tokens that it depends on")


def _check_nodes(cache: CheckedCache, live: list[Allocation]) -> None:
    nodes = cache.prefix.nodes()
    known = set(nodes)
    _require(len(nodes) == len(known), "a prefix node is in the table twice")
    pins = Counter(allocation.chain[-1] for allocation in live if allocation.chain)
    for node in nodes:
        held = sum(block != NULL_BLOCK for block in node.blocks) + len(node.cold or ())
        _require(node.held == held, "a prefix node miscounts its blocks")
        _require(node.pins == pins[node], "a prefix node is pinned by other sequences than those that end there")
        _require(bool(node.held or node.pins or node.children), "a prefix node that nothing needs is kept")
        _require(node.children <= known, "a prefix node has a child that cannot be found")
        _require(node.parent is not None and node in node.parent.children, "a prefix node's parent does not know it")
    for allocation in live:
        for parent, child in zip(allocation.chain, allocation.chain[1:]):
            _require(child.parent is parent, "a sequence's chain of prefix nodes is broken")
        _require(set(allocation.chain) <= known, "a sequence's chain holds a node that was dropped")


def _check_swap(cache: CheckedCache, swapped: list[Swapped]) -> None:
    swap = cache.swap
    _require(swap.sequences == len(swapped), f"{swap.sequences} sequences are counted as swapped, not {len(swapped)}")
    _require(bool(swap.pools) or not swapped, "a sequence is swapped and there is no memory for it")
    for group, pool in enumerate(swap.pools):
        name = f"the swap space of group {cache.groups[group].name!r}"
        _require(pool.num_blocks == swap.most_blocks + 1, f"{name} is not as large as it may be")
        holders = Counter(block for own in swapped for block in own.blocks[group])
        for block in range(pool.num_blocks):
            _require(pool.refs[block] == holders[block] <= 1, f"block {block} of {name} is lost or held twice")
        _check_free_list(pool, holders, name)
        _require(not any(pool.cached) and not pool.registered, f"{name} has blocks of the prefix cache")
        for own in swapped:
            whole = -(-own.length // cache.block_size)
            _require(len(own.blocks[group]) == whole - own.first[group],
                     f"a swapped sequence of {own.length} tokens has {len(own.blocks[group])} blocks in {name}")


def _check_cold(cache: CheckedCache) -> None:
    for group, pool in enumerate(cache.cold.pools):
        name = f"the cold blocks of group {cache.groups[group].name!r}"
        _require(pool.num_blocks == cache.cold.most_blocks + 1, f"{name} are not as many as there may be")
        _require(not any(pool.refs), f"{name} are still claimed")
        _check_free_list(pool, Counter(), name)
        entries = cache.prefix.cold_node_of[group]
        flagged = {block for block in range(pool.num_blocks) if pool.cached[block]}
        _require(flagged == set(entries) and pool.registered == len(flagged), f"{name} are not those with an entry")
        for block, node in entries.items():
            _require(node.cold is not None and node.cold[group].block == block,
                     f"the prefix entry of block {block} of {name} names another")
            _require(node.cold is not None and len(node.cold[group].ahead) == cache.groups[group].lookahead,
                     f"the prefix entry of block {block} of {name} lacks the tokens that it depends on")
