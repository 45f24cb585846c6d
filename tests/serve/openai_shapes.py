"""The objects of OpenAI's API as it publishes them: what each must have, of which types, and the words that it may say.
Fields beyond them are allowed: its clients ignore them."""

from __future__ import annotations

from typing import Any

TEXT: Any = {"type": "string"}
NAME: Any = {"type": "string", "minLength": 1}
WHOLE: Any = {"type": "integer", "minimum": 0}
NUMBER: Any = {"type": "number"}
BOOL: Any = {"type": "boolean"}
ANY: Any = {"type": "object"}
NULL: Any = {"type": "null"}


def words(*allowed: str) -> Any:
    return {"enum": list(allowed)}


def some(schema: Any, least: int = 0) -> Any:
    return {"type": "array", "items": schema, "minItems": least}


def either(*schemas: Any) -> Any:
    return {"anyOf": list(schemas)}


def maybe(schema: Any) -> Any:
    return either(schema, NULL)


def shape(perhaps: dict[str, Any] | None = None, /, **must: Any) -> Any:
    """An object that has all of `must`. What it has of `perhaps` is as said there."""
    return {"type": "object", "properties": must | (perhaps or {}), "required": list(must)}


def usage(given: str, made: str) -> Any:
    return shape({f"{given}_details": shape(cached_tokens=WHOLE), f"{made}_details": shape(reasoning_tokens=WHOLE)},
                 **{given: WHOLE, made: WHOLE, "total_tokens": WHOLE})


ERROR = shape(error=shape(message=NAME, type=NAME, param=maybe(TEXT), code=maybe(TEXT)))
MODEL = shape(id=NAME, object=words("model"), created=WHOLE, owned_by=TEXT)
MODELS = shape(object=words("list"), data=some(MODEL, 1))
EMBEDDINGS = shape(object=words("list"), model=NAME, usage=shape(prompt_tokens=WHOLE, total_tokens=WHOLE), data=some(
    shape(object=words("embedding"), index=WHOLE, embedding=either(some(NUMBER, 1), NAME)), 1))

# Chats and texts.
REASON = words("stop", "length", "tool_calls", "content_filter", "function_call")
TEXT_REASON = words("stop", "length", "content_filter")
SCORE: dict[str, Any] = {"token": TEXT, "logprob": NUMBER, "bytes": maybe(some({"type": "integer", "maximum": 255}))}
SCORES = shape(content=maybe(some(shape(**SCORE, top_logprobs=some(shape(**SCORE))))), refusal=maybe(some(ANY)))
USAGE = usage("prompt_tokens", "completion_tokens")
TOOL_CALL = shape(id=NAME, type=words("function"), function=shape(name=NAME, arguments=TEXT))
MESSAGE = shape({"tool_calls": some(TOOL_CALL, 1)}, role=words("assistant"), content=maybe(TEXT), refusal=maybe(TEXT))
DELTA = shape({"role": words("assistant"), "content": maybe(TEXT), "refusal": maybe(TEXT), "tool_calls": some(shape(
    {"id": NAME, "type": words("function"), "function": shape({"name": NAME, "arguments": TEXT})}, index=WHOLE), 1)})
CHAT = shape({"usage": USAGE, "system_fingerprint": TEXT}, id=NAME, object=words("chat.completion"), created=WHOLE,
             model=NAME, choices=some(shape(index=WHOLE, message=MESSAGE, finish_reason=REASON,
                                            logprobs=maybe(SCORES)), 1))
CHUNK = shape({"usage": maybe(USAGE), "system_fingerprint": TEXT}, id=NAME, object=words("chat.completion.chunk"),
              created=WHOLE, model=NAME, choices=some(shape({"logprobs": maybe(SCORES)}, index=WHOLE, delta=DELTA,
                                                            finish_reason=maybe(REASON))))
TEXT_SCORES = shape(tokens=some(TEXT), token_logprobs=some(maybe(NUMBER)), text_offset=some(WHOLE),
                    top_logprobs=maybe(some(maybe(ANY))))


def completion(reason: Any) -> Any:
    """Chunks of its stream are of the same shape, but that their reason may be null."""
    return shape({"usage": maybe(USAGE)}, id=NAME, object=words("text_completion"), created=WHOLE, model=NAME,
                 choices=some(shape(index=WHOLE, text=TEXT, logprobs=maybe(TEXT_SCORES), finish_reason=reason)))


COMPLETION, COMPLETION_CHUNK = completion(TEXT_REASON), completion(maybe(TEXT_REASON))

# Responses.
STATUS = words("in_progress", "completed", "incomplete")
PART = shape(type=words("output_text"), text=TEXT, annotations=some(ANY), logprobs=some(ANY))
ITEM = either(
    shape(type=words("message"), id=NAME, role=words("assistant"), status=STATUS, content=some(PART)),
    shape({"id": NAME, "status": STATUS}, type=words("function_call"), call_id=NAME, name=NAME, arguments=TEXT),
    shape({"status": STATUS, "content": some(shape(type=words("reasoning_text"), text=TEXT))},
          type=words("reasoning"), id=NAME, summary=some(ANY)))
TOOL = shape({"description": maybe(TEXT)}, type=words("function"), name=NAME, parameters=maybe(ANY),
             strict=maybe(BOOL))
RESPONSE = shape(
    {"usage": maybe(usage("input_tokens", "output_tokens")), "status": words(
        "completed", "failed", "in_progress", "cancelled", "queued", "incomplete"), "text": shape(
            format=shape(type=words("text", "json_object", "json_schema"))), "truncation": words("auto", "disabled"),
     "previous_response_id": maybe(NAME), "max_output_tokens": maybe(WHOLE), "store": BOOL, "background": BOOL},
    id=NAME, object=words("response"), created_at=NUMBER, error=maybe(shape(code=NAME, message=NAME)),
    incomplete_details=maybe(shape(reason=words("max_output_tokens", "content_filter"))), instructions=maybe(
        either(TEXT, some(ANY))), model=NAME, output=some(ITEM), tools=some(TOOL), parallel_tool_calls=BOOL,
    metadata=maybe(ANY), tool_choice=either(words("none", "auto", "required"), shape(type=NAME)),
    temperature=maybe(NUMBER), top_p=maybe(NUMBER))
_ITEM_EVENT = {"item_id": NAME, "output_index": WHOLE}
_PART_EVENT = _ITEM_EVENT | {"content_index": WHOLE}
EVENTS: dict[str, Any] = {f"response.{name}": shape(**fields, type=words(f"response.{name}"), sequence_number=WHOLE)
                          for name, fields in {
    "created": {"response": RESPONSE},
    "in_progress": {"response": RESPONSE},
    "completed": {"response": RESPONSE},
    "incomplete": {"response": RESPONSE},
    "output_item.added": {"output_index": WHOLE, "item": ITEM},
    "output_item.done": {"output_index": WHOLE, "item": ITEM},
    "content_part.added": _PART_EVENT | {"part": PART},
    "content_part.done": _PART_EVENT | {"part": PART},
    "output_text.delta": _PART_EVENT | {"delta": TEXT, "logprobs": some(ANY)},
    "output_text.done": _PART_EVENT | {"text": TEXT, "logprobs": some(ANY)},
    "reasoning_text.delta": _PART_EVENT | {"delta": TEXT},
    "reasoning_text.done": _PART_EVENT | {"text": TEXT},
    "function_call_arguments.delta": _ITEM_EVENT | {"delta": TEXT},
    "function_call_arguments.done": _ITEM_EVENT | {"name": NAME, "arguments": TEXT},
}.items()}
"""By what an event's `type` says."""
