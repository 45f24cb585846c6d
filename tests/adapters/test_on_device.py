"""Requests with adapters on a device: captured, repeated and sampled there like the rest, with the same tokens in any
company, with drafts, and while adapters come and go."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.adapter_files import factors, shapes_of, write_adapter
from adapters.test_equality import TARGETS, alone, llm_with, model, tensors
from engine.device.on_device import alone_on_device, executor_of, same
from engine.test_equality_matrix import NEW, PROMPT, drafts, params, strangers
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.decode import DecodeShape
from paceline.engine.schedule.sequence import Placement
from paceline.errors import ConfigError, RequestError

NAMES: list[str | None] = ["one", None, "two", "three"]


def on_device(adapters: Any = TARGETS, repeat: int = 6, **options: Any) -> tuple[LLM, Counter[str]]:
    """An engine, and how often its steps were launched kernel by kernel or replayed, with adapters or without."""
    llm = llm_with("llama", adapters, kernels="stepped", **options)
    executor, calls = executor_of(llm), Counter[str]()
    executor.how_often = lambda *_: repeat
    graphs = executor.graphs
    forward, prefill, verify = executor._runner.forward, graphs.prefill.launch, graphs.verify.launch
    capture = graphs.decode._step

    def kind(name: str, batch: Any) -> None:
        calls[name if batch.adapters is None else f"{name} with adapters"] += 1

    def step(shape: DecodeShape, *more: Any) -> None:
        calls["repeated with adapters" if shape.with_adapters else "repeated"] += 1
        capture(shape, *more)

    executor._runner.forward = lambda batch: (kind("launched", batch), forward(batch))[1]
    graphs.prefill.launch = lambda ready, batch: (kind("prompts", batch), prefill(ready, batch))[1]
    graphs.verify.launch = lambda ready, batch, *more: (kind("verified", batch), verify(ready, batch, *more))[1]
    graphs.decode._step = step
    return llm, calls


def tokens_of(outs: Any) -> list[list[int]]:
    assert all(out.error is None for out in outs)
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize("style", ["greedy", "seeded"])
def test_a_crowd_has_the_tokens_of_each_alone_and_the_host_samples_nothing(style: str) -> None:
    llm, calls = on_device()
    alone_on_device(llm)
    prompts, their_params = strangers(4)
    outs = llm.generate([PROMPT] * 4 + prompts, [params(style)] * 4 + their_params,
                        adapter=NAMES + ["two", None, "one", "three"])
    assert tokens_of(outs)[:4] == [alone("llama", style, name)[0] for name in NAMES]
    assert calls["prompts with adapters"] and calls["repeated with adapters"] >= NEW // 2
    assert not calls["launched"] and not calls["launched with adapters"]
    assert llm.engine.cache.usage().used == 0


@pytest.mark.parametrize("adapter", ["one", "three"])
def test_alone_on_the_device(adapter: str) -> None:
    llm, calls = on_device()
    outs = llm.generate([PROMPT], params("greedy"), adapter=adapter)
    assert tokens_of(outs) == [alone("llama", "greedy", adapter)[0]]
    assert calls["repeated with adapters"] and not calls["repeated"]


def test_chunks_beside_decoding_rows() -> None:
    """Mixes: a prompt comes in chunks while others decode, and who needs no logits ends in the last layer."""
    llm, calls = on_device(max_prefill_chunk=7, max_num_seqs=3)
    outs = llm.generate([PROMPT] * 4, params("seeded"), adapter=NAMES)
    assert tokens_of(outs) == [alone("llama", "seeded", name)[0] for name in NAMES]
    assert calls["prompts with adapters"] > 10 and not calls["launched with adapters"]


def test_scores_are_the_hosts_to_the_bit() -> None:
    """Log-probabilities tell of logits what tokens do not."""
    wishes = [SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3, temperature=0.0)] * 4
    host = llm_with("llama", kernels="reference")
    llm, calls = on_device()
    same(llm.generate([PROMPT] * 4, wishes, adapter=NAMES),
         [host.generate([PROMPT], wishes[0], adapter=name)[0] for name in NAMES])
    assert calls["prompts with adapters"] > 4 and not calls["launched with adapters"]


@pytest.mark.parametrize("draft", drafts().values(), ids=drafts())
def test_drafts_are_verified_on_the_device(draft: dict[str, Any]) -> None:
    llm, calls = on_device()
    alone_on_device(llm)
    want = [alone("llama", "greedy", name)[0] for name in NAMES]
    outs = llm.generate([PROMPT] * 4, params("greedy"), adapter=NAMES,
                        speculation=[draft | {"tokens": own} for own in want])
    assert tokens_of(outs) == want
    assert calls["verified with adapters"] and not calls["launched with adapters"]


def test_drafts_that_the_device_looks_up() -> None:
    looping = [7, 8, 9, 7, 8, 9, 7, 8] * 2
    wish = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
    host = llm_with("llama", kernels="reference")
    want = [host.generate([looping], wish, adapter=name)[0].outputs[0].token_ids for name in NAMES]
    llm, calls = on_device()
    alone_on_device(llm)
    outs = llm.generate([looping] * 4, wish, adapter=NAMES, speculation={"method": "ngram", "adaptive": False, "k": 4})
    assert tokens_of(outs) == want
    assert calls["repeated with adapters"] and not calls["verified with adapters"]
    assert sum(out.speculation.drafted for out in outs) > 4


def test_a_reduced_model_drafts_captured() -> None:
    llm, _ = on_device()
    reduced: Any = llm.engine.draft_models.exiting(2)
    short = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    wish = {"method": "exit", "layers": 2, "k": 3, "adaptive": False}
    outs = llm.generate([PROMPT] * 2, short, adapter=["one", None], speculation=wish)
    assert tokens_of(outs) == [alone("llama", "greedy", name)[0][:8] for name in ("one", None)]
    assert any(layout for _, layout in reduced._runner._graphs._forward.captured)
    host = llm_with("llama", kernels="reference").generate([PROMPT], short, adapter="one", speculation=wish)[0]
    assert outs[0].speculation.accepted == host.speculation.accepted > 0, "it drafts with the adapter"


def test_a_step_without_an_adapter_costs_nothing_more() -> None:
    llm, calls = on_device()
    assert tokens_of(llm.generate([PROMPT], params("greedy"))) == [alone("llama", "greedy", None)[0]]
    assert set(calls) == {"prompts", "repeated"}
    graphs = executor_of(llm).graphs
    assert {layout for _, layout in (*graphs.decode._captured, *graphs.prefill._forward.captured)} == {0}


def load(llm: LLM, name: str, rank: int = 4, like: str = "one") -> None:
    own = tensors("llama", like) if rank == 4 else factors(shapes_of(model("llama"), TARGETS[like]), name, rank=rank)
    with tempfile.TemporaryDirectory() as folder:
        llm.load_adapter(name, str(write_adapter(Path(folder), own, r=rank, target_modules=TARGETS[like])))


def test_adapters_come_and_go_under_way() -> None:
    """Loading one of another rank, and of other weights, moves the tables: what was captured for them is captured
    anew. One that is unloaded keeps its place while somebody runs with it, and leaves it to the next one."""
    llm, calls = on_device(["two"], repeat=2)
    alone_on_device(llm)
    engine, slots = llm.engine, llm.engine.adapters.slots
    graphs = executor_of(llm).graphs
    first = engine.add(PROMPT, params("greedy"), adapter="two")
    seq, = engine.scheduler.sequences(first)
    assert seq.placement is Placement.FREE
    for _ in range(3):
        engine.step()
    layout = slots.layout
    assert layout in {own for _, own in graphs.decode._captured}
    load(llm, "one")
    assert slots.layout > layout
    second = engine.add(PROMPT, params("greedy"), adapter="one")
    for _ in range(3):
        engine.step()
    assert layout not in {own for _, own in (*graphs.decode._captured, *graphs.prefill._forward.captured)}
    llm.unload_adapter("two")
    with pytest.raises(RequestError, match="no adapter 'two'"):
        engine.add(PROMPT, params("greedy"), adapter="two")
    load(llm, "wide", rank=24)
    wide = engine.adapters.get("wide")
    assert wide is not None and wide.slot not in (seq.adapter.slot, 1), "somebody still runs with 'two'"
    while engine.has_work:
        engine.step()
    for request, name in ((first, "two"), (second, "one")):
        assert engine.take(request).emitters[0].token_ids == alone("llama", "greedy", name)[0]
    load(llm, "next")
    found = engine.adapters.get("next")
    assert found is not None and found.slot == seq.adapter.slot
    for name in ("next", "one"):
        assert tokens_of(llm.generate([PROMPT], params("greedy"), adapter=name)) == [alone("llama", "greedy", "one")[0]]
    assert not calls["launched with adapters"]


def test_more_adapters_than_there_was_room_for() -> None:
    llm, _ = on_device(["two"])
    for index in range(6):
        load(llm, f"filler {index}", rank=2)
    load(llm, "one")
    outs = llm.generate([PROMPT] * 3, params("greedy"), adapter=["one", "two", None])
    assert tokens_of(outs) == [alone("llama", "greedy", name)[0] for name in ("one", "two", None)]


def test_what_is_not_loaded_cannot_be_unloaded() -> None:
    llm, _ = on_device(["two"])
    with pytest.raises(ConfigError, match="no adapter 'other'; loaded: 'two'"):
        llm.unload_adapter("other")


def test_without_memory_for_an_adapter_it_is_refused_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = on_device(["two"])

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.kernels.low_rank.LowRankSlots.like", full)
        with pytest.raises(ConfigError, match="no memory left for the adapter 'one'"):
            load(llm, "one")
    assert llm.engine.adapters.names == ["two"]
    assert tokens_of(llm.generate([PROMPT], params("greedy"), adapter="two")) == [alone("llama", "greedy", "two")[0]]
    load(llm, "one")
    assert tokens_of(llm.generate([PROMPT], params("greedy"), adapter="one")) == [alone("llama", "greedy", "one")[0]]


def test_steps_with_adapters_are_captured_at_the_start() -> None:
    llm, _ = on_device(max_num_seqs=2, max_batch_tokens=32)
    plain = llm_with("llama", (), kernels="stepped", max_num_seqs=2, max_batch_tokens=32).engine.capture()
    samples = 2  # are the same with adapters and without
    assert llm.engine.capture() == 2 * plain - samples
    graphs = executor_of(llm).graphs
    before = set(graphs.decode._captured) | set(graphs.prefill._forward.captured)
    llm.generate([PROMPT[:9]] * 2, SamplingParams(max_tokens=5, temperature=0.0), adapter=["one", "two"])
    assert set(graphs.decode._captured) | set(graphs.prefill._forward.captured) == before
