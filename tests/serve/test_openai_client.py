"""The official client against a server process: everything it can ask of completions and chats."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from serving import NAME, WAIT, ServerThread

from paceline import LLM, SamplingParams
from paceline.engine.replay import replay_on
from paceline.sampling.trace import Trace

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def client(server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def expected(offline: LLM, **params: Any) -> Any:
    return offline.chat(MESSAGES, SamplingParams(**params))[0].outputs[0]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "max_tokens": 12, "seed": 7} | more)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "paceline"
    with pytest.raises(openai.NotFoundError) as problem:
        client.models.retrieve("gpt-4")
    assert problem.value.code == "model_not_found"


def test_a_chat_is_what_the_engine_says(client: openai.OpenAI, offline: LLM) -> None:
    answer = ask(client)
    want = expected(offline, max_tokens=12, seed=7)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == want.text
    assert choice.finish_reason == want.finish_reason
    assert answer.object == "chat.completion" and answer.model == NAME and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(offline.render(MESSAGES))
    assert usage.completion_tokens == len(want.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.paceline["seed"] == 7
    assert answer.paceline["request_id"] == answer.id


def test_a_streamed_chat_adds_up_to_the_same(client: openai.OpenAI, offline: LLM) -> None:
    chunks = list(ask(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected(offline, max_tokens=12, seed=7).text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1].paceline["seed"] == 7


def test_usage_at_the_end_of_a_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].paceline["seed"] == 7


def test_samples_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    whole = ask(client, n=3)
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts = ["", "", ""]
    for chunk in ask(client, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_seed_is_drawn_and_told_and_repeats_the_text(client: openai.OpenAI) -> None:
    first = ask(client, seed=openai.omit)
    seed = first.paceline["seed"]
    assert 0 <= seed < 1 << 53
    assert ask(client, seed=seed).choices[0].message.content == first.choices[0].message.content


def test_every_control_reaches_the_engine(client: openai.OpenAI, offline: LLM) -> None:
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True, "priority": 2,
             "allowed_token_ids": list(range(5, 400)), "stop_token_ids": [3], "bad_words": ["the"],
             "no_repeat_ngram_size": 2, "cache_salt": "mine", "timeout_s": 50.0}
    common = {"max_tokens": 20, "seed": 3, "temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5,
              "frequency_penalty": 0.25}
    answer = ask(client, **common, logit_bias={"70": 5, "71": -100}, stop=["zzzz", "qqqq"], extra_body=extra)
    del extra["timeout_s"], extra["priority"]
    want = expected(offline, **common, logit_bias={70: 5.0, 71: -100.0}, stop=("zzzz", "qqqq"), **extra)
    assert answer.choices[0].message.content == want.text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=40).choices[0].message.content
    stop = text[10:13]
    for wish in (stop, [stop]):
        choice = ask(client, max_tokens=40, stop=wish).choices[0]
        assert choice.message.content == text[:text.index(stop)]
        assert choice.finish_reason == "stop" and choice.stop_reason == stop
    chunks = list(ask(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[:text.index(stop)]


def test_log_probabilities_of_a_chat(client: openai.OpenAI, offline: LLM) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    want = expected(offline, max_tokens=12, seed=7, logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [score.raw for score in want.logprobs]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == want.text
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
        list(score.top.values()) for score in want.logprobs]
    streamed = [entry for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True)
                if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]


def test_completions_of_several_prompts(client: openai.OpenAI, offline: LLM) -> None:
    prompts = ["The quick brown", "def main"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=8, n=2, seed=5)
    outs = offline.generate(prompts, SamplingParams(max_tokens=8, n=2, seed=5))
    assert [choice.text for choice in answer.choices] == [sample.text for out in outs for sample in out.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    for chunk in client.completions.create(model=NAME, prompt=prompts, max_tokens=8, n=2, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert [one["seed"] for one in (answer.paceline, *answer.paceline["others"])] == [5, 5]


def test_completions_of_token_ids(client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.engine.tokenizer.encode("The quick brown")
    texts = [client.completions.create(model=NAME, prompt=prompt, max_tokens=8, seed=5).choices[0].text
             for prompt in ("The quick brown", ids, [ids])]
    assert len(set(texts)) == 1


def test_echo_and_the_older_log_probabilities(client: openai.OpenAI, offline: LLM) -> None:
    prompt = "The quick brown fox"
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=4, seed=5, echo=True, logprobs=2)
    want = offline.generate(prompt, SamplingParams(max_tokens=4, seed=5, logprobs=2, prompt_logprobs=2))[0]
    choice = answer.choices[0]
    assert choice.text == prompt + want.outputs[0].text
    scores = choice.logprobs
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == [one.raw for one in (*want.prompt_logprobs[1:], *want.outputs[0].logprobs)]
    assert len(scores.tokens) == len(scores.text_offset) == len(want.prompt_token_ids) + 4
    assert scores.text_offset[0] == 0 and scores.text_offset[1] == len(scores.tokens[0])
    assert all(len(top) <= 2 for top in scores.top_logprobs[1:])


def test_streamed_completions_with_log_probabilities_and_usage(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": ["The quick brown fox", "héllo wörld"], "max_tokens": 10, "n": 2, "seed": 5,
                  "logprobs": 3}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    last = chunks.pop()
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens and last.usage.completion_tokens == 40
    assert all(chunk.usage is None and chunk.id == last.id for chunk in chunks)
    texts, scores, reasons = [""] * 4, [{} for _ in range(4)], [None] * 4
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        assert reasons[choice.index] is None, "nothing comes of a sample after its end"
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            scores[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert scores == [choice.logprobs.model_dump() for choice in whole.choices]
    assert all(len(one["tokens"]) == 10 for one in scores)


def test_scoring_a_prompt_without_going_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="The quick brown", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "The quick brown"
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert client.completions.create(model=NAME, prompt="abc", max_tokens=0, echo=True).choices[0].text == "abc"


def test_echo_in_a_stream_comes_first(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=NAME, prompt="The quick", max_tokens=4, echo=True, stream=True))
    assert chunks[0].choices[0].text.startswith("The quick")
    assert sum(chunk.choices[0].text.count("The quick") for chunk in chunks) == 1


def test_speculation_changes_nothing_but_the_provenance(client: openai.OpenAI) -> None:
    """Text that repeats itself, so that drafts are accepted."""
    prompt = [5, 6, 7, 8] * 12

    def run(**extra: Any) -> Any:
        return client.completions.create(model=NAME, prompt=prompt, max_tokens=48, temperature=0, logprobs=1,
                                         extra_body={"provenance": True, "ignore_eos": True, **extra})

    plain = run(speculation="none")
    drafted = run(speculation={"method": "ngram", "k": 4, "adaptive": False})
    assert drafted.choices[0].text == plain.choices[0].text
    assert {token["origin"] for token in plain.choices[0].tokens} == {"plain"}
    stats = drafted.paceline["speculation"]
    assert stats["method"] == "ngram" and plain.paceline["speculation"] is None
    origins = [token["origin"] for token in drafted.choices[0].tokens]
    assert set(origins) <= {"plain", "accepted", "corrected", "bonus"} and len(origins) == 48
    details = drafted.usage.completion_tokens_details
    assert stats["drafted"] > 0, "and nothing was predicted by the client"
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert [token["logprob"] for token in drafted.choices[0].tokens] == drafted.choices[0].logprobs.token_logprobs
    streamed = [token for chunk in client.completions.create(
        model=NAME, prompt=prompt, max_tokens=48, temperature=0, logprobs=1, stream=True, extra_body={
            "provenance": True, "ignore_eos": True, "speculation": {"method": "ngram", "k": 4, "adaptive": False}})
        for token in chunk.choices[0].tokens]
    assert streamed == drafted.choices[0].tokens
    assert "".join(token["text"] for token in streamed) == drafted.choices[0].text


def test_cached_prompt_tokens_are_counted(client: openai.OpenAI) -> None:
    prompt = "A prompt that is long enough to fill more than a block or two of the cache, said twice. " * 2
    first = client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    second = client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 16


def test_a_trace_comes_back(client: openai.OpenAI, offline: LLM) -> None:
    answer = client.completions.create(model=NAME, prompt="The quick", max_tokens=6, seed=1,
                                       extra_body={"trace": True})
    trace = Trace.from_dict(answer.paceline["trace"])
    assert len(trace.tokens) == 6
    report = replay_on(offline.engine, trace)
    assert report.equal and report.same_model


def test_the_async_client_serves_many_at_once(server: ServerThread, offline: LLM) -> None:
    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT) as client:

            async def one(seed: int) -> str:
                text = ""
                stream = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, seed=seed,
                                                              stream=True)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            async def other(seed: int) -> str:
                answer = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, seed=seed)
                return answer.choices[0].message.content or ""

            return await asyncio.gather(*(one(seed) for seed in range(8)), *(other(seed) for seed in range(8)))

    texts = asyncio.run(scene())
    want = [expected(offline, max_tokens=12, seed=seed).text for seed in range(8)]
    assert texts == want + want


def test_request_ids_go_through(client: openai.OpenAI) -> None:
    raw = client.with_raw_response.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "my-own.id-1"})
    assert raw.headers["x-request-id"] == "my-own.id-1"
    assert raw.parse().id == "chatcmpl-my-own.id-1"
    assert len(client.with_raw_response.models.list().headers["x-request-id"]) == 32


def test_messages_with_parts_and_new_names(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                  {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    assert (ask(client, messages=parts, max_tokens=openai.omit, max_completion_tokens=12).choices[0].message.content
            == ask(client).choices[0].message.content)


def test_the_clients_errors(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n"), ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"), ({"messages": []}, "messages"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"extra_body": {"temprature": 1}}, "temprature"), ({"extra_body": {"speculation": "nonsense"}}, "speculation"),
        ({"extra_body": {"speculation": {"method": "draft", "model": "/etc/passwd"}}}, "speculation"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice")]
    for case, param in cases:
        with pytest.raises(openai.BadRequestError) as problem:
            ask(client, **case)
        assert problem.value.param == param, case
        assert problem.value.type == "invalid_request_error"
        assert problem.value.message
