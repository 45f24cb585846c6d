"""/v1/responses by the official client: whole and streamed, tools, structure, conversations that go on, and whose they
are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from calling import ARGUMENTS, TOKENIZER, WEATHER, calling_engine
from serving import NAME, WAIT, ServerThread, served

from engine.tiny import tiny_engine
from paceline import LLM, SamplingParams
from paceline.serve.routes.stored import ResponseStore, Stored

TOOL: Any = {"type": "function"} | WEATHER["function"]


@pytest.fixture(scope="module")
def client(server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


@pytest.fixture(scope="module")
def caller() -> Iterator[openai.OpenAI]:
    """Of a model that calls tools."""
    with served(calling_engine()) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": NAME, "input": "Who are you?", "max_output_tokens": 12, "extra_body": {"seed": 7}}
    return client.responses.create(**given | more)


def said(offline: LLM, messages: list[dict[str, Any]], **params: Any) -> Any:
    return offline.chat(messages, SamplingParams(**{"max_tokens": 12, "seed": 7} | params))[0].outputs[0]


def test_a_response_is_what_a_chat_says(client: openai.OpenAI, offline: LLM) -> None:
    answer = ask(client, instructions="Be brief.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    want = said(offline, messages)
    assert answer.output_text == want.text and want.finish_reason == "length"
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.object == "response" and answer.id.startswith("resp_") and answer.metadata == {"a": "b"}
    assert answer.usage.input_tokens == len(offline.render(messages)) and answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.input_tokens_details.cached_tokens >= 0


def test_a_conversation_goes_on(client: openai.OpenAI, offline: LLM) -> None:
    first = ask(client, instructions="Never seen again.")
    second = ask(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "And now?"}]}],
                 previous_response_id=first.id)
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And now?"}]
    assert second.output_text == said(offline, messages).text
    third = ask(client, input="More.", previous_response_id=second.id)
    more = [*messages, {"role": "assistant", "content": second.output_text}, {"role": "user", "content": "More."}]
    assert third.output_text == said(offline, more).text and third.previous_response_id == second.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    with pytest.raises(openai.NotFoundError) as problem:
        ask(client, previous_response_id=first.id)
    assert problem.value.param == "previous_response_id"
    assert client.responses.retrieve(second.id).id == second.id, "what goes on from it has what it needs"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = ask(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_events_come_in_order_and_add_up(client: openai.OpenAI) -> None:
    endless = {"extra_body": {"seed": 7, "ignore_eos": True}}
    events = list(ask(client, stream=True, **endless))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == ["response.created", "response.in_progress", "response.output_item.added",
                     "response.content_part.added", *["response.output_text.delta"] * len(deltas),
                     "response.output_text.done", "response.content_part.done", "response.output_item.done",
                     "response.incomplete"]
    whole = ask(client, **endless)
    assert len(deltas) > 1 and "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-4].text == whole.output_text and events[0].response.status == "in_progress"
    assert events[0].response.output == [] and events[2].item.content == []
    assert client.responses.retrieve(events[0].response.id).status == "incomplete"
    assert events[-1].response.usage.output_tokens == 12


def test_structure(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = ask(client, max_output_tokens=60, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert answer.status == "completed" and json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text.format.type == "json_schema"


def tools(client: openai.OpenAI, **more: Any) -> Any:
    return ask(client, **{"input": "weather?", "tools": [TOOL], "temperature": 0, "max_output_tokens": 1000,
                          "extra_body": {"stop_token_ids": TOKENIZER.encode("\x00")}} | more)


def test_a_strict_schema_is_held_to(client: openai.OpenAI) -> None:
    """What cannot be enforced is refused, where it is to be; "strict" is what client libraries send anyway."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def ask(**more: Any) -> Any:
        form: Any = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
        return client.responses.create(model=NAME, input="Hello", max_output_tokens=1, text={"format": form}, **more)

    assert ask().status == "incomplete"
    with pytest.raises(openai.BadRequestError):
        ask(extra_body={"strict_schema": True})


