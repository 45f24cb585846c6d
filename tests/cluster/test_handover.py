"""The books of two caches between which blocks are handed over, by random steps; no content is looked at here."""

from __future__ import annotations

import pytest

from cluster.random_cache import SCOPES, RandomCache
from paceline.cache.handover import Piece
from paceline.cache.prefix import Node


def check(world: RandomCache) -> None:
    world.cache.check([allocation for allocation, _, _ in world.live])


@pytest.mark.parametrize("seed", range(6))
def test_books_agree_whatever_is_handed_over_and_whatever_fails(seed: int) -> None:
    """Full attention beside a window whose entries depend on the token after them; small caches, some of it cold."""
    source, target = RandomCache(seed), RandomCache(seed + 1000, cold=seed % 2 * 6)
    random, taken, refused = source.random, 0, 0
    for _ in range(300):
        source.step()
        target.step()
        tokens = [random.randrange(2) for _ in range(random.randint(5, 30))]
        if source.live and random.random() < 0.7:
            tokens = random.choice(source.live)[1]
        scope = random.choice(SCOPES)
        found = [piece for piece, _ in source.cache.handover.find(tokens, scope)]
        if not found:
            continue
        before = target.cache.handover.held(tokens, scope)
        intake, _ = target.cache.begin_intake(tokens, scope, found)
        arrived = random.random() < 0.8
        target.cache.handover.end(intake, arrived)
        check(source)
        check(target)
        after = target.cache.handover.held(tokens, scope)
        if arrived and len(intake.taken) == len(found):
            assert after >= before and after >= 1 + max(piece.place for piece in found)
            taken += len(found)
        elif not arrived and intake.taken:
            refused += 1
    assert taken > 20 and refused > 0


def test_what_is_here_of_a_text_makes_no_room_for_the_rest_of_it() -> None:
    world = RandomCache(0, cold=0)
    cache, text = world.cache, [1] * 40
    first = cache.open(text[:8])
    assert first is not None and cache.reserve(first, 0, 8) == []
    cache.commit(first, text[:8], 8)
    cache.close(first)
    others = cache.open([2] * 40)
    assert others is not None and cache.reserve(others, 0, 40) == []  # held: there are few blocks left
    pieces = [Piece(0, place) for place in range(2, 10)]
    for _ in range(4):
        intake, _ = cache.begin_intake(text, "", pieces)
        cache.handover.end(intake, arrived=True)
    nodes: list[Node] = cache.prefix.match(text, "", 10)
    assert [node.keeps(0) for node in nodes] == [True] * 10
    cache.check([others])


def test_without_a_free_block_nothing_is_taken() -> None:
    cache = RandomCache(0, cold=0).cache
    holders = [cache.open([token] * 40) for token in (1, 2, 3)]
    for holder, length in zip(holders, (40, 40, 16)):
        assert holder is not None and cache.reserve(holder, 0, length) == []
    assert cache.free_blocks(0) == 0
    intake, copies = cache.begin_intake([5] * 12, "", [Piece(0, 0), Piece(0, 1)])
    assert not intake.taken and not copies
    cache.handover.end(intake, arrived=True)
    cache.check([holder for holder in holders if holder is not None])
    assert not cache.prefix.match([5] * 12, "", 3)
