"""What the loop promises over either executor: nothing is planned on a cache that is not there yet, one lack of memory
costs nobody else anything, and what nobody waited for is no measurement."""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

import pytest
import torch

from engine.tiny import VOCAB, tiny_engine, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.engine.core import Engine
from paceline.engine.schedule.sequence import Placement
from speculation.trained_heads import random_head

EXIT = {"method": "exit", "layers": 1, "adaptive": False, "branches": [2, 1, 2]}
SKIP = {"method": "skip", "adaptive": False, "k": 4}


class Crowd:
    """Requests that come one after the other and draft on the target's cache."""

    def __init__(self, seed: int) -> None:
        luck = random.Random(seed)
        self.count = luck.randint(4, 8)
        self.prompts = [[luck.randrange(VOCAB) for _ in range(luck.randint(5, 45))] for _ in range(self.count)]
        self.wishes = [luck.choice([None, EXIT, SKIP, SKIP]) for _ in range(self.count)]
        self.params = [SamplingParams(max_tokens=luck.randint(10, 40), temperature=luck.choice([0.0, 0.9]), seed=number,
                                      ignore_eos=True) for number in range(self.count)]
        self.arrivals = [luck.randint(0, 15) for _ in range(self.count)]
        self.options: dict[str, Any] = {"kv_blocks": luck.choice([13, 14, 16, 19]),
                                        "enable_prefix_caching": luck.random() < 0.5}

    def texts(self, engine: Engine) -> list[list[int]]:
        names: dict[int, str] = {}
        passes = 0
        while len(names) < self.count or engine.has_work:
            for number in range(self.count):
                if number not in names and self.arrivals[number] <= passes:
                    names[number] = engine.add(self.prompts[number], self.params[number],
                                               speculation=self.wishes[number])
            engine.step()
            passes += 1
        records = [engine.take(names[number]) for number in range(self.count)]
        assert [record.error for record in records] == [None] * self.count
        return [list(record.emitters[0].token_ids) for record in records]


def test_a_step_has_run_before_drafts_for_the_next_one_use_the_cache() -> None:
    """These drafts were once written over blocks that the step before was still to copy to the host."""
    crowd, model = Crowd(4), tiny_model("llama")
    expected = crowd.texts(tiny_engine(model, max_model_len=88))
    engine = tiny_engine(model, max_model_len=88, watermark=0.0, preemption="swap", schedule_ahead=True,
                         **crowd.options)
    assert crowd.texts(engine) == expected
    assert engine.report()["swap_blocks_out"], "somebody was swapped"


def test_no_memory_for_penalties_concerns_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = tiny_llm(kernels="stepped").engine

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    def placed(**params: Any) -> Placement:
        name = engine.add([1, 2, 3], SamplingParams(max_tokens=2, **params))
        placement = engine.scheduler.sequences(name)[0].placement
        engine.cancel(name)
        return placement

    with monkeypatch.context() as scarce:
        scarce.setattr(engine.executor.graphs.seats.state.tables, "prepare", full)
        assert placed(repetition_penalty=1.5) is Placement.HOST
        assert placed() is Placement.FREE
    assert placed(repetition_penalty=1.5) is Placement.FREE, "there is memory again"


def test_a_step_whose_requests_have_all_ended_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = tiny_llm(kernels="stepped").engine
    name = engine.add([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    while not engine.executor._flight:
        engine.step()
    told: list[Any] = []
    monkeypatch.setattr(engine._drafting.controller, "stepped", lambda *seen: told.append(seen))
    monkeypatch.setattr(engine.scheduler.preemption, "observe_prompt", lambda *seen: told.append(seen))
    engine.cancel(name)
    while engine.has_work:
        engine.step()
    assert told == [] and engine.cache.usage().used == 0


def test_without_memory_to_prepare_the_cache_for_a_draft_everybody_is_computed_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the copies may have been made: the drafter's guard must not go on as if all were."""
    crowd, model = Crowd(5), tiny_model("llama")
    expected = crowd.texts(tiny_engine(model, max_model_len=88))
    engine = tiny_engine(model, max_model_len=88, watermark=0.0, preemption="swap", **crowd.options)
    calls = scarce_for_drafts(engine, monkeypatch, (3, 9))
    assert crowd.texts(engine) == expected
    assert calls[0] > 9, "both were refused"


def scarce_for_drafts(engine: Any, monkeypatch: pytest.MonkeyPatch, refused: Container[int]) -> list[int]:
    """What the cache needs cannot be carried out in these calls, of those that drafters make; how many there were."""
    apply, propose, calls, drafting = engine.storage.apply, engine._drafting.propose, [0], [False]

    def scarce(moves: Any, copies: Any) -> None:
        calls[0] += bool(drafting[0] and (moves or copies))
        if calls[0] in refused and drafting[0] and (moves or copies):
            raise RuntimeError("no memory, as torch says it on a CPU")
        apply(moves, copies)

    def proposed(*given: Any) -> None:
        drafting[0] = True
        try:
            propose(*given)
        finally:
            drafting[0] = False

    monkeypatch.setattr(engine.storage, "apply", scarce)
    monkeypatch.setattr(engine._drafting, "propose", proposed)
    return calls


def test_without_memory_to_prepare_the_cache_for_a_head_everybody_is_computed_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted paths of a tree wait to be moved when the head is about to read them."""
    model = tiny_model("llama")
    prompts = [[(i * step + 7) % VOCAB for i in range(length)] for step, length in ((31, 25), (17, 5), (5, 9))]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(prompts, params, speculation=None)]
    llm = tiny_llm(model, trained={"it": random_head("medusa", model)})
    calls = scarce_for_drafts(llm.engine, monkeypatch, (1, 2))
    outs = llm.generate(prompts, params, speculation={"method": "medusa", "branches": [8, 8], "k": 2,
                                                      "adaptive": False})
    assert [out.outputs[0].token_ids for out in outs] == plain
    assert all(out.speculation is not None and out.speculation.failure is None for out in outs)
    assert calls[0] >= 2, "both were refused"
