"""/completion: what llama.cpp's clients ask, as the body of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.errors import RequestError
from paceline.serve.body import ListOf, number
from paceline.serve.calls import Service
from paceline.serve.routes.llama_options import sampling
from paceline.serve.routes.translate import completion_body
from paceline.serve.schema import CompletionBody

WORDS = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "guided_grammar": "grammar",
         "guided_json": "json_schema", "logprobs": "n_probs"}
"""What completions call them -> what they are called here."""
Piece = str | int


class LlamaCompletion(BaseModel):
    """Further fields are options of the sampler; those that mean nothing here are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: str | ListOf[str | int | ListOf[str | int]]
    model: str | None = None
    stream: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: dict[str, float | bool] | ListOf[ListOf[Any]] | None = None
    ignore_eos: bool | None = None
    n_probs: int | None = number(minimum=0, maximum=20)
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: ListOf[str] | None = None


def translated(service: Service, body: LlamaCompletion) -> CompletionBody:
    fields = sampling(body.model_extra or {}, service) | {
        "prompt": _prompts(service, body.prompt), "model": body.model, "ignore_eos": body.ignore_eos,
        "logprobs": body.n_probs or None}
    if body.grammar:
        fields["guided_grammar"] = body.grammar
    if body.json_schema:
        fields["guided_json"] = body.json_schema
    if body.logit_bias:
        fields["logit_bias"] = _biases(body.logit_bias)
    if fields["max_tokens"] == 0:  # the prompt is computed, and kept for who goes on with it
        fields["prompt_logprobs"] = 0
    return completion_body(fields, WORDS)


def _prompts(service: Service, given: str | list[Any]) -> Any:
    """A text, ids, or both mixed are one prompt; a list of texts, or one that holds lists, is several."""
    if isinstance(given, str) or not given:
        return given
    kinds = set(map(type, given))
    if kinds == {int} or kinds == {str}:
        return given
    if list not in kinds:
        return _mixed(service, given)
    return [_mixed(service, [one] if isinstance(one, str) else one) if not isinstance(one, int) else [one]
            for one in given]


def _mixed(service: Service, pieces: Sequence[Piece]) -> list[int]:
    """Token ids and texts between them. What a text begins with, it begins with at the start alone."""
    tokenizer, ids = service.llm.engine.tokenizer, list[int]()
    for place, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
        elif tokenizer is None:
            raise RequestError("This model came without a tokenizer: give prompts as token ids.", "prompt")
        else:
            tokenizer.check_length(piece, service.llm.engine.config.max_model_len)
            ids += tokenizer.encode(piece, add_special=place == 0)
    return ids


def only(answer: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Those that were asked for; of "a/b" what lies there, under its own name."""
    if not fields:
        return dict(answer)
    found: dict[str, Any] = {}
    for path in fields:
        inner: Any = answer
        *_, name = parts = path.split("/")
        for part in parts:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        if inner is not None:
            found[name] = inner
    return found


def _biases(given: dict[str, Any] | list[list[Any]]) -> dict[str, float]:
    """false: never."""
    pairs: list[Any] = list(given.items()) if isinstance(given, dict) else given
    found: dict[str, float] = {}
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int | str) or not isinstance(
                pair[1], int | float) or pair[1] is True:
            raise RequestError("logit_bias must hold pairs of a token id and a number, or false for never.",
                               "logit_bias")
        found[str(pair[0])] = float("-inf") if pair[1] is False else float(pair[1])
    return found
