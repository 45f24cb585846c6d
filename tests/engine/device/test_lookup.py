"""Drafts that the device looks up by itself: steps with them run ahead of the host, and change no token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.device.on_device import (
    HEAVY,
    PROMPTS,
    alone_on_device,
    executor_of,
    full,
    lacks,
    made,
    on_host,
    outs,
    run,
    same,
    scarce,
)
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.memory import Use
from paceline.engine.schedule.sequence import Placement

GREEDY: dict[str, Any] = {"temperature": 0.0}
LOOPING = [7, 8, 9, 7, 8, 9, 7, 8]
"""The tiny model repeats itself soon, whatever it is asked."""


def ngram(k: int = 4) -> dict[str, Any]:
    return {"method": "ngram", "adaptive": False, "k": k}


def some_requests(rng: random.Random, count: int) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    """Prompts that repeat themselves, or share a beginning; wishes of every kind of company."""
    common = [rng.randrange(4) for _ in range(rng.randint(0, 20))]
    prompts = [common + [rng.randrange(rng.choice([3, 90])) for _ in range(rng.randint(1, 20))] for _ in range(count)]
    params = [SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.7, seed=rng.randrange(99),
                             temperature=rng.choice([0.0, 0.0, 0.8]), **(HEAVY if rng.random() < 0.2 else {}))
              for _ in range(count)]
    known: list[Any] = [None, ngram(1), ngram(3), ngram(12), "ngram", "auto",
                        {"method": "oracle", "k": 3, "tokens": [1, 2, 3]}]
    return prompts, params, [rng.choice(known) for _ in range(count)]


def within_blocks(llm: LLM) -> None:
    """Every repeated step that is planned may only write what is reserved."""
    builder: Any = llm.engine.scheduler._filler
    fill = builder.fill_repeated

    def checked(*given: Any) -> Any:
        found = fill(*given)
        for group in found[0]:
            assert group.end <= len(group.seq.allocation.blocks[0]) * llm.engine.cache.block_size
        return found

    builder.fill_repeated = checked


def check_mix(seed: int) -> int:
    """One mix of requests with few seats and blocks; how many drafts were accepted."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "block_size": rng.choice([4, 8, 16]), "max_num_seqs": rng.choice([2, 3, 5]),
        "max_model_len": rng.choice([64, 96])}
    options["kv_blocks"] = max(rng.choice([12, 20, 40]), 100 // options["block_size"])
    prompts, params, wishes = some_requests(rng, rng.randint(3, 9))
    expected = on_host(**options).generate(prompts, params)
    llm = made(4, **options)
    often = rng.choice([[1], [16], [1, 1, 2, 5, 8]])
    executor_of(llm).how_often = lambda *_: rng.choice(often)
    within_blocks(llm)
    found = llm.generate(prompts, params, speculation=wishes)
    same(found, expected)
    assert llm.engine.cache.usage().used == 0
    return sum(out.speculation.accepted for out in found if out.speculation is not None)


def test_any_mix_has_the_tokens_of_plain_decoding() -> None:
    assert sum(check_mix(seed) for seed in range(3)) > 5


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_many_mixes(first: int) -> None:
    for seed in range(first, first + 20):
        check_mix(seed)


@pytest.mark.parametrize("repeat", [1, 3, 16])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_the_tokens_and_what_is_told_of_them(repeat: int, k: int) -> None:
    wishes = [GREEDY, {"temperature": 0.4, "seed": 7}, GREEDY | HEAVY]
    expected = outs(on_host(), wishes, 40)
    llm = alone_on_device(made(repeat))
    found = outs(llm, wishes, 40, ngram(k))
    same(found, expected)
    for out in found:
        told = out.speculation
        assert told is not None and told.failure is None and told.method == "ngram"
        # The first token comes with the prompt.
        assert told.emitted + told.plain == len(out.outputs[0].token_ids) - 1
        assert told.accepted <= told.drafted and sum(told.by_depth) == told.accepted
        kinds = [origin.outcome for origin in told.provenance]
        assert len(kinds) == len(out.outputs[0].token_ids) and kinds.count("accepted") == told.accepted
    assert sum(out.speculation.accepted for out in found if out.speculation is not None) > 5
    report = llm.engine.report()
    assert report["accepted"] == sum(out.speculation.accepted for out in found if out.speculation is not None)


@pytest.mark.parametrize("options", [{"name": "deepseek_dense"}, {"kv_dtype": "fp8"}], ids=["latents", "fp8"])
def test_any_cache_is_read_by_drafts(options: dict[str, Any]) -> None:
    wishes = [GREEDY, {"temperature": 0.4, "seed": 7}, GREEDY | HEAVY]
    llm = alone_on_device(made(4, **options))
    same(outs(llm, wishes, 40, ngram()), outs(on_host(**options), wishes, 40))
    report = llm.engine.report()
    assert report["accepted"] > 2 and report["steps"] < 20, "several tokens a time, several times a step"


def test_steps_with_drafts_are_submitted_before_the_one_before_is_read() -> None:
    llm = made(2)
    executor = executor_of(llm)
    seen: list[tuple[int, bool]] = []
    submit = executor.submit

    def watched(step: Any) -> None:
        submit(step)
        seen.append((len(executor._flight), any(group.drifts for group in step.groups)))

    executor.submit = watched
    outs(llm, [GREEDY] * 3, 40, ngram())
    assert (2, True) in seen


def test_positions_are_reserved_for_what_steps_in_flight_may_reach_and_no_further() -> None:
    llm = made(2, kv_blocks=200, block_size=4, max_model_len=600)
    executor, most = executor_of(llm), 0
    submit = executor.submit

    def watched(step: Any) -> None:
        nonlocal most
        submit(step)
        for group in step.groups:
            held = len(group.seq.allocation.blocks[0]) * 4
            most = max(most, held - len(group.seq.tokens))

    executor.submit = watched
    outs(llm, [GREEDY], 100, ngram(7))
    assert most <= 2 * 2 * 8 + 4


def test_who_comes_while_steps_are_in_flight_is_served() -> None:
    llm, host = made(4, max_num_seqs=3), on_host(max_num_seqs=3)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = host.generate([*PROMPTS, LOOPING], params)
    for number, prompt in enumerate([*PROMPTS, LOOPING]):
        llm.engine.add(prompt, params, speculation=ngram(), request_id=str(number))
        for _ in range(3):
            llm.engine.step()
    run(llm)
    for number, out in enumerate(expected):
        assert llm.engine.take(str(number)).emitters[0].token_ids == out.outputs[0].token_ids


@pytest.mark.parametrize("steps", range(2, 7))
def test_a_request_that_is_cancelled_while_steps_are_in_flight(steps: int) -> None:
    llm, host = made(3), on_host()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = host.generate(PROMPTS, params)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add(prompt, params, speculation=ngram(), request_id=str(number))
    for _ in range(steps):
        llm.engine.step()
    llm.engine.cancel("1")
    llm.engine.add(LOOPING, params, speculation=ngram(), request_id="late")  # takes the seat
    run(llm)
    for number in (0, 2):
        assert llm.engine.take(str(number)).emitters[0].token_ids == expected[number].outputs[0].token_ids
    assert llm.engine.take("late").emitters[0].token_ids == host.generate([LOOPING], params)[0].outputs[0].token_ids
    assert llm.engine.cache.usage().used == 0


def test_a_text_ends_inside_an_accepted_draft() -> None:
    (whole,) = on_host().generate([LOOPING], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    for at in range(4, 20):
        if tokens[at] in tokens[:at]:
            continue
        params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[tokens[at]])
        (found,) = made(8).generate([LOOPING], params, speculation=ngram(12))
        assert (found.outputs[0].token_ids, found.outputs[0].finish_reason) == (
            on_host().generate([LOOPING], params)[0].outputs[0].token_ids, "stop")


def test_without_memory_for_such_a_step_there_are_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(4)
    decode = executor_of(llm).graphs.decode
    capture = decode._capture
    monkeypatch.setattr(decode, "_capture", lambda shape, controls: (full if shape.most else capture)(shape, controls))
    found = outs(llm, [GREEDY] * 3, 30, ngram())
    same(found, outs(on_host(), [GREEDY] * 3, 30))
    assert not lacks(llm, Use.LOOKUP) and not lacks(llm, Use.DECODE), "smaller ones may find memory"
    assert llm.engine.report()["drafted"] == 0


def test_without_memory_for_a_wide_step_narrower_ones_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(4)
    decode = executor_of(llm).graphs.decode
    capture = decode._capture
    monkeypatch.setattr(decode, "_capture", lambda shape, *more: (full if shape.rows > 8 else capture)(shape, *more))
    for k in (15, 15, 1):
        same(outs(llm, [GREEDY] * 3, 30, ngram(k)), outs(on_host(), [GREEDY] * 3, 30))
    assert llm.engine.report()["drafted"] > 0
    assert max(shape.rows for (shape, _), _ in decode._captured) == 8


def test_a_wish_for_very_long_drafts_widens_nobodys_steps_beyond_what_can_be_used() -> None:
    llm = made(4)
    wishes = [ngram(1024), None, "ngram"]
    same(outs(llm, [GREEDY] * 3, 30, wishes), outs(on_host(), [GREEDY] * 3, 30))
    assert max(shape.rows for (shape, _), _ in executor_of(llm).graphs.decode._captured) <= 16 * 4


def test_drafts_take_nobodys_blocks() -> None:
    """Four texts that fit, and would not if the longest progress of all were reserved at once."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = [[3 + i, 14, 15, 9, 3 + i, 14, 15, 9] * 2 for i in range(4)]
    options: dict[str, Any] = {"kv_blocks": 34, "block_size": 16, "max_num_seqs": 4, "max_model_len": 256}
    llm = made(16, **options)
    found = llm.generate(prompts, params, speculation=ngram(15))
    same(found, on_host(**options).generate(prompts, params))
    assert llm.engine.report()["preemptions"] == 0 and llm.engine.report()["accepted"] > 0


def test_few_blocks_and_changing_times() -> None:
    """Ends that are cut short by few blocks must not be taken for progress: it hung, and wrote into nobody's block."""
    for seed in (24, 33, 34):
        rng = random.Random(seed)
        count = rng.randint(2, 3)
        cycle = [rng.randrange(90) for _ in range(rng.randint(1, 3))]
        prompts = [(cycle * 20)[:rng.randint(6, 14)] for _ in range(count)]
        params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(25, 45), ignore_eos=True,
                                 logit_bias={token: rng.choice([3.0, 6.0]) for token in cycle}) for _ in range(count)]
        options: dict[str, Any] = {"block_size": 4, "max_num_seqs": count, "max_model_len": 64}
        llm = made(4, kv_blocks=rng.choice([20, 24, 28]), **options)
        executor_of(llm).how_often = lambda *_, rng=rng: rng.choice([1, 1, 2, 5, 8])
        within_blocks(llm)
        found = llm.generate(prompts, params, speculation=ngram(rng.choice([3, 7, 15])))
        same(found, on_host(kv_blocks=100, **options).generate(prompts, params))


