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
    ({"mirostat": 2}, "mirostat"), ({"n_probs": 300}, "n_probs is 300"), ({"n_predcit": 3}, "n_predcit"),
    ({"repeat_penalty": -1}, "repeat_penalty must be"), ({"repeat_penalty": "x"}, "repeat_penalty"),
    ({"n_predict": "x"}, "n_predict: "), ({"json_schema": {"type": "x"}}, "json_schema"),
    ({"grammar": "root ::= ("}, "grammar"), ({"top_n_sigma": 1.5}, "top_n_sigma"),
    ({"repeat_last_n": 7, "repeat_penalty": 1.1}, "repeat_last_n"), ({"repeat_last_n": "x"}, "repeat_last_n"),
    ({"prompt": [[1, "a"], []]}, "empty"), ({"prompt": [1, None]}, "prompt"), ({"prompt": []}, "empty"),
    ({"logit_bias": [[1]]}, "logit_bias"), ({"logit_bias": [["a b", 1]]}, "logit_bias"), ({"prompt": ""}, "empty"),
    ({"prompt": None}, "prompt")])
def test_what_cannot_be_done_is_refused(server: ServerThread, more: dict[str, Any], word: str) -> None:
    assert word in ask(server.url, **more)["error"]["message"]


def test_a_prompt_alone_is_computed_and_kept(server: ServerThread) -> None:
    prompt = "A prompt of its own, long enough for blocks of the cache to hold some of it: " + "one, two, three, " * 6
    for _ in range(2):
        answer = ask(server.url, prompt=prompt, n_predict=0, return_tokens=True)
        assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
        assert answer["stop"] is True and answer["generation_settings"]["n_predict"] == 0
        assert answer["tokens_evaluated"] > 20 and answer["stop_type"] == "limit"
    assert ask(server.url, prompt=prompt)["timings"]["cache_n"] > 0
    body = {"prompt": prompt, "n_predict": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=WAIT) as response:
        assert [(one["content"], one["stop"]) for one in events(response)] == [("", True)]


def test_likely_tokens_are_told(server: ServerThread, offline: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=7, logprobs=3, ignore_eos=True)
    scores = offline.generate([PROMPT], params)[0].outputs[0].logprobs
    assert scores is not None
    whole = ask(server.url, n_predict=4, n_probs=3, ignore_eos=True)["completion_probabilities"]
    assert [(one["id"], one["logprob"]) for one in whole] == [(score.token, score.raw) for score in scores]
    for one, score in zip(whole, scores, strict=True):
        assert {top["id"]: top["logprob"] for top in one["top_logprobs"]} == dict(score.top)
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]
    body = {"prompt": PROMPT, "n_predict": 4, "seed": 7, "n_probs": 3, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=WAIT) as response:
        assert [one for chunk in events(response) for one in chunk.get("completion_probabilities", ())] == whole
    assert "completion_probabilities" not in ask(server.url, n_probs=0)


def test_prompts_of_every_kind(server: ServerThread, offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    encode = offline.engine.tokenizer.encode
    texts = ask(server.url, prompt=[PROMPT, "The sea"])
    assert [one["index"] for one in texts] == [0, 1] and texts[0]["content"] == ask(server.url)["content"]
    assert texts[1]["content"] == ask(server.url, prompt="The sea")["content"]
    mixed = [*encode("Once upon"), " a", *encode(" time", add_special=False)]
    assert ask(server.url, prompt=mixed)["tokens_evaluated"] == len(
        [*encode("Once upon"), *encode(" a", add_special=False), *encode(" time", add_special=False)])
    assert ask(server.url, prompt=[PROMPT])["content"] == texts[0]["content"], "a list of one is no list"
    several = ask(server.url, prompt=[encode(PROMPT), "The sea", mixed])
    assert [one["content"] for one in several[:2]] == [one["content"] for one in texts] and len(several) == 3
    body = {"prompt": [PROMPT, "The sea"], "n_predict": 10, "seed": 7, "stream": True}
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=WAIT) as response:
        found = list(events(response))
    for place, one in enumerate(texts):
        assert "".join(chunk["content"] for chunk in found if chunk["index"] == place) == one["content"]
        assert [chunk["stop"] for chunk in found if chunk["index"] == place][-1] is True


def test_only_the_fields_that_are_asked_for(server: ServerThread) -> None:
    whole = ask(server.url)
    fields = ["content", "generation_settings/n_predict", "timings/nothing", "nothing"]
    assert ask(server.url, response_fields=fields) == {"content": whole["content"], "n_predict": 10}
    assert ask(server.url, response_fields=[]).keys() == whole.keys()


def test_values_that_switch_something_off(server: ServerThread) -> None:
    plain = ask(server.url)["content"]
    for off in ({"top_n_sigma": -1}, {"repeat_last_n": 7}, {"repeat_last_n": 0, "repeat_penalty": 1.8},
                {"repeat_last_n": 0, "presence_penalty": 2.0}, {"repeat_last_n": 9, "repeat_penalty": 1.0}):
        assert ask(server.url, **off)["content"] == plain, off
    assert ask(server.url, repeat_last_n=-1, repeat_penalty=1.8)["content"] == ask(
        server.url, repeat_penalty=1.8)["content"]


def test_texts_are_tokenised_as_its_clients_ask(server: ServerThread, offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    ids = offline.engine.tokenizer.encode("Hello there", add_special=False)

    def tokens(**more: Any) -> Any:
        return httpx.post(f"{server.url}/tokenize", json={"content": "Hello there"} | more).json()

    assert tokens()["tokens"] == ids and tokens(content="")["tokens"] == []
    pieces = tokens(with_pieces=True)["tokens"]
    assert [one["id"] for one in pieces] == ids and "".join(one["piece"] for one in pieces) == "Hello there"
    assert "error" in tokens(prompt="x"), "two texts"
    told = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()
    assert told["content"] == told["prompt"] == "Hello there"


def test_chats_take_what_its_clients_send(server: ServerThread) -> None:
    def chat(**more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 1} | more
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT).json()

    plain = chat(top_k=5)["choices"]
    assert chat(top_k=5, cache_prompt=True, timings_per_token=True, samplers=["top_k", "temperature"])[
        "choices"] == plain
    assert chat(top_k=5, samplers=["temperature"])["error"]["param"] == "samplers"
    assert chat(top_k=5, modalities=["text"], audio={"voice": "alloy", "format": "wav"}, web_search_options={})[
        "choices"] == plain
    assert chat(web_search_options={"search_context_size": "low"})["error"]["param"] == "web_search_options"
    assert "error" in chat(modalities=["text", "audio"])


@pytest.mark.parametrize(("more", "param"), [
    ({"repeat_penalty": -1}, "repeat_penalty"), ({"n_predict": 1.5}, "n_predict"), ({"n_probs": 999}, "n_probs"),
    ({"grammar": "root ::= ("}, "grammar"), ({"json_schema": {"type": "x"}}, "json_schema"), ({"prompt": ""}, "prompt"),
    ({"top_k": -7}, "top_k")])
def test_faults_are_told_by_the_names_that_were_sent(server: ServerThread, more: dict[str, Any], param: str) -> None:
    assert ask(server.url, **more)["error"]["param"] == param


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
