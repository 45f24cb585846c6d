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
from paceline.engine import draft_graphs

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
    assert calls == {"verify": 2}, "six tokens after the first, four a step"
    assert llm.engine.report()["accepted"] >= 4


@pytest.mark.full
def test_wrong_drafts_change_nothing(device: torch.device) -> None:
    expected = plain(device, SEEDED)
    llm, calls = watched(device)
    assert tokens_of(llm, {"method": "wrong", "k": 2, "branches": 2, "tokens": expected}, SEEDED) == expected
    assert calls["verify"] >= 4 and not calls["run"]


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


def test_what_a_reduced_model_reads_is_captured_too(device: torch.device) -> None:
    expected = plain(device, GREEDY)[:3]
    llm, calls = watched(device)
    reduced: Any = llm.engine.draft_models.exiting(1)
    wish = {"method": "exit", "layers": 1, "k": 1, "adaptive": False}
    assert tokens_of(llm, wish, GREEDY, count=3) == expected
    assert calls["verify"] >= 1 and reduced._runner.drafts._captured


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

    llm.engine.runner.drafts._graphs.capture = full
    assert tokens_of(llm, {"method": "oracle", "k": 3, "branches": 2, "tokens": expected}, GREEDY) == expected
    assert llm.engine.runner.drafts is None and calls["verify"] == 1
    assert "steps with drafts are launched kernel by kernel" in caplog.text
