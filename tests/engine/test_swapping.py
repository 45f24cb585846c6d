"""Preemption by swapping, seen from the engine: who decides, what is reported, and what goes wrong."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from engine.tiny import VOCAB, tiny_engine, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.cache.host_storage import HostStorage
from paceline.config import GIB, EngineOptions, Facts, resolve
from paceline.engine.core import Engine
from paceline.engine.schedule.preemption import Preemption
from paceline.errors import ConfigError

PROMPTS = [[(i * 31 + 7 + k) % VOCAB for i in range(20 + 5 * k)] for k in range(6)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
CROWDED = {"kv_blocks": 15, "max_model_len": 120, "watermark": 0.0}


def facts(**changes: object) -> Facts:
    return Facts(**{"device": "cpu", "context": 4096, "bytes_per_token": 1024, "free_memory": GIB,  # type: ignore[arg-type]
                    "cores": 2, "host_memory": 4 * GIB} | changes)


def swapped_out(engine: Engine) -> str:
    """A request that has run for some steps and waits on the host."""
    name = engine.add(PROMPTS[3], PARAMS)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert engine.report()["swapped"] == 1 and engine.report()["swap_blocks_used"] > 0
    return name


# ------------------------------------------------------------------ who decides

def test_the_cheaper_way_is_taken() -> None:
    costs = Preemption("auto", [1000, 500])
    assert not costs.may_swap and not costs.swaps(100, [5, 5]), "nothing is measured yet"
    costs.observe_prompt(rows=100, prompt_rows=100, seconds=0.1)
    costs.observe_copies(1e6, 1e6)
    assert costs.may_swap and costs.token_seconds == pytest.approx(1e-3)
    assert costs.swaps(100, [5, 5]), "15 ms of copies against 100 ms"
    assert not costs.swaps(14, [5, 5]), "14 ms to compute again: others hold the rest"


def test_steps_that_mostly_decode_do_not_tell_what_a_prompt_takes() -> None:
    costs = Preemption("auto", [1])
    costs.observe_prompt(rows=10, prompt_rows=4, seconds=1.0)
    assert costs.token_seconds is None
    costs.observe_prompt(rows=1, prompt_rows=1, seconds=0.01)
    costs.observe_prompt(rows=999, prompt_rows=999, seconds=1.0)
    assert costs.token_seconds == pytest.approx(1e-3, rel=0.02), "rows count, not steps"


@pytest.mark.parametrize(("mode", "swaps"), [("swap", True), ("recompute", False)])
def test_a_choice_by_name_does_not_ask_what_it_costs(mode: str, swaps: bool) -> None:
    assert Preemption(mode).may_swap is swaps and Preemption(mode).swaps(1, [10]) is swaps


@pytest.mark.parametrize(("copying", "swaps"), [(1e15, True), (1.0, False)])
def test_auto_follows_what_was_measured(copying: float, swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStorage, "measure", lambda self: type("Rates", (), {"out": copying, "back": copying}))
    llm = tiny_llm(**CROWDED)
    outs = llm.generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in outs] == [
        out.outputs[0].token_ids for out in tiny_llm().generate(PROMPTS, PARAMS)]
    assert llm.metrics()["preemptions"] > 0 and (llm.metrics()["swap_blocks_out"] > 0) is swaps


def test_what_the_host_may_hold_is_resolved_and_explained() -> None:
    config = resolve(EngineOptions.of(kv_blocks=1000), facts())
    assert (config.preemption, config.swap_blocks, config.cold_blocks) == ("auto", 1000, 0)
    assert "swap_space" in config.why
    config = resolve(EngineOptions.of(kv_blocks=1000), facts(host_memory=8 << 20))
    assert config.swap_blocks == 64, "an eighth of what is free"
    config = resolve(EngineOptions.of(kv_blocks=1000, swap_space=0.5, host_cache=2), facts())
    assert (config.swap_blocks, config.cold_blocks) == (GIB // 2 // 16384, 2 * GIB // 16384)
    assert resolve(EngineOptions.of(preemption="recompute"), facts()).swap_blocks == 0


@pytest.mark.parametrize(("options", "words"), [
    ({"preemption": "drop"}, "auto, recompute, swap"), ({"swap_space": -1}, "GiB"), ({"host_cache": "4"}, "GiB"),
    ({"host_cache": True}, "GiB"), ({"preemption": "swap", "swap_space": 0}, "raise swap_space"),
    ({"preemption": "recompute", "swap_space": 1}, "of no use"),
    ({"host_cache": 1, "enable_prefix_caching": False}, "leave one of them out"),
    ({"swap_space": 1e-6}, "one block"), ({"host_cache": 1e-6}, "one block")])
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(EngineOptions.of(**options), facts())


# ------------------------------------------------------------------ what goes wrong

@pytest.mark.parametrize("problem", [MemoryError("none left"), RuntimeError("cannot pin\nmemory")])
def test_without_host_memory_requests_are_computed_again_and_it_is_said_once(
        problem: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise problem

    monkeypatch.setattr("paceline.cache.host_storage._allocate", refuse)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        llm = tiny_llm(**CROWDED, preemption="swap")
        outs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)
    said = [entry.getMessage() for entry in caplog.records]
    assert len(said) == 1 and "computed again" in said[0] and "\n" not in said[0]
    assert all(out.error is None and len(out.outputs[0].token_ids) == 24 for out in outs)
    now = llm.metrics()
    assert now["preemptions"] > 1 and now["swap_blocks_out"] == now["swap_blocks_used"] == 0
    llm.engine.cache.check([])


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_a_request_that_ends_while_swapped_frees_its_host_blocks(reason: str) -> None:
    engine = tiny_engine(preemption="swap")
    name = swapped_out(engine)
    engine.cancel(name, reason)
    assert engine.report()["swapped"] == engine.report()["swap_blocks_used"] == 0
    engine.cache.check([])


def test_after_a_broken_step_nothing_on_the_host_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_llm().generate([PROMPTS[3]], PARAMS)[0].outputs[0].token_ids
    engine = tiny_engine(preemption="swap", host_cache=0.01, max_num_seqs=1)
    name = swapped_out(engine)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=2, priority=5, temperature=0.0))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner.model, "forward", lambda *_, **__: 1 / 0)
        engine.step()
    assert engine.report()["swapped"] == engine.report()["host_cache_blocks_used"] == 0
    while engine.has_work:
        engine.step()
    assert engine.take(name).snapshot().outputs[0].token_ids == plain
    engine.cache.check([])


def test_a_swapped_request_goes_on_where_it_was() -> None:
    plain = tiny_llm().generate([PROMPTS[3]], PARAMS)[0].outputs[0].token_ids
    engine = tiny_engine(preemption="swap", enable_prefix_caching=False)
    name = swapped_out(engine)
    rows = engine.metrics.rows
    while engine.has_work:
        engine.step()
    assert engine.take(name).snapshot().outputs[0].token_ids == plain
    assert engine.metrics.rows - rows == 24 - 4, "a row for each token that was missing"
    now = engine.report()
    assert now["swap_blocks_out"] == now["swap_blocks_in"] > 0 and now["swapped"] == now["swap_blocks_used"] == 0


def test_a_card_too_full_to_try_copies_computes_again(monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    def full(self: HostStorage) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB")

    expected = [out.outputs[0].token_ids for out in tiny_llm().generate(PROMPTS, PARAMS)]
    monkeypatch.setattr(HostStorage, "measure", full)
    llm = tiny_llm(preemption="swap", **CROWDED)
    with caplog.at_level(logging.WARNING):
        outs = llm.generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in outs] == expected
    assert llm.metrics()["preemptions"] > 0 and llm.metrics()["swap_blocks_out"] == 0
    assert "copies to host memory cannot be tried (CUDA out of memory" in caplog.text


@pytest.mark.parametrize("seed", [3, 8, 24, 34])
def test_a_window_with_a_chunk_in_flight_comes_back_into_the_room_there_is(seed: int) -> None:
    """Blocks behind the window go when a step is booked: while one is in flight a prompt holds more than it needs."""
    luck = random.Random(seed)
    engine = tiny_engine(tiny_model("mistral"), block_size=4, kv_blocks=32, max_batch_tokens=64, max_num_seqs=6,
                         preemption="swap", schedule_ahead=True, max_model_len=128)
    jobs = [([luck.randrange(VOCAB) for _ in range(luck.randrange(5, 108))], luck.randrange(3), luck.randrange(1, 12))
            for _ in range(10)]
    names = []
    while jobs or engine.has_work:
        if jobs and luck.random() < 0.4:
            prompt, priority, count = jobs.pop()
            names.append(engine.add(prompt, SamplingParams(max_tokens=count, priority=priority, temperature=0.0)))
        engine.step()
    assert [engine.record(name).error for name in names] == [None] * 10
    assert engine.report()["swap_blocks_in"] > 0
    engine.cache.check([], [])
