"""Penalties, bias, masks and log-probabilities are the device's too: the host's tokens come out, and no step waits for
the host to sample them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.device.on_device import (
    FREE,
    HEAVY,
    MASKED,
    PROMPTS,
    SEEDED,
    alone_on_device,
    made,
    on_host,
    outs,
    run,
    same,
)
from engine.tiny import VOCAB
from paceline import SamplingParams
from paceline.errors import EmptySupportError


@pytest.mark.parametrize("name", FREE)
def test_a_device_goes_on_by_itself(name: str) -> None:
    """Beside somebody without any controls, whom they must not touch."""
    wishes = [FREE[name], {"temperature": 0.0}]
    llm = alone_on_device(made(repeat=3))
    found = outs(llm, wishes)
    reference = on_host()
    same(found, outs(reference, wishes))
    if name != "scores":
        bare = [{key: value for key, value in FREE[name].items() if key in (*SEEDED, "top_k")}, {"temperature": 0.0}]
        without = outs(reference, bare)
        assert found[0].outputs[0].token_ids != without[0].outputs[0].token_ids, "the controls did nothing"
        assert found[1].outputs[0].token_ids == without[1].outputs[0].token_ids
    scored = "logprobs" in FREE[name]
    assert llm.engine.report()["steps"] <= (10 if scored else 5), "three at once, unless there are scores to read"


@pytest.mark.parametrize("name", MASKED)
def test_the_host_says_what_it_masks_and_the_device_samples(name: str) -> None:
    wishes = [MASKED[name], SEEDED]
    found = outs(alone_on_device(made()), wishes)
    same(found, outs(on_host(), wishes))
    if name == "n-grams":
        tokens = found[0].outputs[0].token_ids
        free = outs(on_host(), [{"temperature": 0.0}])[0].outputs[0].token_ids
        assert len(set(tokens)) == len(tokens) > len(set(free)), "nothing would have been repeated"


@pytest.mark.parametrize("name", (FREE | MASKED))
@pytest.mark.parametrize(("method", "branches"), [("oracle", 1), ("oracle", 2), ("wrong", 1)])
def test_drafts_are_sampled_and_verified_there(name: str, method: str, branches: int) -> None:
    wishes = [(FREE | MASKED)[name], {"temperature": 0.0}]
    expected = outs(on_host(), wishes)
    wish = {"method": method, "k": 3, "branches": branches, "adaptive": False,
            "tokens": expected[0].outputs[0].token_ids}
    found = outs(alone_on_device(made()), wishes, speculation=[wish, None])
    same(found, expected)
    assert found[0].speculation is not None
    assert found[0].speculation.failure is None and found[0].speculation.drafted
    assert (found[0].speculation.accepted > 0) == (method == "oracle")


def test_what_the_host_sampled_in_between_is_counted() -> None:
    """A newcomer whose samples are the host's makes everybody's so, for some steps."""
    wishes = [{"temperature": 0.0} | HEAVY, {"temperature": 0.0, "trace": True}]
    texts = []
    for llm in (on_host(), made(repeat=2)):
        engine = llm.engine
        params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for count, wish in zip((14, 3), wishes)]
        first = engine.add(PROMPTS[0], params[0])
        for _ in range(4):
            engine.step()
        second = engine.add(PROMPTS[1], params[1])
        run(llm)
        texts.append([engine.take(name).snapshot().outputs[0].token_ids for name in (first, second)])
    assert texts[0] == texts[1]


def test_counts_survive_a_preemption() -> None:
    wishes = [SEEDED | HEAVY, {"temperature": 0.0} | HEAVY, SEEDED | {"presence_penalty": 2.0}]
    llm = alone_on_device(made(repeat=4, kv_blocks=8, block_size=4, max_model_len=32))
    same(outs(llm, wishes, count=11), outs(on_host(), wishes, count=11))
    assert llm.engine.report()["preemptions"] > 0


@pytest.mark.parametrize("on_empty_support", ["error", "stop", "unmasked"])
def test_a_row_without_a_token_ends_as_its_request_asked(on_empty_support: str) -> None:
    """Two tokens are allowed, and each may come once."""
    wishes = [{"temperature": 0.0, "allowed_token_ids": [4, 6], "no_repeat_ngram_size": 1,
               "on_empty_support": on_empty_support}, {"temperature": 0.0}]
    found = outs(made(), wishes, count=4)
    same(found, outs(on_host(), wishes, count=4))
    assert isinstance(found[0].error, EmptySupportError) == (on_empty_support == "error")
    assert len(found[0].outputs[0].token_ids) == (4 if on_empty_support == "unmasked" else 2)
    assert len(found[1].outputs[0].token_ids) == 4 and found[1].error is None


def test_lists_and_scores_beyond_the_devices_room_are_the_hosts() -> None:
    wishes = [SEEDED | {"logprobs": 25}, {"temperature": 0.0}]
    found = outs(made(), wishes, count=3)
    same(found, outs(on_host(), wishes, count=3))
    assert len((found[0].outputs[0].logprobs or [])[0].top) == 25


def test_a_failure_inside_an_accepted_path_counts_what_came_before_it() -> None:
    def fails(text: str, tokens: Sequence[int]) -> bool:
        if len(tokens) == 3:
            raise ValueError("enough")
        return False

    wishes = [SEEDED | {"logprobs": 2, "interrupt": fails}]
    expected = outs(on_host(), [SEEDED], count=7)[0].outputs[0].token_ids
    wish = {"method": "oracle", "k": 4, "adaptive": False, "tokens": expected}
    found, reference = (outs(llm, wishes, count=7, speculation=wish) for llm in (made(), on_host()))
    same(found, reference)
    one = found[0].outputs[0]
    assert found[0].error is not None and len(one.token_ids) == len(one.logprobs or []) == 3


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


def test_a_grammar_that_fails_is_the_hosts_to_tell() -> None:
    llm = made()
    engine = llm.engine
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, no_repeat_ngram_size=3)
    names = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    sequence: Any = engine.scheduler.sequences(names[0])[0]
    sequence.state.grammar = Failing()
    run(llm)
    broken, whole = (engine.take(name).snapshot() for name in names)
    assert "The grammar failed at position 7 (ValueError: lost the thread)" in str(broken.error)
    assert len(broken.outputs[0].token_ids) == 2 and all(token % 2 for token in broken.outputs[0].token_ids)
    assert whole.error is None and len(whole.outputs[0].token_ids) == 5
