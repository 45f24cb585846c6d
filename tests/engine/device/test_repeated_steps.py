"""Several steps between two looks of the host: the same tokens as one by one, whatever ends a text on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.device.on_device import PROMPTS, WISHES, executor_of, made, on_host, run, texts
from paceline import SamplingParams
from paceline.engine.execute.graphs.in_flight import MOST_REPEATS


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "deepseek_dense"])
def test_repeated_steps_sample_what_single_steps_sample(name: str) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for wish, count in zip(WISHES, (19, 6, 12))]
    llm = made(name=name)
    found = texts(llm, params)
    assert found == texts(on_host(name), params)
    assert [len(tokens) for tokens, _ in found] == [19, 6, 12]
    assert llm.engine.report()["steps"] <= 5, "a prompt step and three times eight"
    assert texts(made(repeat=0, name=name), params) == found


def test_a_stop_token_inside_a_repeated_step_ends_the_text_there() -> None:
    free = texts(made(), [SamplingParams(max_tokens=16, ignore_eos=True, **wish) for wish in WISHES])
    stops = [tokens[5] for tokens, _ in free]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=[stop], **wish)
              for wish, stop in zip(WISHES, stops)]
    for (tokens, reason), (whole, _), stop in zip(texts(made(), params), free, stops):
        assert tokens == whole[:whole.index(stop) + 1] and reason == "stop"


def test_repeated_steps_make_do_with_the_blocks_there_are() -> None:
    """Eight blocks of four: three texts of 21 to 29 tokens do not fit side by side, so some are preempted."""
    params = [SamplingParams(max_tokens=18, ignore_eos=True, **wish) for wish in WISHES]
    llm = made(kv_blocks=8, block_size=4, max_model_len=32)
    assert texts(llm, params) == texts(on_host(), params)
    assert llm.engine.report()["preemptions"] > 0


def test_who_needs_the_host_runs_step_by_step_beside_the_others() -> None:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0),
              SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, seed=3, repetition_penalty=1.3),
              SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.0, logprobs=2, trace=True)]
    llm = made()
    executor_of(llm)._attended.goes_apart = lambda *_: False  # a slow host would have them apart: test_apart.py
    assert texts(llm, params) == texts(on_host(), params)
    assert 8 <= llm.engine.report()["steps"] <= 9, "seven while the third runs, then the first alone"


@pytest.mark.parametrize("repeat", [1, 3])
def test_steps_launched_ahead_let_in_who_waits(repeat: int) -> None:
    """Two seats for six texts, some of which stop early: seats change hands while steps are in flight."""
    prompts = [*PROMPTS, *([token + 1 for token in prompt] for prompt in PROMPTS)]
    free = [SamplingParams(max_tokens=11, ignore_eos=True, **WISHES[i % 3]) for i in range(6)]
    options: dict[str, Any] = {"max_num_seqs": 2, "max_prefill_chunk": 4, "enable_prefix_caching": True}
    whole = [out.outputs[0].token_ids for out in on_host(**options).generate(prompts, free)]
    params = [SamplingParams(max_tokens=own.max_tokens, ignore_eos=True, **WISHES[i % 3],
                             stop_token_ids=[tokens[4]] if i % 2 else [])
              for i, (own, tokens) in enumerate(zip(free, whole))]
    llm = made(repeat, **options)
    found = llm.generate(prompts, params)
    for i, (out, tokens) in enumerate(zip(found, whole)):
        kept = tokens[:tokens.index(tokens[4]) + 1] if i % 2 else tokens
        assert out.outputs[0].token_ids == kept
    assert not llm.engine.has_work and llm.engine.cache.usage().used == 0


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    llm = made(2)
    executor = executor_of(llm)
    seen: list[int] = []
    read = executor._read

    def noted(reading: Any) -> Any:
        seen.append(1 + len(executor._flight))
        return read(reading)

    executor._read = noted
    texts(llm, [SamplingParams(max_tokens=9, ignore_eos=True, **wish) for wish in WISHES])
    assert seen == [2, 2, 2, 2, 1], "prompts, then four times two tokens"


def test_whose_next_token_the_host_must_know_waits_for_those_in_flight() -> None:
    """It comes while the others' steps are in flight, and leaves before them."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for count, wish in zip((14, 3, 12), WISHES)]
    params[1] = SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.5, logprobs=1, prompt_logprobs=1,
                               trace=True, temperature=0.0)
    records = []
    for llm in (made(2), on_host()):
        engine = llm.engine
        first = engine.add(list(PROMPTS[0]), params[0])
        engine.step()
        engine.step()
        rest = [engine.add(list(prompt), own) for prompt, own in zip(PROMPTS[1:], params[1:])]
        run(llm)
        records.append([engine.take(name).snapshot() for name in (first, *rest)])
    for ours, theirs in zip(*records):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids and ours.error is None
        assert len(ours.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])


