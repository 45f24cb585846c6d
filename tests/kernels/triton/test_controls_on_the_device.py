"""Penalties, bias, masks and log-probabilities are the device's too: the host's tokens come out, and no step waits for
the host to draw them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny import VOCAB
from kernels.triton.test_device_decoding import PROMPTS, made
from paceline import LLM, SamplingParams
from paceline.errors import EmptySupportError
from paceline.request import RequestOutput

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}
HEAVY: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.9}
FREE: dict[str, dict[str, Any]] = {
    "penalties": SEEDED | HEAVY | {"top_k": 3},
    "greedy penalties": {"temperature": 0.0} | HEAVY,
    "bias": SEEDED | {"logit_bias": {5: 4.0, 9: -math.inf}},
    "early stops": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [5], "logit_bias": {5: 50.0}},
    "allowed": SEEDED | {"allowed_token_ids": list(range(0, 90, 3)), "top_p": 0.9},
    "scores": SEEDED | {"logprobs": 3, "top_k": 20},
    "all": SEEDED | HEAVY | {"logprobs": 0, "min_p": 0.01, "logit_bias": {7: 2.0}},
}
"""What a device goes on with by itself."""
BARRED: dict[str, dict[str, Any]] = {
    "n-grams": {"temperature": 0.0, "no_repeat_ngram_size": 1},
    "n-grams and penalties": SEEDED | HEAVY | {"no_repeat_ngram_size": 2, "logprobs": 2},
}
"""Where the host says before each step what it bars."""


def alone_on_device(llm: LLM) -> LLM:
    """Fails where the host would draw from a step's logits."""

    class Refused:
        def process(self, *_: Any) -> None:
            raise AssertionError("the host was asked to draw")

    decider: Any = llm.engine.decider
    decider._pipeline = Refused()
    return llm


def outs(llm: LLM, wishes: Sequence[dict[str, Any]], count: int = 9, speculation: Any = None) -> list[RequestOutput]:
    params = [SamplingParams(**{"max_tokens": count, "ignore_eos": True} | wish) for wish in wishes]
    found = llm.generate(PROMPTS[:len(wishes)], params, speculation=speculation)
    assert llm.engine.cache.usage().used == 0
    return found


def same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        mine, other = ours.outputs[0], theirs.outputs[0]
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        assert str(ours.error) == str(theirs.error)
        assert (mine.logprobs is None) == (other.logprobs is None)
        for left, right in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            assert (left.token, left.rank, list(left.top)) == (right.token, right.rank, list(right.top))
            assert [left.raw, left.processed, *left.top.values()] == pytest.approx(
                [right.raw, right.processed, *right.top.values()], abs=1e-4)


