"""Those who need the host's word and those who do not have steps of their own, in turns, and the same tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.device.on_device import HEAVY, PROMPTS, executor_of, full, made, on_host, run, same
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.attended import LONGEST, TURNS, Attended
from paceline.engine.schedule.sequence import Placement
from speculation.worded import SCHEMAS, tokenizer

GREEDY: dict[str, Any] = {"temperature": 0.0}


def apart(llm: LLM, times: int = 2) -> LLM:
    """As if the host took as long as so many steps."""
    executor = executor_of(llm)
    attended = executor._attended

    def goes_apart(running: Any, step_seconds: float) -> bool:
        attended.seconds, executor._step_seconds = times * 1.001, 1.0
        return Attended.goes_apart(attended, running, 1.0)

    attended.goes_apart = goes_apart
    return llm


def watch(llm: LLM) -> list[tuple[bool, bool, int]]:
    """Of every step that is submitted: whether it is repeated, whether somebody in it needs the host, and how many
    there were in flight already."""
    executor, seen = executor_of(llm), []
    submit = executor.submit

    def watched(step: Any) -> None:
        before = len(executor._flight)
        for flight in executor._flight:
            both = {group.seq for group in flight.step.groups} & {group.seq for group in step.groups}
            assert not both or step.repeated or all(seq.placement >= Placement.AHEAD for seq in both)
        submit(step)
        seen.append((step.repeated, any(group.seq.placement < Placement.AHEAD for group in step.groups), before))

    executor.submit = watched
    return seen


def test_who_is_free_runs_while_the_host_has_its_word() -> None:
    wishes: list[Any] = [None, "suffix", {"method": "ngram", "adaptive": False, "k": 3}]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **GREEDY)] * 3
    expected = on_host().generate(PROMPTS, params)
    llm = apart(made())
    seen = watch(llm)
    same(llm.generate(PROMPTS, params, speculation=wishes), expected)
    assert (True, False, 1) in seen and (False, True, 1) in seen, "each while the other is in flight"
    assert sum(repeated for repeated, *_ in seen) > 5 and not any(repeated and host for repeated, host, _ in seen)
    assert llm.engine.cache.usage().used == 0


def test_where_the_host_is_quick_they_share_steps() -> None:
    llm = made()
    executor = executor_of(llm)
    executor._step_seconds, executor._measured = 1e9, True
    seen = watch(llm)
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY), speculation=[None, "suffix"])
    assert len(seen) > 3 and not any(repeated for repeated, *_ in seen)


def test_a_structure_beside_texts() -> None:
    words = tokenizer()
    params = [SamplingParams(max_tokens=30, json_schema=SCHEMAS[4], **GREEDY),
              SamplingParams(max_tokens=30, ignore_eos=True, **GREEDY),
              SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=3)]
    expected = on_host(tokenizer=words).generate(PROMPTS, params)
    llm = apart(made(tokenizer=words))
    seen = watch(llm)
    same(llm.generate(PROMPTS, params, speculation=["auto", "auto", None]), expected)
    assert (True, False, 1) in seen


def some_mix(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    count = rng.randint(3, 8)
    prompts = [[rng.randrange(rng.choice([3, 90])) for _ in range(rng.randint(1, 24))] for _ in range(count)]
    kinds: list[dict[str, Any]] = [{}, {}, {}, HEAVY, {"logprobs": 2}, {"no_repeat_ngram_size": 2}, {"trace": True},
                                   {"n": 2}, {"prompt_logprobs": 1}]
    params = [SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.7, seed=rng.randrange(99),
                             temperature=rng.choice([0.0, 0.8]), **rng.choice(kinds)) for _ in range(count)]
    known: list[Any] = [None, None, "ngram", "auto", "suffix", {"method": "oracle", "k": 3, "tokens": [1, 2, 3]},
                        {"method": "ngram", "adaptive": False, "k": 5}]
    return prompts, params, [rng.choice(known) for _ in range(count)]


def check_mix(seed: int) -> int:
    rng = random.Random(seed)
    options = {"kv_blocks": rng.choice([18, 40]), "max_batch_tokens": rng.choice([16, 64]), "max_num_seqs": 5}
    prompts, params, wishes = some_mix(rng)
    expected = on_host(**options).generate(prompts, params)
    llm = apart(made(rng.choice([1, 4]), **options), rng.choice([1, 3]))
    seen = watch(llm)
    found = llm.generate(prompts, params, speculation=wishes)
    for one, wanted in zip(found, expected, strict=True):
        assert [out.token_ids for out in one.outputs] == [out.token_ids for out in wanted.outputs]
        assert [out.finish_reason for out in one.outputs] == [out.finish_reason for out in wanted.outputs]
    assert llm.engine.cache.usage().used == 0
    llm.engine.cache.check([])
    return sum(repeated and before for repeated, _, before in seen)


def test_any_mix_has_the_tokens_of_plain_decoding() -> None:
    assert sum(check_mix(seed) for seed in range(6)) > 5


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_many_mixes(first: int) -> None:
    for seed in range(first, first + 20):
        check_mix(seed)


def test_who_is_cancelled_takes_nobody_along() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **GREEDY)
    expected = [out.outputs[0].token_ids for out in on_host().generate(PROMPTS, params)]
    for cancelled in range(3):
        llm = apart(made())
        engine = llm.engine
        names = [engine.add(prompt, params, speculation=wish)
                 for prompt, wish in zip(PROMPTS, [None, "suffix", "ngram"])]
        while len(executor_of(llm)._flight) < 1 or engine.record(names[0]).metrics.output_tokens < 8:
            engine.step()
        engine.cancel(names[cancelled])
        run(llm)
        for place, name in enumerate(names):
            text = engine.take(name).snapshot().outputs[0].token_ids
            assert text == (expected[place] if place != cancelled else expected[place][:len(text)])
        engine.cache.check([])


def test_without_memory_for_repeated_steps_they_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, **GREEDY)
    expected = on_host().generate(PROMPTS[:2], params)
    llm = apart(made())
    monkeypatch.setattr(executor_of(llm).graphs.decode, "_for", full)
    same(llm.generate(PROMPTS[:2], params, speculation=[None, "suffix"]), expected)


def test_searches_that_wait_do_not_keep_anybody_from_blocks() -> None:
    """A beam is parked until its peer has a seat; who is free needs its blocks; neither has a step of its own."""
    options = {"kv_blocks": 9, "block_size": 4, "max_model_len": 32, "max_num_seqs": 2}
    params = [SamplingParams(max_tokens=12, ignore_eos=True, beam_width=2, temperature=0.0),
              SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY),
              SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY)]
    expected = on_host(**options).generate(PROMPTS, params)
    found = apart(made(2, **options)).generate(PROMPTS, params)
    assert [[out.token_ids for out in one.outputs] for one in found] == [
        [out.token_ids for out in one.outputs] for one in expected]


def test_what_the_host_took_is_what_counts() -> None:
    class Group:
        seq = type("Seq", (), {"placement": Placement.DEVICE})

    attended, step = Attended(), type("Step", (), {"groups": [Group]})
    for at in range(0, 100, 10):
        attended.read(step, at, True)
        attended.submitted(step, at + 0.002)
    assert attended.seconds == pytest.approx(0.002)
    attended.read(step, 200, True)
    attended.submitted(step, 200 + 2 * LONGEST)  # somebody was away
    attended.read(step, 300, True)
    attended.forget()
    attended.submitted(step, 300.02)
    attended.read(step, 400, False)  # it may have waited for the other step
    attended.submitted(step, 400.02)
    assert attended.seconds == pytest.approx(0.002)
    device, free = Group.seq, type("Seq", (), {"placement": Placement.FREE})
    assert attended.goes_apart([device, free], 0.001) and not attended.goes_apart([device, free], 0.003)
    assert not attended.goes_apart([device], 0.001) and not attended.goes_apart([free], 0.001)
    turns = [attended.free_next(flight) for flight in ([False], [True], [], [], [False])]
    assert turns == [True, False, True, False, True]
    for _ in range(TURNS):
        attended.free_next([True])
    assert not attended.goes_apart([device, free], 0.001), "until it is measured again"
    attended.read(step, 500, True)
    attended.submitted(step, 500.004)
    assert attended.goes_apart([device, free], 0.003)