@pytest.mark.parametrize("newcomer", ["drafted", "traced"])
@pytest.mark.parametrize("ends", ["cancelled", "by itself"])
def test_who_ends_between_plan_and_run_takes_nobody_along(newcomer: str, ends: str) -> None:
    """A newcomer that needs the host makes the next step one that waits; meanwhile somebody in it ends."""
    long_prompt = PROMPTS[2] * 2
    more: dict[str, Any] = {"trace": True} if newcomer == "traced" else {}
    speculation = "ngram" if newcomer == "drafted" else None
    rest = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    asked = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, **more)
    wanted = [out.outputs[0].token_ids for out in on_host(max_batch_tokens=16).generate(
        [PROMPTS[1], long_prompt], [rest, asked])]
    llm = made(repeat=2, max_batch_tokens=16)
    engine = llm.engine
    first = engine.add(PROMPTS[0], SamplingParams(max_tokens=8 if ends == "cancelled" else 4, ignore_eos=True,
                                                  temperature=0.0))
    others = [engine.add(PROMPTS[1], rest)]
    engine.step()
    others.append(engine.add(long_prompt, asked, speculation=speculation))
    engine.step()
    if ends == "cancelled":
        engine.cancel(first)
    run(llm)
    for name, tokens in zip(others, wanted):
        out = engine.take(name).snapshot()
        assert out.error is None and out.outputs[0].token_ids == tokens
    assert engine.cache.usage().used == 0


@pytest.mark.parametrize("wish", WISHES)
def test_who_is_cancelled_while_its_steps_are_in_flight_leaves_the_others_alone(wish: dict[str, Any]) -> None:
    """Its seat and blocks go to somebody else while the device still writes to them."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, **wish)
    options: dict[str, Any] = {"max_num_seqs": 2, "kv_blocks": 10, "block_size": 4, "max_model_len": 32}
    wanted = [out.outputs[0].token_ids for out in on_host().generate(PROMPTS, params)]
    for passes in range(1, 5):
        llm = made(2, **options)
        names = [llm.engine.add(prompt, params) for prompt in PROMPTS]
        for _ in range(passes):
            llm.engine.step()
        llm.engine.cancel(names[0])
        run(llm)
        found = [llm.engine.take(name).snapshot() for name in names]
        assert [out.outputs[0].token_ids for out in found[1:]] == wanted[1:]
        assert found[0].outputs[0].token_ids == wanted[0][:len(found[0].outputs[0].token_ids)]
        assert llm.engine.cache.usage().used == 0 and llm.engine.executor.oldest is None


def test_a_step_is_repeated_as_often_as_the_host_needs_to_keep_up() -> None:
    llm = made()
    executor = executor_of(llm)
    del executor.how_often  # the real one
    llm.engine.add(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0))
    while not llm.engine.scheduler.running:
        llm.engine.step()
    often = partial(executor.how_often, llm.engine.scheduler)
    executor._step_seconds, executor._host_seconds = 0.001, 0.0
    assert often(0.0) == 2, "one runs while the host reads the other"
    executor._host_seconds = 0.002
    assert often(0.0) == 6
    executor._host_seconds = 0.1
    assert often(0.0) == 12 and often(10.0) == MOST_REPEATS, "somebody may come"
    executor._step_seconds = 1.0
    assert often(0.0) == often(10.0) == 1
    llm.engine.cancel(next(iter(llm.engine.scheduler.running)).request.id)
    run(llm)
