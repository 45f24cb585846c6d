"""Beam search and best_of through HTTP: what the library finds, in OpenAI's and vLLM's words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import WAIT, ServerThread

from paceline import LLM, SamplingParams

PROMPT = "The river runs"


@pytest.fixture(scope="module")
def http(server: ServerThread) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=WAIT)


def completion(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_beams_are_those_of_the_library(http: httpx.Client, offline: LLM) -> None:
    asked = {"length_penalty": 0.5, "early_stopping": "never"}
    want = offline.generate([PROMPT], SamplingParams(beam_width=4, n=4, max_tokens=8, ignore_eos=True, **asked))[0]
    answer = completion(http, use_beam_search=True, n=4, temperature=0, logprobs=1, **asked)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in want.outputs]
    assert [choice["score"] for choice in answer["choices"]] == [one.score for one in want.outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, one in zip(answer["choices"], want.outputs):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(one.cumulative_logprob, abs=1e-4)
    fewer = completion(http, use_beam_search=True, n=2, best_of=4, **asked)
    assert [choice["text"] for choice in fewer["choices"]] == [one.text for one in want.outputs[:2]]
    assert fewer["usage"]["completion_tokens"] == 4 * 8, "a token for every beam and step"


def test_best_of_returns_the_likeliest_and_counts_all(http: httpx.Client, offline: LLM) -> None:
    want = offline.generate([PROMPT], SamplingParams(n=2, best_of=5, seed=3, max_tokens=8, ignore_eos=True))[0]
    answer = completion(http, n=2, best_of=5, seed=3)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in want.outputs]
    assert answer["usage"]["completion_tokens"] == 5 * 8
    assert [choice["index"] for choice in completion(http, prompt=[PROMPT] * 2, best_of=2)["choices"]] == [0, 1]


def test_a_chat_is_searched_with_n_beams(http: httpx.Client, offline: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    want = offline.chat(messages, SamplingParams(beam_width=3, n=3, max_tokens=6))[0]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 6, "n": 3,
                                                     "use_beam_search": True}).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [one.text for one in want.outputs]


@pytest.mark.parametrize(("fields", "param"), [
    ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 0}, "best_of"), ({"best_of": 1 << 40}, "best_of"),
    ({"best_of": 4, "stream": True}, "stream"), ({"best_of": 4, "provenance": True}, "provenance"),
    ({"best_of": 500}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"), ({"use_beam_search": True, "n": 1}, "use_beam_search"),
    ({"use_beam_search": True, "n": 4, "best_of": 2}, "n"),
    ({"use_beam_search": True, "n": 4, "stream": True}, "stream"),
    ({"use_beam_search": True, "n": 4, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "n": 4, "stop": ["."]}, "stop"),
    ({"use_beam_search": True, "n": 4, "frequency_penalty": 1}, "frequency_penalty"),
    ({"use_beam_search": True, "n": 4, "guided_regex": "a+"}, "guided_regex"),
    ({"use_beam_search": True, "n": 4, "speculation": "ngram"}, "speculation"),
    ({"use_beam_search": True, "n": 4, "early_stopping": "sometimes"}, "early_stopping"),
    ({"use_beam_search": True, "n": 4, "length_penalty": 11}, "length_penalty"),
    ({"length_penalty": 2.0}, "length_penalty"), ({"early_stopping": True}, "early_stopping"),
])
def test_what_cannot_be_is_a_400_that_names_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
