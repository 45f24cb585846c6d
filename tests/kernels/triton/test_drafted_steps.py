"""Steps with drafts as captured steps: verified and moved into place on the device where nobody needs the host, decided
by the host elsewhere; the tokens are those of plain decoding either way."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.triton.test_device_decoding import made
from paceline import LLM, SamplingParams
from paceline.engine.execute import runner
from paceline.engine.execute.graphs import verify as draft_graphs
from paceline.engine.execute.graphs.forward import ForwardGraphs

PROMPT = [3, 14, 15, 92, 65, 35]
OTHER = [2, 71, 82, 81]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.2, "seed": 7, "top_k": 30}
TRACED = SEEDED | {"repetition_penalty": 1.3, "trace": True}


def watched(device: torch.device, **options: Any) -> tuple[LLM, Counter[str]]:
    """An engine, and how often its steps with drafts were decided where."""
    llm = made(device, "triton", repeat=1, **options)
    drafts, calls = llm.engine.runner.drafts, Counter[str]()
    assert drafts is not None
    for name in ("run", "verify"):
        setattr(drafts, name, functools.partial(counted, calls, name, getattr(drafts, name)))
    return llm, calls


def counted(calls: Counter[str], name: str, call: Any, *arguments: Any) -> Any:
    calls[name] += 1
    return call(*arguments)


def tokens_of(llm: LLM, wish: dict[str, Any] | None, controls: dict[str, Any], count: int = 7) -> list[int]:
    """Beside a request without a draft."""
    params = [SamplingParams(max_tokens=number, ignore_eos=True, **own) for number, own in
              ((count, controls), (4, GREEDY))]
    out = llm.generate([PROMPT, OTHER], params, speculation=[wish, None])[0]
    assert out.error is None and (wish is None or out.speculation.failure is None)
    llm.engine.cache.check([])
    return out.outputs[0].token_ids


def plain(device: torch.device, controls: dict[str, Any], **options: Any) -> list[int]:
    return tokens_of(made(device, "reference", **options), None, controls)


@pytest.mark.parametrize(("controls", "branches", "name"), [
    (GREEDY, 3, "llama"), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (SEEDED, 1, "llama"), (SEEDED, 2, "qwen2"), (SEEDED, 1, "qwen3"), (GREEDY, 2, "mistral")))])
def test_right_drafts_are_taken_on_the_device(device: torch.device, controls: dict[str, Any], branches: int,
                                              name: str) -> None:
    expected = plain(device, controls, name=name)
    llm, calls = watched(device, name=name)
    wish = {"method": "oracle", "k": 3, "branches": branches, "tokens": expected}
    assert tokens_of(llm, wish, controls) == expected
    assert calls == {"run": 2, "verify": 2}, "six tokens after the first, four a step"
    assert llm.engine.report()["accepted"] >= 4


@pytest.mark.full
def test_wrong_drafts_change_nothing(device: torch.device) -> None:
    expected = plain(device, SEEDED)
    llm, calls = watched(device)
    assert tokens_of(llm, {"method": "wrong", "k": 2, "branches": 2, "tokens": expected}, SEEDED) == expected
    assert calls["verify"] == calls["run"] >= 4


def test_who_needs_the_host_is_decided_there_from_captured_logits(device: torch.device) -> None:
    expected = plain(device, TRACED)
    llm, calls = watched(device)
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, TRACED) == expected
    assert calls["run"] == 2 and not calls["verify"]


def test_a_step_that_would_need_much_scratch_is_launched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(device, GREEDY)[:4]
    llm, calls = watched(device)
    assert llm.engine.runner.drafts._scratch(2, 0) > 0
    monkeypatch.setattr(draft_graphs, "MOST_SCRATCH", 0)
    assert tokens_of(llm, {"method": "oracle", "k": 2, "tokens": expected}, GREEDY, count=4) == expected
    assert not calls and llm.engine.report()["accepted"] >= 2


@pytest.mark.full
def test_other_rules_are_the_hosts(device: torch.device) -> None:
    llm, calls = watched(device)
    wish = {"method": "exit", "k": 2, "verify": "rejection"}
    found = tokens_of(llm, wish, SEEDED)
    assert len(found) == 7 and calls["run"] and not calls["verify"]


@pytest.mark.parametrize("shape", [{"k": 1}, {"branches": [2, 1]}])
def test_what_a_reduced_model_reads_is_captured_too(device: torch.device, shape: dict[str, Any]) -> None:
    """Of a tree it reads level by level: the rows above are read again and their logits are not asked for."""
    expected = plain(device, GREEDY)[:4]
    llm, calls = watched(device)
    reduced: Any = llm.engine.draft_models.exiting(1)
    wish = {"method": "exit", "layers": 1, "adaptive": False} | shape
    assert tokens_of(llm, wish, GREEDY, count=4) == expected
    assert calls["verify"] >= 1 and reduced._runner.drafts._forward.captured


def test_a_stop_inside_an_accepted_path_ends_the_text_there(device: torch.device) -> None:
    expected = plain(device, GREEDY)
    llm, _ = watched(device)
    params = SamplingParams(max_tokens=7, ignore_eos=True, stop_token_ids=[expected[3]], **GREEDY)
    wish = {"method": "oracle", "k": 5, "branches": 2, "tokens": expected}
    out = llm.generate([PROMPT], params, speculation=wish)[0]
    assert out.outputs[0].token_ids == expected[:expected.index(expected[3]) + 1]
    assert out.outputs[0].finish_reason == "stop"
    llm.engine.cache.check([])


def test_without_memory_for_graphs_drafts_are_verified_kernel_by_kernel(device: torch.device,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    expected = plain(device, GREEDY)
    llm, calls = watched(device)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    llm.engine.runner.drafts._forward._graphs.capture = full
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, GREEDY) == expected
    assert llm.engine.runner.drafts is None and calls == {"run": 1}
    assert "steps with drafts are launched kernel by kernel" in caplog.text


def test_without_memory_for_the_draws_alone_nothing_is_drawn_twice(device: torch.device) -> None:
    """Penalties count: a token that was counted and then drawn again would change what comes."""
    controls = SEEDED | {"repetition_penalty": 1.4, "presence_penalty": 0.5}
    expected = plain(device, controls)
    llm, calls = watched(device)
    draws, capture = llm.engine.runner.drafts._draws, llm.engine.runner.drafts._draws._graphs.capture

    def full_for_draws(launch: Any) -> Any:
        if launch.__qualname__.startswith("SampleGraphs"):
            raise torch.OutOfMemoryError("no memory")
        return capture(launch)

    draws._graphs.capture = full_for_draws
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, controls) == expected
    assert llm.engine.runner.drafts is None and calls == {"run": 1, "verify": 1}


def test_what_the_host_bars_is_computed_while_the_forward_runs(device: torch.device,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    controls = SEEDED | {"no_repeat_ngram_size": 2}
    expected = plain(device, controls)
    llm, _ = watched(device)
    order: list[str] = []
    run, masks = ForwardGraphs.run, runner.row_masks

    def launched(*given: Any, **more: Any) -> Any:
        order.append("forward")
        return run(*given, **more)

    monkeypatch.setattr(ForwardGraphs, "run", launched)
    monkeypatch.setattr(runner, "row_masks", lambda groups: (order.append("masks"), masks(groups))[1])
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, controls) == expected
    assert order and order[::2] == ["forward"] * (len(order) // 2) and order[1::2] == ["masks"] * (len(order) // 2)


def test_other_controls_capture_draws_and_no_forward(device: torch.device) -> None:
    llm, _ = watched(device)
    expected = plain(device, GREEDY)
    wish = {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}
    assert tokens_of(llm, wish, GREEDY) == expected
    steps = llm.engine.loop.device_steps
    forwards = steps.mixed._forward, steps.drafts._forward

    def draws_captured() -> int:
        buffers = {id(one.logits_buffer): one.logits_buffer
                   for forward in forwards for one in forward.captured.values()}
        return sum(len(buffer.captured) for buffer in buffers.values())

    before, draws = [set(forward.captured) for forward in forwards], draws_captured()
    tokens_of(llm, wish, GREEDY | {"logit_bias": {5: 1e-3}, "logprobs": 2})
    tokens_of(llm, wish, GREEDY | {"top_k": 9, "temperature": 1e-4})
    assert [set(forward.captured) for forward in forwards] == before
    assert draws_captured() > draws
