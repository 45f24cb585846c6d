"""Two caches between which blocks are handed over, by random steps: their books, what blocks hold, what others hear."""

from __future__ import annotations

import random

import pytest
from simulation import World
from test_worlds import live, random_world

from cluster.random_cache import SCOPES, RandomCache
from paceline.cache.handover import Piece
from paceline.cache.keys import key_of
from paceline.cache.prefix import Node
from paceline.cluster.kv_events import DEVICE, HOST
from paceline.cluster.kv_publisher import CacheWatcher, events_of
from paceline.cluster.kv_reader import PrefixIndex
from paceline.engine.schedule.sequence import Sequence


def check(world: RandomCache) -> None:
    world.cache.check([allocation for allocation, _, _ in world.live])


@pytest.mark.parametrize("seed", range(6))
def test_books_agree_whatever_is_handed_over_and_whatever_fails(seed: int) -> None:
    """Full attention beside a window whose entries depend on the token after them; small caches, some of it cold."""
    source, target = RandomCache(seed), RandomCache(seed + 1000, cold=seed % 2 * 6)
    chance, taken, refused = source.random, 0, 0
    for _ in range(300):
        source.step()
        target.step()
        tokens = [chance.randrange(2) for _ in range(chance.randint(5, 30))]
        if source.live and chance.random() < 0.7:
            tokens = chance.choice(source.live)[1]
        scope = chance.choice(SCOPES)
        found = [piece for piece, _ in source.cache.handover.find(tokens, scope)]
        if not found:
            continue
        before = target.cache.handover.held(tokens, scope)
        intake, _ = target.cache.begin_intake(tokens, scope, found)
        arrived = chance.random() < 0.8
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


# ------------------------------------------------------------------ with what blocks hold

class Beside:
    """Follows a world of the scheduler's by its KV events, and hands it blocks of another world's at random moments,
    whatever is in flight. The worlds themselves notice any row that would read what is not its own history."""

    def __init__(self, world: World, other: World, chance: random.Random) -> None:
        self.world, self.other, self.chance = world, other, chance
        self.index = PrefixIndex()
        self.watcher = CacheWatcher(world.cache.prefix, lambda: None)
        self.watcher.watch()
        self.handed = self.looks = 0
        self._check = world.check
        world.check = self.check  # type: ignore[method-assign]

    def check(self) -> None:
        self._check()
        if self.world.everyone and self.world.cache.enable_prefix_caching and self.chance.random() < 0.3:
            self.hand_over(self.chance.choice(self.world.everyone))
            self._check()
        changes = []
        while (one := self.watcher.take()) is not None:
            changes.append(one)
        for event in events_of(changes, self.world.cache.block_size):
            self.index.apply(event)
        prefix = self.world.cache.prefix
        for medium, nodes in ((DEVICE, prefix.node_of[0]), (HOST, prefix.cold_node_of[0])):
            assert set(self.index.held.get(medium, {})) == {key_of(node) for node in nodes.values()}
        self.looks += bool(prefix.node_of[0])

    def hand_over(self, seq: Sequence) -> None:
        world, other, size = self.world, self.other, self.world.cache.block_size
        found = other.cache.handover.find(seq.tokens, seq.scope)
        if not found:
            return
        world.transfer(*world.scheduler.take_transfers())
        other.transfer(*other.scheduler.take_transfers())
        blocks = dict(found)
        intake, copies = world.cache.begin_intake(seq.tokens, seq.scope, list(blocks))
        world.transfer([], copies)
        for piece, _, block in intake.taken:
            for offset in range(size):
                world._put(world.memory, piece.group, block * size + offset,
                           other.memory[piece.group].get(blocks[piece] * size + offset))
        world.cache.handover.end(intake, arrived=True)
        self.handed += len(intake.taken)


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.full) for batch in range(1, 12))])
def test_every_output_is_the_oracles_whatever_is_handed_over(batch: int) -> None:
    handed = hits = looks = 0
    for number in range(4):
        seed = 1000 * batch + number
        other, world = (random_world(random.Random(seed)) for _ in range(2))
        live(other, random.Random(seed))
        beside = Beside(world, other, random.Random(seed + 1))
        live(world, random.Random(seed))
        handed, hits, looks = handed + beside.handed, hits + world.cache.hits, looks + beside.looks
    assert handed > 20 and hits and looks > 200, "these worlds were too quiet to prove it"
