"""Each operation of the cache manager, as the scheduler relies on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.allocation import Allocation
from paceline.cache.invariants import CacheInvariantError
from paceline.cache.manager import CacheManager
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.errors import ConfigError
from paceline.kernels.groups import NULL_BLOCK, CacheGroup

FULL = CacheGroup("full", (0,), 1, 1)
WINDOW = CacheGroup("window", (1,), 1, 1, window=6)
SIZE = 4
TEXT = list(range(64))


def make(*groups: CacheGroup, blocks: int = 17, seats: int = 4, **options: object) -> CacheManager:
    groups = groups or (FULL,)
    return CacheManager(groups, [blocks] * len(groups), SIZE, seats, 16, **options)  # type: ignore[arg-type]


def opened(cache: CacheManager, length: int, *, reuse: bool = False) -> Allocation:
    """A sequence with `length` tokens computed and committed."""
    allocation = cache.open(TEXT[:length], reuse=reuse)
    assert allocation is not None
    assert cache.reserve(allocation, allocation.cached, length) is not None
    cache.commit(allocation, TEXT, length)
    return allocation


def test_a_cache_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="as many block counts"):
        CacheManager([FULL], [3, 3], SIZE, 1, 1)
    with pytest.raises(ConfigError, match="2 blocks"):
        CacheManager([FULL], [1], SIZE, 1, 1)


def test_seats_run_out_and_come_back() -> None:
    cache = make(seats=2)
    first, second = opened(cache, 3), opened(cache, 3)
    assert {first.seat, second.seat} == {0, 1}
    assert cache.open([1]) is None and cache.fork(first) is None
    cache.close(first)
    third = cache.open([1])
    assert third is not None and third.seat == 0
    cache.check([second, third])
    with pytest.raises(ValueError, match="already closed"):
        cache.close(first)


def test_reserve_takes_just_the_missing_blocks_and_keeps_the_tables_current() -> None:
    cache = make(FULL, WINDOW)
    allocation = cache.open(TEXT[:5])
    assert allocation is not None
    assert cache.reserve(allocation, 0, 5) == []
    assert [len(blocks) for blocks in allocation.blocks] == [2, 2]
    assert cache.reserve(allocation, 5, 8) == [] and len(allocation.blocks[0]) == 2
    assert cache.reserve(allocation, 8, 9) == [] and len(allocation.blocks[0]) == 3
    for table, blocks in zip(cache.tables, allocation.blocks):
        assert table.dtype == np.int64 and table[allocation.seat, :4].tolist() == [*blocks, NULL_BLOCK]
    cache.check([allocation])


def test_reserve_that_does_not_fit_changes_nothing() -> None:
    cache = CacheManager([FULL, WINDOW], [9, 3], SIZE, 2, 16)
    allocation = opened(cache, 8)
    before = [list(blocks) for blocks in allocation.blocks]
    assert cache.reserve(allocation, 8, 13) is None
    assert allocation.blocks == before and cache.free_blocks(0) == 6
    assert cache.room(allocation, 8) == 0
    cache.check([allocation])


def test_room_says_how_far_reserve_can_go() -> None:
    cache = make(blocks=4)
    allocation = opened(cache, 3)
    assert cache.room(allocation, 3) == 9
    assert cache.reserve(allocation, 3, 13) is None
    assert cache.reserve(allocation, 3, 12) == []


def test_a_position_beyond_the_table_is_a_mistake_of_the_caller() -> None:
    cache = make(blocks=33)
    with pytest.raises(ValueError, match="beyond the block table"):
        cache.reserve(opened(cache, 3), 60, 65)


def test_paged_copy_on_write_refcounts() -> None:
    cache = make()
    parent = opened(cache, 6)
    full, partial = parent.blocks[0]
    child = cache.fork(parent)
    assert child is not None
    pool = cache.pools[0]
    assert pool.refs[full] == pool.refs[partial] == 2 and cache.usage().used == 2
    copies = cache.reserve(child, 6, 7)
    target = child.blocks[0][1]
    assert copies == [BlockCopy(0, partial, target)] and target != partial
    assert (pool.refs[full], pool.refs[partial], pool.refs[target]) == (2, 1, 1)
    assert cache.reserve(parent, 6, 7) == [], "the last holder writes in place"
    cache.check([parent, child])
    cache.close(parent)
    assert pool.refs[full] == 1 and pool.refs[partial] == 0
    cache.close(child)
    assert cache.usage().used == 0
    cache.check([])


def test_copy_on_write_needs_a_free_block() -> None:
    cache = make(blocks=3)
    parent = opened(cache, 6)
    child = cache.fork(parent)
    assert child is not None
    assert cache.room(child, 6) == 0 and cache.reserve(child, 6, 7) is None
    cache.close(parent)
    assert cache.reserve(child, 6, 7) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_paging_wastes_at_most_block_size_minus_one_slots_a_sequence(lengths: list[int]) -> None:
    cache = make(blocks=65, enable_prefix_caching=False)
    allocations = []
    for length in lengths:
        allocation = cache.open(TEXT[:length])
        assert allocation is not None
        for position in range(length):
            cache.reserve(allocation, position, position + 1)
        allocations.append(allocation)
        assert len(allocation.blocks[0]) * SIZE - length <= SIZE - 1
    assert cache.usage().used * SIZE - sum(lengths) <= (SIZE - 1) * len(lengths)


def test_a_window_group_frees_what_committed_tokens_have_passed() -> None:
    cache = make(FULL, WINDOW, enable_prefix_caching=False)
    allocation = opened(cache, 8)
    cache.reserve(allocation, 8, 12)
    assert NULL_BLOCK not in allocation.blocks[1], "reserved tokens free nothing"
    cache.commit(allocation, TEXT, 9)
    assert allocation.blocks[1][0] == NULL_BLOCK and NULL_BLOCK not in allocation.blocks[1][1:]
    assert NULL_BLOCK not in allocation.blocks[0]
    assert cache.free_blocks(1) == 16 - 2
    cache.check([allocation])


def test_the_key_at_the_edge_of_the_window_is_kept() -> None:
    cache = make(WINDOW, enable_prefix_caching=False)
    allocation = opened(cache, 8)
    assert allocation.blocks[0][0] != NULL_BLOCK, "position 8 still reads position 3"
    cache.reserve(allocation, 8, 9)
    cache.commit(allocation, TEXT, 9)
    assert allocation.blocks[0][0] == NULL_BLOCK, "position 9 reads no further back than 4"


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 11, 12])
def test_rollback_of_any_number_of_tokens_drops_whole_blocks(length: int) -> None:
    cache = make()
    allocation = opened(cache, 12)
    cache.rollback(allocation, length)
    assert len(allocation.blocks[0]) == -(-length // SIZE)
    cache.check([allocation])


def test_text_rewritten_after_a_rollback_does_not_answer_for_the_old_text() -> None:
    cache = make()
    allocation = opened(cache, 12)
    cache.rollback(allocation, 6)
    cache.check([allocation])
    other = TEXT[:6] + [99] * 6
    assert cache.reserve(allocation, 6, 12) == []
    assert cache.usage().cached == 2, "the block that is written again is out of the prefix cache"
    cache.commit(allocation, other, 12)
    cache.check([allocation])
    fresh, old = cache.open([*other, 0]), cache.open(TEXT[:13])
    assert fresh is not None and old is not None
    assert fresh.cached == 12 and old.cached == 4
    cache.check([allocation, fresh, old])


def test_rollback_below_a_block_that_others_share_copies_it() -> None:
    cache = make()
    first = opened(cache, 9)
    second = cache.open(TEXT[:9])
    assert second is not None and second.cached == 8
    cache.rollback(first, 6)
    shared = first.blocks[0][1]
    assert cache.reserve(first, 6, 7) == [BlockCopy(0, shared, first.blocks[0][1])]
    assert second.blocks[0][1] == shared
    cache.check([first, second])


def test_what_a_window_has_freed_cannot_be_rolled_back_to() -> None:
    cache = make(WINDOW)
    allocation = opened(cache, 20)
    cache.rollback(allocation, 19)
    with pytest.raises(ValueError, match="has freed the window"):
        cache.rollback(allocation, 8)


def test_a_fork_may_be_rolled_back_without_touching_its_parent() -> None:
    cache = make()
    parent = opened(cache, 6)
    cache.reserve(parent, 6, 12)
    child = cache.fork(parent)
    assert child is not None
    cache.rollback(child, 6)
    assert len(child.blocks[0]) == 2 and len(parent.blocks[0]) == 3 and cache.usage().shared == 2
    cache.check([parent, child])


def test_compaction_crosses_block_boundaries_and_leaves_out_rows_already_in_place() -> None:
    cache = make(FULL, WINDOW)
    allocation = opened(cache, 6)
    cache.reserve(allocation, 6, 14)
    moves = cache.compact(allocation, 6, [1, 3, 6])

    def slot(group: int, position: int) -> int:
        return allocation.blocks[group][position // SIZE] * SIZE + position % SIZE

    assert moves == [SlotMove(g, slot(g, 6 + source), slot(g, 6 + target))
                     for g in (0, 1) for source, target in ((3, 2), (6, 3))]
    assert cache.compact(allocation, 6, [1, 2, 3]) == [], "an accepted chain moves nothing"


def test_capacity_is_what_one_sequence_can_hold_alone() -> None:
    assert make(blocks=5).capacity() == 16
    assert make(blocks=99).capacity() == 64, "the table has 16 blocks"
    assert CacheManager([WINDOW], [4], SIZE, 1, 16).capacity() == 64, "a window lives in three blocks for ever"
    assert CacheManager([WINDOW], [3], SIZE, 1, 16).capacity() == 8


def test_a_window_lives_for_ever_in_the_blocks_that_capacity_promises() -> None:
    cache = CacheManager([WINDOW], [4], SIZE, 1, 16)
    allocation = cache.open(TEXT)
    assert allocation is not None
    for position in range(64):
        assert cache.reserve(allocation, position, position + 1) is not None
        cache.commit(allocation, TEXT, position + 1)
        cache.check([allocation])


def test_usage_adds_up() -> None:
    cache = make(FULL, WINDOW)
    first, second = opened(cache, 9), opened(cache, 5, reuse=True)
    usage = cache.usage()
    assert usage.total == 32 and usage.used + usage.free == usage.total
    assert usage.used == (3 + 1) + (2 + 2), "the window of the first has passed its block 0, which the second revives"
    assert usage.shared == 1 and usage.cached == 4
    assert usage.hits == 4 and usage.queries == 5
    cache.check([first, second])


@pytest.mark.parametrize("damage", ["refs", "table", "free", "flag", "leak", "seat"])
def test_the_checker_notices_damage(damage: str) -> None:
    cache = make()
    allocation = opened(cache, 9)
    cache.check([allocation])
    live = [allocation]
    if damage == "refs":
        cache.pools[0].refs[allocation.blocks[0][0]] = 2
    elif damage == "table":
        cache.tables[0][allocation.seat, 0] = 9
    elif damage == "free":
        cache.pools[0].free -= 1
    elif damage == "flag":
        cache.pools[0].cached[allocation.blocks[0][0]] = 0
    elif damage == "leak":
        allocation.blocks[0].pop()
    else:
        live = []
    with pytest.raises(CacheInvariantError):
        cache.check(live)


def test_one_more_token_costs_no_work_when_its_block_is_there() -> None:
    """Counted, not timed: neither call may touch the pools, the tables or the prefix cache."""
    cache = make(FULL, WINDOW)
    allocation = opened(cache, 5)
    cache.reserve(allocation, 5, 6)
    pools, cache.pools = cache.pools, None  # type: ignore[assignment]
    tables, cache.tables = cache.tables, None  # type: ignore[assignment]
    assert cache.reserve(allocation, 6, 7) == []
    cache.commit(allocation, TEXT, 7)
    cache.pools, cache.tables = pools, tables
    cache.check([allocation])
