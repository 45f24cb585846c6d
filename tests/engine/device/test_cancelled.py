"""Requests that are cancelled while steps are in flight: what they held is free at once, and nobody else can tell."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.device.on_device import HEAVY, PROMPTS, executor_of, made, on_host, run
from paceline import LLM, SamplingParams
from paceline.engine.execute.graph_executor import AHEAD
from paceline.engine.schedule.sequence import UNSEATED, Placement

LATE = [7, 8, 9, 7, 8, 9, 7, 8]
GREEDY: dict[str, Any] = {"temperature": 0.0}
NGRAM: dict[str, Any] = {"method": "ngram", "adaptive": False, "k": 4}
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "repeated": (GREEDY, None),
    "sampled": ({"temperature": 0.9, "seed": 3, "top_k": 20} | HEAVY, None),
    "drafted": (GREEDY, NGRAM),
    "drafted and chosen": (GREEDY, "ngram"),
    "masked": (GREEDY | {"no_repeat_ngram_size": 2}, None),
    "scored": (GREEDY | {"logprobs": 1}, None),
}


def text(llm: LLM, name: str) -> list[int]:
    record = llm.engine.take(name)
    assert record.error is None
    return list(record.emitters[0].token_ids)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("passes", "who"), [(1, 0), (3, 1)])
def test_its_seat_and_blocks_are_free_at_once_and_others_have_their_tokens(way: str, passes: int, who: int) -> None:
    controls, wish = WAYS[way]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **controls)
    options: dict[str, Any] = {"max_num_seqs": 3, "kv_blocks": 60, "block_size": 4, "max_model_len": 48}
    expected = [out.outputs[0].token_ids for out in on_host(**options).generate([*PROMPTS, LATE], params)]
    llm = made(3, **options)
    engine = llm.engine
    names = [engine.add(prompt, params, speculation=wish) for prompt in PROMPTS]
    for _ in range(passes):
        engine.step()
    (seq,) = engine.scheduler.sequences(names[who])
    seat, held, used = seq.allocation.seat, len(seq.allocation.blocks[0]), engine.cache.usage().used
    assert len(executor_of(llm)._flight) == (AHEAD if seq.placement >= Placement.AHEAD else 1)
    engine.cancel(names[who])
    assert seq.allocation is UNSEATED and engine.cache.usage().used == used - held
    late = engine.add(LATE, params, speculation=wish)
    engine.step()
    while not engine.scheduler.sequences(late)[0].computed:
        engine.step()
    assert engine.scheduler.sequences(late)[0].allocation.seat == seat
    run(llm)
    assert text(llm, late) == expected[3]
    for number, name in enumerate(names):
        found = text(llm, name)
        assert found == expected[number][:len(found)] and (number == who or len(found) == 24)
    assert engine.cache.usage().used == 0 and engine.executor.oldest is None
    engine.cache.check([])


@pytest.mark.parametrize("way", WAYS)
def test_where_all_are_cancelled_nothing_is_left_of_their_steps(way: str) -> None:
    controls, wish = WAYS[way]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **controls)
    (expected,) = on_host().generate([LATE], params)
    llm = made(3)
    names = [llm.engine.add(prompt, params, speculation=wish) for prompt in PROMPTS]
    for _ in range(3):
        llm.engine.step()
    assert executor_of(llm)._flight
    for name in names:
        llm.engine.cancel(name)
    assert llm.engine.cache.usage().used == 0
    late = llm.engine.add(LATE, params, speculation=wish)
    run(llm)
    assert text(llm, late) == expected.outputs[0].token_ids
    assert llm.engine.executor.oldest is None and not llm.engine.has_work


def check_mix(seed: int) -> int:
    """Requests of every kind come and are cancelled at any time, with few seats and blocks; how many were cancelled."""
    chance = random.Random(seed)
    options: dict[str, Any] = {"max_num_seqs": chance.choice([2, 3]), "kv_blocks": chance.choice([20, 40]),
                               "block_size": 4, "max_model_len": 56}
    prompts = [[chance.randrange(chance.choice([3, 90])) for _ in range(chance.randint(1, 16))] for _ in range(9)]
    params = [SamplingParams(max_tokens=chance.randint(4, 36), ignore_eos=True, **chance.choice(list(WAYS.values()))[0])
              for _ in prompts]
    wishes = [chance.choice([None, NGRAM, "ngram", {"method": "oracle", "k": 3, "tokens": [1, 2, 3]}])
              for _ in prompts]
    expected = [out.outputs[0].token_ids for out in on_host(**options | {"kv_blocks": 100}).generate(prompts, params)]
    llm = made(4, **options)
    executor_of(llm).how_often = lambda *_: chance.choice([1, 2, 5])
    waiting, cancelled = list(range(len(prompts))), set()
    while waiting or llm.engine.has_work:
        if waiting and chance.random() < 0.6:
            number = waiting.pop(0)
            llm.engine.add(prompts[number], params[number], speculation=wishes[number], request_id=str(number))
        running = [seq.request.id for seq in llm.engine.scheduler.running]
        if running and chance.random() < 0.15:
            cancelled.add(int(name := chance.choice(running)))
            llm.engine.cancel(name)
        llm.engine.step()
    for number, tokens in enumerate(expected):
        found = text(llm, str(number))
        assert found == tokens[:len(found)] and (number in cancelled or len(found) == len(tokens)), (seed, number)
    assert llm.engine.cache.usage().used == 0 and llm.engine.executor.oldest is None
    llm.engine.cache.check([])
    return len(cancelled)


def test_any_mix() -> None:
    assert sum(check_mix(seed) for seed in range(2)) > 1


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_many_mixes(first: int) -> None:
    for seed in range(first, first + 20):
        check_mix(seed)