def sometimes(names: Sequence[str], always: Sequence[str]) -> list[Any]:
    """The interpreter is slow: all of them with the long tests, a few with the others."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", sometimes(tuple(FREE), ("penalties", "early stops", "all")))
def test_a_device_goes_on_by_itself(device: torch.device, name: str) -> None:
    """Beside somebody without any controls, whom they must not touch."""
    wishes = [FREE[name], {"temperature": 0.0}]
    llm = alone_on_device(made(device, "triton", repeat=3))
    found = outs(llm, wishes)
    reference = made(device, "reference")
    same(found, outs(reference, wishes))
    if name != "scores":
        bare = [{key: value for key, value in FREE[name].items() if key in (*SEEDED, "top_k")}, {"temperature": 0.0}]
        without = outs(reference, bare)
        assert found[0].outputs[0].token_ids != without[0].outputs[0].token_ids, "the controls did nothing"
        assert found[1].outputs[0].token_ids == without[1].outputs[0].token_ids
    scored = "logprobs" in FREE[name]
    assert llm.engine.report()["steps"] <= (10 if scored else 5), "bursts of three, unless there are scores to read"


@pytest.mark.parametrize("name", sometimes(tuple(BARRED), ("n-grams",)))
def test_the_host_says_what_it_bars_and_the_device_draws(device: torch.device, name: str) -> None:
    wishes = [BARRED[name], SEEDED]
    llm = alone_on_device(made(device, "triton"))
    found = outs(llm, wishes)
    same(found, outs(made(device, "reference"), wishes))
    if name == "n-grams":
        tokens = found[0].outputs[0].token_ids
        assert len(set(tokens)) == len(tokens) > len(set(outs(made(device, "reference"), [{"temperature": 0.0}])[0]
                                                         .outputs[0].token_ids)), "nothing would have been repeated"


@pytest.mark.parametrize(("name", "method", "branches"), [
    ("n-grams and penalties", "oracle", 2),
    *(pytest.param(name, method, branches, marks=pytest.mark.full) for name in (*FREE, *BARRED)
      for method, branches in (("oracle", 1), ("oracle", 2), ("wrong", 1)))])
def test_drafts_are_drawn_and_verified_there(device: torch.device, name: str, method: str, branches: int) -> None:
    wishes = [(FREE | BARRED)[name], {"temperature": 0.0}]
    expected = outs(made(device, "reference"), wishes)
    wish = {"method": method, "k": 3, "branches": branches, "adaptive": False,
            "tokens": expected[0].outputs[0].token_ids}
    llm = alone_on_device(made(device, "triton"))
    found = outs(llm, wishes, speculation=[wish, None])
    same(found, expected)
    assert found[0].speculation.failure is None and found[0].speculation.drafted
    assert (found[0].speculation.accepted > 0) == (method == "oracle")


def test_what_the_host_drew_in_between_is_counted(device: torch.device) -> None:
    """A newcomer whose draws are the host's makes everybody's so, for some steps."""
    wishes = [{"temperature": 0.0} | HEAVY, {"temperature": 0.0, "trace": True}]
    texts = []
    for kernels in ("reference", "triton"):
        engine = made(device, kernels, repeat=2).engine
        params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for count, wish in zip((14, 3), wishes)]
        first = engine.add(PROMPTS[0], params[0])
        for _ in range(4):
            engine.step()
        second = engine.add(PROMPTS[1], params[1])
        while engine.has_work:
            engine.step()
        texts.append([engine.take(name).snapshot().outputs[0].token_ids for name in (first, second)])
    assert texts[0] == texts[1]


def test_counts_survive_a_preemption(device: torch.device) -> None:
    wishes = [SEEDED | HEAVY, {"temperature": 0.0} | HEAVY, SEEDED | {"presence_penalty": 2.0}]
    llm = alone_on_device(made(device, "triton", repeat=4, kv_blocks=8, block_size=4, max_model_len=32))
    found = outs(llm, wishes, count=11)
    same(found, outs(made(device, "reference"), wishes, count=11))
    assert llm.engine.report()["preemptions"] > 0


@pytest.mark.parametrize("on_empty_support", ["error", "stop", "unmasked"])
def test_a_row_without_a_token_ends_as_its_request_asked(device: torch.device, on_empty_support: str) -> None:
    """Two tokens are allowed, and each may come once."""
    wishes = [{"temperature": 0.0, "allowed_token_ids": [4, 6], "no_repeat_ngram_size": 1,
               "on_empty_support": on_empty_support}, {"temperature": 0.0}]
    llm = made(device, "triton")
    found = outs(llm, wishes, count=4)
    same(found, outs(made(device, "reference"), wishes, count=4))
    assert isinstance(found[0].error, EmptySupportError) == (on_empty_support == "error")
    assert len(found[0].outputs[0].token_ids) == (4 if on_empty_support == "unmasked" else 2)
    assert len(found[1].outputs[0].token_ids) == 4 and found[1].error is None


def test_without_memory_for_the_tables_the_host_draws(device: torch.device, monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    llm = made(device, "triton")

    def full() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(llm.engine.loop.device_steps.draws.seats.state.tables, "prepare", full)
    wishes = [FREE["penalties"], {"temperature": 0.0}]
    same(outs(llm, wishes, count=4), outs(made(device, "reference"), wishes, count=4))
    assert "no memory on the device for penalties" in caplog.text


def test_lists_and_scores_beyond_the_devices_room_are_the_hosts(device: torch.device) -> None:
    wishes = [SEEDED | {"logprobs": 25}, {"temperature": 0.0}]
    llm = made(device, "triton")
    found = outs(llm, wishes, count=3)
    same(found, outs(made(device, "reference"), wishes, count=3))
    assert len(found[0].outputs[0].logprobs[0].top) == 25


def test_who_could_not_be_seated_is_seated_another_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(device, "triton")
    state = llm.engine.loop.device_steps.draws.seats.state
    assign, refusals = state.assign, [torch.OutOfMemoryError("no memory")]

    def scarce(seated: Sequence[Any]) -> None:
        if seated and refusals:
            raise refusals.pop()
        assign(seated)

    monkeypatch.setattr(state, "assign", scarce)
    wishes = [SEEDED, {"temperature": 0.0}]
    same(outs(llm, wishes, count=5), outs(made(device, "reference"), wishes, count=5))
    assert not refusals


def test_a_failure_inside_an_accepted_path_counts_what_came_before_it(device: torch.device) -> None:
    def fails(text: str, tokens: Sequence[int]) -> bool:
        if len(tokens) == 3:
            raise ValueError("enough")
        return False

    wishes = [SEEDED | {"logprobs": 2, "interrupt": fails}]
    expected = outs(made(device, "reference"), [SEEDED], count=7)[0].outputs[0].token_ids
    wish = {"method": "oracle", "k": 4, "adaptive": False, "tokens": expected}
    found, reference = (outs(made(device, kernels), wishes, count=7, speculation=wish)
                        for kernels in ("triton", "reference"))
    same(found, reference)
    one = found[0].outputs[0]
    assert found[0].error is not None and len(one.token_ids) == len(one.logprobs) == 3


class Failing:
    """A grammar that works twice."""

    def __init__(self) -> None:
        self.asked = 0

    def mask(self, path: Sequence[int]) -> Any:
        self.asked += 1
        if self.asked > 2:
            raise ValueError("lost the thread")
        return np.arange(VOCAB) % 2 == 1

    def append(self, tokens: Sequence[int]) -> None:
        pass

    def forced(self) -> Sequence[int]:
        return []


def test_a_grammar_that_fails_is_the_hosts_to_tell(device: torch.device) -> None:
    engine = made(device, "triton").engine
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, no_repeat_ngram_size=3)
    names = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.scheduler.sequences(names[0])[0].state.grammar = Failing()
    while engine.has_work:
        engine.step()
    broken, whole = (engine.take(name).snapshot() for name in names)
    assert "The grammar failed at position 7 (ValueError: lost the thread)" in str(broken.error)
    assert len(broken.outputs[0].token_ids) == 2 and all(token % 2 for token in broken.outputs[0].token_ids)
    assert whole.error is None and len(whole.outputs[0].token_ids) == 5