def test_what_was_refused_is_read_again(client: openai.OpenAI) -> None:
    said: Any = {"role": "assistant", "type": "message", "content": [{"type": "refusal", "refusal": "No."}]}
    again = client.responses.create(model=NAME, max_output_tokens=1, input=[
        {"role": "user", "content": "Hello"}, said, {"role": "user", "content": "Why?"}])
    plain = client.responses.create(model=NAME, max_output_tokens=1, input=[
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"}])
    assert again.usage.input_tokens == plain.usage.input_tokens


def test_functions_are_called_and_their_results_read(caller: openai.OpenAI) -> None:
    answer = tools(caller)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.status == "completed" and answer.output_text == "Let me look."
    calls = answer.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    by_id = tools(caller, input=results, previous_response_id=answer.id)
    whole = [{"role": "user", "content": "weather?"}, *[item.model_dump() for item in answer.output], *results]
    assert by_id.usage.input_tokens == tools(caller, input=whole).usage.input_tokens > answer.usage.input_tokens


def test_calls_are_streamed(caller: openai.OpenAI) -> None:
    events = list(tools(caller, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begun = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in begun] == [
        (0, "message"), (1, "function_call"), (2, "function_call")]
    for event in begun[1:]:
        pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"
                  and one.item_id == event.item.id]
        done = [one for one in events if one.type == "response.function_call_arguments.done"
                and one.item_id == event.item.id]
        assert event.item.arguments == "" and len(pieces) > 5
        assert json.loads("".join(pieces)) == json.loads(done[0].arguments) == ARGUMENTS
    assert events[-1].type == "response.completed" and len(events[-1].response.output) == 3
    with caller.responses.stream(model=NAME, input="weather?", tools=[TOOL], temperature=0,
                                 extra_body={"stop_token_ids": TOKENIZER.encode("\x00")}) as stream:
        assert len(stream.get_final_response().output) == 3, "the client's own helper agrees"


@pytest.mark.parametrize(("more", "word"), [
    ({"background": True}, "background"), ({"truncation": "some"}, "truncation"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"truncation": "auto", "input": "word " * 9000}, "maximum context length"),
    ({"n": 2}, "n must be 1"),
    ({"tools": [{"type": "web_search"}]}, "runs no tools"), ({"include": ["x"]}, "include"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"), ({"conversation": "x"}, "conversation"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"), ({"input": []}, "input is an empty"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"trace": True}, "trace is not told"),
    ({"text": {"format": {"type": "json_schema"}}}, "schema is missing"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice")])
def test_what_cannot_be_done_is_refused(server: ServerThread, more: dict[str, Any], word: str) -> None:
    refused = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "max_output_tokens": 4} | more)
    assert refused.status_code == 400 and word in refused.json()["error"]["message"]


def test_keys_do_not_see_each_others_responses() -> None:
    with served(calling_engine(), api_keys=("one", "two"), operator_keys=("boss",)) as url:
        one, two, boss = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=WAIT, max_retries=0)
                          for key in ("one", "two", "boss"))
        mine = tools(one)
        unknown = [httpx.get(f"{url}/v1/responses/{name}", headers={"authorization": "Bearer two"}).text
                   for name in (mine.id, "resp_0")]
        assert unknown[0].replace(mine.id, "resp_0") == unknown[1], "not even that it is there"
        for other in (two, boss):
            for use in (other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    use(mine.id)
            with pytest.raises(openai.NotFoundError):
                tools(other, previous_response_id=mine.id)
        assert one.responses.retrieve(mine.id).id == mine.id


def test_the_oldest_make_way_within_a_tenant() -> None:
    store = ResponseStore(3, 100)

    def put(tenant: str, name: str, size: int) -> None:
        store.put(tenant, name, Stored({"id": name}, (), size))

    put("other", "x", 100)
    for name in "abcd":
        put("own", name, 10)
    assert [store.get("own", name) is not None for name in "abcd"] == [False, True, True, True]
    put("own", "e", 85)
    assert [store.get("own", name) is not None for name in "bcde"] == [False, False, True, True]
    put("own", "f", 101)
    assert [store.get("own", name) is not None for name in "def"] == [False] * 3
    assert store.get("other", "x") is not None and store.get("own", "x") is None and not store.delete("own", "x")


def test_a_server_may_store_none() -> None:
    with served(tiny_engine(), stored_responses=0) as url:
        refused = httpx.get(f"{url}/v1/responses/resp_0")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "response_not_found"
