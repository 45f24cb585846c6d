"""Many small random worlds, run to their end: every token must be the oracle's and nobody may starve."""

from __future__ import annotations

import random

import pytest
from simulation import STOP, VOCABULARY, World, group, propose

from paceline.cache.host import HostLimits
from paceline.cache.manager import CacheManager
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.errors import RequestError


def random_world(chance: random.Random) -> World:
    """A tight one: few blocks, few seats, odd block sizes, one to four cache groups, sometimes a colliding hash."""
    groups = [group("full")]
    if chance.random() < 0.5:
        groups.append(group("window", window=chance.choice([1, 3, 5, 8, 13])))
    if chance.random() < 0.5:
        groups.append(group("drafter", lookahead=chance.choice([1, 2])))
    if chance.random() < 0.2:
        groups.append(group("drafter's window", lookahead=1, window=chance.choice([2, 6])))
    if chance.random() < 0.2:
        groups = groups[1:] or groups
    block_size = chance.choice([1, 2, 3, 4])
    max_len = chance.choice([12, 24, 36])
    longest = -(-max_len // block_size)
    blocks = [chance.randint(longest // 2 + 3, 2 * longest + 3) for _ in groups]
    extra = {"hash_function": lambda *_: 7} if chance.random() < 0.2 else {}
    host = HostLimits(chance.choice([0, 12, 40, 40]), chance.choice([0, 4, 40, 40]))
    cache = CacheManager(groups, blocks, block_size, chance.randint(1, 6), longest + chance.randint(0, 3),
                         chance.random() < 0.9, host=host, **extra)
    config = SchedulerLimits(max_batch_tokens=chance.choice([1, 3, 8, 32]), max_num_seqs=chance.randint(1, 6),
                             max_model_len=max_len, watermark=chance.choice([0, 0.1, 0.3]),
                             max_chunk=chance.choice([None, 1, 4]))
    return World(cache, config, chance.choice(["recompute", "swap", "swap", "swap"]))


def add_at_random(world: World, chance: random.Random, stems: list[list[int]]) -> None:
    length = chance.randint(1, world.scheduler.config.max_model_len - 1)
    shared = chance.randint(0, length)
    prompt = chance.choice(stems)[:shared] + [chance.randrange(STOP) for _ in range(length - shared)]
    max_tokens, params = chance.randint(1, 12), {}
    if chance.random() < 0.1:
        max_tokens, params = chance.randint(0, 4), {"prompt_logprobs": 1}
    deadline = world.now + chance.randint(1, 30) if chance.random() < 0.1 else None
    try:
        world.add(prompt, max_tokens, seed=chance.randrange(100), deadline=deadline, n=chance.choice([1, 1, 1, 2, 3]),
                  priority=chance.choice([0, 0, 0, 1, 2]), cache_salt=chance.choice(["", "", "a"]), **params)
    except RequestError as error:
        assert "cache holds" in str(error)


def draft_at_random(world: World, chance: random.Random, share: float) -> None:
    for seq in world.scheduler.running:
        if chance.random() < share:
            seq.draft = propose(chance, seq)
        seq.wait_for_commit = seq.sample == 0 and seq.order % 3 == 0


def live(world: World, chance: random.Random, events: int = 60) -> None:
    stems = [[chance.randrange(VOCABULARY) for _ in range(40)] for _ in range(2)]
    for _ in range(events):
        event = chance.random()
        if event < 0.25:
            add_at_random(world, chance, stems)
            world.check()
        elif event < 0.3 and world.everyone:
            world.scheduler.cancel(chance.choice(world.everyone).request.id)
            world.check()
        elif event < 0.35:
            world.now += chance.randint(0, 5)
            world.scheduler.expire()
            world.check()
        elif event < 0.38 and world.scheduler.running:
            world.scheduler.preempt(chance.choice(world.scheduler.running))
            world.check()
        elif event < 0.7:
            draft_at_random(world, chance, 0.5)
            world.launch()
        elif world.flight:
            world.commit()
    for _ in range(3000):
        draft_at_random(world, chance, 0.3)
        step = world.launch()
        if world.flight and (step is None or chance.random() < 0.7):
            world.commit()
        elif step is None:
            break
    assert not world.scheduler.has_work(), "somebody starves"
    world.check_outputs()


@pytest.mark.parametrize("batch", [
    0, 2, *(pytest.param(batch, marks=pytest.mark.full) for batch in (1, *range(3, 12)))])
def test_every_output_is_the_oracles_and_no_block_leaks(batch: int) -> None:
    steps = preemptions = hits = evictions = drafted = swapped = fetched = 0
    for number in range(6):
        chance = random.Random(1000 * batch + number)
        world = random_world(chance)
        live(world, chance)
        steps += world.steps
        preemptions += world.scheduler.preemptions
        hits += world.cache.hits
        evictions += world.cache.usage().evictions
        drafted += world.accepted
        swapped += world.cache.swap.blocks_in
        fetched += world.cache.cold.blocks_in
    assert steps > 250 and preemptions and hits and evictions and drafted, "these worlds were too quiet to prove it"
    assert swapped and fetched, "the host was too quiet to prove it"


@pytest.mark.full
@pytest.mark.parametrize("batch", range(20))
def test_many_more_worlds(batch: int) -> None:
    for number in range(100):
        chance = random.Random(1_000_000 + 1000 * batch + number)
        live(random_world(chance), chance)
