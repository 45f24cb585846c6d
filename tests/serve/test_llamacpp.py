"""llama.cpp's own protocol, by hand."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import NAME, WAIT, ServerThread, events, served

from engine.tiny import tiny_engine
from paceline import LLM, SamplingParams

PROMPT = "Once upon a time"


def ask(url: str, **more: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 10, "seed": 7, "cache_prompt": True} | more
    return httpx.post(f"{url}/completion", json=body, timeout=WAIT).json()


def test_a_text_goes_on_as_the_engine_says(server: ServerThread, offline: LLM) -> None:
    want = offline.generate([PROMPT], SamplingParams(max_tokens=10, seed=7, temperature=0.8, repetition_penalty=1.1))[0]
    answer = ask(server.url, temperature=0.8, repeat_penalty=1.1, return_tokens=True)
    sample = want.outputs[0]
    assert (answer["content"], answer["tokens"], answer["stop"]) == (sample.text, sample.token_ids, True)
    assert answer["tokens_predicted"] == len(sample.token_ids) and answer["prompt"] == PROMPT
    assert answer["tokens_evaluated"] == len(want.prompt_token_ids) and answer["model"] == NAME
    assert answer["stop_type"] == {"length": "limit", "stop": "eos"}[str(sample.finish_reason)]
    timings = answer["timings"]
    assert timings["predicted_n"] == len(sample.token_ids) and timings["predicted_ms"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == len(want.prompt_token_ids)
    assert answer["generation_settings"]["seed"] == 7 and answer["generation_settings"]["repeat_penalty"] == 1.1
    by_ids = ask(server.url, prompt=want.prompt_token_ids, temperature=0.8, repeat_penalty=1.1)
    assert by_ids["content"] == sample.text and by_ids["tokens"] == []


def test_a_stream_adds_up(server: ServerThread) -> None:
    whole = ask(server.url, return_tokens=True, ignore_eos=True)
    assert whole["stop_type"] == "limit"
    body = {"prompt": PROMPT, "n_predict": 10, "seed": 7, "stream": True, "return_tokens": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=WAIT) as response:
        found = list(events(response))
    assert "".join(chunk["content"] for chunk in found) == whole["content"]
    assert [token for chunk in found for token in chunk["tokens"]] == whole["tokens"]
    assert [chunk["stop"] for chunk in found] == [False] * (len(found) - 1) + [True] and len(found) > 2
    assert {name: found[-1][name] for name in ("tokens_predicted", "stop_type", "tokens_evaluated")} == {
        name: whole[name] for name in ("tokens_predicted", "stop_type", "tokens_evaluated")}


def test_controls(server: ServerThread) -> None:
    text = ask(server.url, ignore_eos=True)["content"]
    stop = text[3:5]
    stopped = ask(server.url, ignore_eos=True, stop=[stop])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", stop)
    assert stopped["content"] == text[:text.index(stop)]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(ask(server.url, json_schema=schema, n_predict=60)["content"])["a"] in (1, 2)
    assert ask(server.url, grammar='root ::= "yes" | "no"')["content"] in ("yes", "no")
    first = ask(server.url, temperature=0, return_tokens=True, n_predict=1)["tokens"][0]
    for biases in ([[first, False]], {str(first): -1000.0}):
        assert ask(server.url, temperature=0, return_tokens=True, n_predict=1, logit_bias=biases)["tokens"] != [first]


@pytest.mark.parametrize(("more", "word"), [
    ({"mirostat": 2}, "mirostat"), ({"n_probs": 3}, "n_probs"), ({"n_predcit": 3}, "n_predcit"),
    ({"logit_bias": [[1]]}, "logit_bias"), ({"logit_bias": [["a b", 1]]}, "logit_bias"), ({"prompt": ""}, "empty"),
    ({"prompt": None}, "prompt")])
def test_what_cannot_be_done_is_refused(server: ServerThread, more: dict[str, Any], word: str) -> None:
    assert word in ask(server.url, **more)["error"]["message"]


def test_what_a_client_asks_first(server: ServerThread, offline: LLM) -> None:
    told = httpx.get(f"{server.url}/props").json()
    assert told["default_generation_settings"]["n_ctx"] == 4096 and told["model_alias"] == NAME
    assert "im_start" in told["chat_template"] and told["eos_token"] == "<|im_end|>"
    slots = httpx.get(f"{server.url}/slots").json()
    assert len(slots) == told["total_slots"] and not any(slot["is_processing"] for slot in slots)
    messages: Any = [{"role": "user", "content": "Hello"}]
    applied = httpx.post(f"{server.url}/apply-template", json={"messages": messages}).json()
    assert offline.engine.tokenizer is not None
    assert applied["prompt"] == offline.engine.tokenizer.decode(offline.render(messages), False)
    assert applied["prompt"].endswith("<|im_start|>assistant\n")


def test_slots_are_the_operators() -> None:
    with served(tiny_engine(), api_keys=("one",), operator_keys=("boss",)) as url:
        def status(key: str) -> int:
            return httpx.get(f"{url}/slots", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("one"), status("boss")) == (403, 200)
