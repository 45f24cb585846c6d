"""Steps with drafts as captured steps: verified and moved into place on the device where nobody needs the host, decided
by the host elsewhere; the tokens are those of plain decoding either way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.device.on_device import executor_of, full, lacks, made, on_host
from paceline import LLM, SamplingParams
from paceline.engine.execute import graph_executor
from paceline.engine.execute.graphs import verify
from paceline.engine.execute.graphs.forward import ForwardGraphs
from paceline.engine.execute.graphs.logits_buffer import AfterSampling
from paceline.engine.execute.graphs.memory import Use

PROMPT = [3, 14, 15, 92, 65, 35]
OTHER = [2, 71, 82, 81]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.2, "seed": 7, "top_k": 30}
TRACED = SEEDED | {"repetition_penalty": 1.3, "trace": True}


def watched(**options: Any) -> tuple[LLM, Counter[str]]:
    """An engine, how often forwards of steps with drafts were replayed, and how often these were verified there."""
    llm = made(repeat=1, **options)
    graphs, calls = executor_of(llm).graphs, Counter[str]()
    launch, ready = graphs.verify.launch, graphs.samples.ready

    def launched(*given: Any) -> Any:
        calls["forward"] += 1
        return launch(*given)

    def sampled(buffer: Any, controls: Any, after: AfterSampling) -> Any:
        if after in (AfterSampling.CHAINS, AfterSampling.TREES):
            calls["verified"] += 1
        return ready(buffer, controls, after)

    graphs.verify.launch, graphs.samples.ready = launched, sampled
    return llm, calls


def tokens_of(llm: LLM, wish: dict[str, Any] | None, controls: dict[str, Any], count: int = 7) -> list[int]:
    """Beside a request without a draft."""
    params = [SamplingParams(max_tokens=number, ignore_eos=True, **own) for number, own in
              ((count, controls), (4, GREEDY))]
    out = llm.generate([PROMPT, OTHER], params, speculation=[wish, None])[0]
    assert out.error is None and (out.speculation is None or out.speculation.failure is None)
    llm.engine.cache.check([])
    return out.outputs[0].token_ids


def plain(controls: dict[str, Any], **options: Any) -> list[int]:
    return tokens_of(on_host(**options), None, controls)


@pytest.mark.parametrize(("controls", "branches", "name"), [
    (GREEDY, 3, "llama"), (SEEDED, 1, "llama"), (SEEDED, 2, "qwen2"), (SEEDED, 1, "qwen3"), (GREEDY, 2, "mistral"),
    (SEEDED, 2, "deepseek_dense")])
def test_right_drafts_are_taken_on_the_device(controls: dict[str, Any], branches: int, name: str) -> None:
    expected = plain(controls, name=name)
    llm, calls = watched(name=name)
    wish = {"method": "oracle", "k": 3, "branches": branches, "tokens": expected}
    assert tokens_of(llm, wish, controls) == expected
    assert calls == {"forward": 2, "verified": 2}, "six tokens after the first, four per step"
    assert llm.engine.report()["accepted"] >= 4


def test_an_fp8_cache_is_verified_and_moved_there() -> None:
    expected = plain(SEEDED, kv_dtype="fp8")
    llm, calls = watched(kv_dtype="fp8")
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, SEEDED) == expected
    assert calls == {"forward": 2, "verified": 2}


def test_wrong_drafts_change_nothing() -> None:
    expected = plain(SEEDED)
    llm, calls = watched()
    assert tokens_of(llm, {"method": "wrong", "k": 2, "branches": 2, "tokens": expected}, SEEDED) == expected
    assert calls["verified"] == calls["forward"] >= 4


def test_who_needs_the_host_is_decided_there_from_captured_logits() -> None:
    expected = plain(TRACED)
    llm, calls = watched()
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, TRACED) == expected
    assert calls == {"forward": 2}


def test_a_step_that_would_need_much_scratch_is_launched_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(GREEDY)[:4]
    llm, calls = watched()
    assert executor_of(llm).graphs.verify._scratch(2, 0) > 0
    monkeypatch.setattr(verify, "MOST_SCRATCH", 0)
    assert tokens_of(llm, {"method": "oracle", "k": 2, "tokens": expected}, GREEDY, count=4) == expected
    assert not calls and llm.engine.report()["accepted"] >= 2


def test_other_rules_are_the_hosts() -> None:
    llm, calls = watched()
    found = tokens_of(llm, {"method": "exit", "k": 2, "verify": "rejection", "adaptive": False}, SEEDED)
    assert len(found) == 7 and calls["forward"] and not calls["verified"]


@pytest.mark.parametrize(("name", "shape"), [
    ("llama", {"k": 1}), ("llama", {"branches": [2, 1]}), ("deepseek_dense", {"branches": [2, 1]})])
def test_what_a_reduced_model_reads_is_captured_too(name: str, shape: dict[str, Any]) -> None:
    """Of a tree it reads level by level: the rows above are read again and their logits are not asked for."""
    expected = plain(GREEDY, name=name)[:4]
    llm, calls = watched(name=name)
    reduced: Any = llm.engine.draft_models.exiting(1)
    wish = {"method": "exit", "layers": 1, "adaptive": False} | shape
    assert tokens_of(llm, wish, GREEDY, count=4) == expected
    assert calls["verified"] >= 1 and reduced._runner._graphs._forward.captured


def test_a_stop_inside_an_accepted_path_ends_the_text_there() -> None:
    expected = plain(GREEDY)
    llm, _ = watched()
    params = SamplingParams(max_tokens=7, ignore_eos=True, stop_token_ids=[expected[3]], **GREEDY)
    wish = {"method": "oracle", "k": 5, "branches": 2, "tokens": expected}
    out = llm.generate([PROMPT], params, speculation=wish)[0]
    assert out.outputs[0].token_ids == expected[:expected.index(expected[3]) + 1]
    assert out.outputs[0].finish_reason == "stop"
    llm.engine.cache.check([])


def test_without_memory_for_graphs_drafts_are_verified_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    expected = plain(GREEDY)
    llm, calls = watched()
    executor_of(llm).graphs.verify._forward._graphs.capture = full
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, GREEDY) == expected
    assert lacks(llm, Use.VERIFY) and not calls
    assert "no memory to capture steps with drafts: they are launched kernel by kernel" in caplog.text


def test_without_memory_for_the_samples_alone_nothing_is_sampled_twice() -> None:
    """Penalties count: a token that was counted and then sampled again would change what comes."""
    controls = SEEDED | {"repetition_penalty": 1.4, "presence_penalty": 0.5}
    expected = plain(controls)
    llm, calls = watched()
    capture = executor_of(llm).graphs.samples._graphs.capture

    def full_for_samples(launch: Any) -> Any:
        return full() if launch.__qualname__.startswith("SampleGraphs") else capture(launch)

    executor_of(llm).graphs.samples._graphs.capture = full_for_samples
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, controls) == expected
    assert lacks(llm, Use.VERIFY) and calls == {"forward": 1, "verified": 1}


def test_what_the_host_masks_is_computed_while_the_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    controls = SEEDED | {"no_repeat_ngram_size": 2}
    expected = plain(controls)
    llm, _ = watched()
    order: list[str] = []
    launch, masks = ForwardGraphs.launch, graph_executor.row_masks

    def launched(*given: Any, **more: Any) -> Any:
        order.append("forward")
        return launch(*given, **more)

    monkeypatch.setattr(ForwardGraphs, "launch", launched)
    monkeypatch.setattr(graph_executor, "row_masks", lambda groups: (order.append("masks"), masks(groups))[1])
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, controls) == expected
    assert order and order[::2] == ["forward"] * (len(order) // 2) and order[1::2] == ["masks"] * (len(order) // 2)


def test_other_controls_capture_samples_and_no_forward() -> None:
    llm, _ = watched()
    expected = plain(GREEDY)
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, GREEDY) == expected
    graphs = executor_of(llm).graphs
    forwards = graphs.prefill._forward, graphs.verify._forward

    def samples_captured() -> int:
        buffers = {id(one.logits_buffer): one.logits_buffer
                   for forward in forwards for one in forward.captured.values()}
        return sum(len(buffer.captured) for buffer in buffers.values())

    before, samples = [set(forward.captured) for forward in forwards], samples_captured()
    tokens_of(llm, wish, GREEDY | {"logit_bias": {5: 1e-3}, "logprobs": 2})
    tokens_of(llm, wish, GREEDY | {"top_k": 9, "temperature": 1e-4})
    assert [set(forward.captured) for forward in forwards] == before
    assert samples_captured() > samples
