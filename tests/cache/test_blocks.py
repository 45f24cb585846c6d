"""The block pool: who is given out next, and what reference counts do."""

from __future__ import annotations

import pytest

from paceline.cache.blocks import BlockPool
from paceline.kernels.groups import NULL_BLOCK


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def pool(evicted: list[int]) -> BlockPool:
    return BlockPool(5, evicted.append)


def test_every_block_but_the_null_block_is_given_out_once(pool: BlockPool) -> None:
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [1, 2, 3, 4] and NULL_BLOCK not in blocks
    assert pool.free == 0
    with pytest.raises(RuntimeError, match="empty pool"):
        pool.allocate()


def test_a_block_is_free_when_its_last_holder_lets_go(pool: BlockPool) -> None:
    block = pool.allocate()
    pool.share(block)
    assert pool.shared == 1
    pool.release(block)
    assert pool.free == 3 and pool.shared == 0
    pool.release(block)
    assert pool.free == 4
    with pytest.raises(RuntimeError, match="more often than held"):
        pool.release(block)


def test_plain_blocks_are_taken_before_cached_ones_and_cached_ones_least_recently_used_first(
        pool: BlockPool, evicted: list[int]) -> None:
    first, second, third, fourth = (pool.allocate() for _ in range(4))
    for block in (first, second, third):
        pool.register(block)
    for block in (second, first, fourth, third):
        pool.release(block)
    assert pool.free_list() == [fourth, second, first, third]
    assert [pool.allocate() for _ in range(4)] == [fourth, second, first, third]
    assert evicted == [second, first, third] and pool.evictions == 3 and pool.registered == 0


def test_sharing_revives_a_cached_block_and_makes_it_the_most_recently_used(
        pool: BlockPool, evicted: list[int]) -> None:
    old, new = pool.allocate(), pool.allocate()
    for block in (old, new):
        pool.register(block)
        pool.release(block)
    pool.share(old)
    assert old not in pool.free_list() and pool.refs[old] == 1
    pool.release(old)
    assert pool.free_list()[-2:] == [new, old] and not evicted


def test_a_free_block_without_content_cannot_be_shared(pool: BlockPool) -> None:
    with pytest.raises(RuntimeError, match="holds nothing"):
        pool.share(1)


def test_an_unregistered_free_block_is_the_next_to_be_taken(pool: BlockPool, evicted: list[int]) -> None:
    block = pool.allocate()
    pool.register(block)
    pool.release(block)
    pool.unregister(block)
    assert pool.allocate() == block and not evicted