def test_without_memory_when_such_a_step_is_launched_it_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(4)
    scarce(monkeypatch, executor_of(llm).graphs.decode, "launch", {2})
    same(outs(llm, [GREEDY] * 3, 30, ngram()), outs(on_host(), [GREEDY] * 3, 30))


@pytest.mark.parametrize(("wish", "params", "placement"), [
    ("ngram", {}, Placement.FREE), ("auto", {}, Placement.FREE), ("suffix", {}, Placement.DEVICE),
    ({"method": "auto", "drafters": ["suffix", "ngram"]}, {}, Placement.DEVICE),
    ({"method": "auto", "drafters": ["ngram"]}, {}, Placement.FREE), ("ngram", {"logprobs": 2}, Placement.DEVICE),
    ({"method": "ngram", "verify": "typical"}, {}, Placement.DEVICE),
    ("ngram", {"no_repeat_ngram_size": 3}, Placement.DEVICE), ("ngram", {"trace": True}, Placement.HOST)])
def test_who_is_drafted_for_by_the_device(wish: Any, params: dict[str, Any], placement: Placement) -> None:
    llm = made(2)
    llm.engine.add(LOOPING, SamplingParams(max_tokens=12, temperature=0.0, **params), speculation=wish, request_id="r")
    (seq,) = llm.engine.scheduler.sequences("r")
    assert (seq.placement, bool(seq.lookup)) == (placement, placement is Placement.FREE)
    run(llm)
    assert llm.engine.take("r").emitters[0].finish_reason is not None


def test_on_the_host_nothing_changes() -> None:
    llm: LLM = on_host()
    llm.engine.add(LOOPING, SamplingParams(max_tokens=12, temperature=0.0), speculation="ngram", request_id="r")
    assert not llm.engine.scheduler.sequences("r")[0].lookup
    run(llm)
