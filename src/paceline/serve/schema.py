"""The bodies of requests. Types are checked here; what values mean is checked by SamplingParams and the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator


def number(**bounds: float) -> Any:
    """An optional number whose bounds are documented here; SamplingParams enforces them and says what to change."""
    return Field(default=None, json_schema_extra=dict(bounds))


Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A client hears of its first mistake only: nobody needs the list of a million others."""


def _first_fault(biases: Any) -> Any:
    """The first entry that is no number, alone, where there is one. (Dicts know no fail_fast.)"""
    if isinstance(biases, dict):
        for key, bias in biases.items():
            if type(bias) not in (int, float):
                return {key: bias}
    return biases


class Body(BaseModel):
    """Unknown fields are refused: a control that is spelled wrongly must not be dropped in silence."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """All that is known and the first field that is not: one is enough to be refused for."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        if unknown is None:
            return given
        return {name: given[name] for name in given.keys() & known} | {unknown: given[unknown]}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    # "schema" would hide a method of the base class.
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for structure."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None


class Sampling(Body):
    """What both kinds of completion take. null stands for the default everywhere."""

    model: str | None = None
    n: int | None = number(minimum=1, maximum=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | ListOf[Text] | None = None
    seed: int | None = number(minimum=0, maximum=(1 << 64) - 1)
    temperature: float | None = number(minimum=0)
    top_p: float | None = number(exclusiveMinimum=0, maximum=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_first_fault)] | None = None

    use_beam_search: bool | None = Field(default=None, description="Search with n beams.")
    length_penalty: float | None = number(minimum=-10, maximum=10)
    early_stopping: bool | Literal["never"] | None = None

    top_k: int | None = number(minimum=-1)
    min_p: float | None = number(minimum=0, maximum=1)
    repetition_penalty: float | None = number(exclusiveMinimum=0)
    min_tokens: int | None = number(minimum=0)
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[TokenId] | None = None
    allowed_token_ids: ListOf[TokenId] | None = Field(default=None, json_schema_extra={"minItems": 1})
    bad_words: ListOf[Text] | None = None
    no_repeat_ngram_size: int | None = number(minimum=0)
    priority: int | None = number(minimum=-(1 << 31))
    timeout_s: float | None = number(exclusiveMinimum=0)
    target_ttft_ms: float | None = number(exclusiveMinimum=0)
    target_tpot_ms: float | None = number(exclusiveMinimum=0)
    parse_special: bool | None = Field(
        default=None, description="Special tokens written in the prompt or in messages are special tokens, not text.")
    cache_salt: str | None = None
    on_empty_support: Literal["error", "stop", "unmasked"] | None = None
    speculation: str | dict[str, Any] | None = Field(
        default=None, description='A method\'s name, an object with a "method", or null to decode plainly. Left out: '
                                  "the server's default.")
    trace: bool | None = Field(default=None, description="Return what `paceline replay` needs.")
    provenance: bool | None = Field(default=None, description="Say of each token where it came from.")

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None

    # Accepted because clients send them; they say nothing about the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(Sampling):
    prompt: str | ListOf[Text] | ListOf[TokenId] | ListOf[ListOf[TokenId]]
    max_tokens: int | None = number(minimum=0)
    echo: bool | None = None
    logprobs: int | None = number(minimum=0, maximum=20)
    best_of: int | None = Field(
        default=None, json_schema_extra={"minimum": 1, "maximum": 1024},
        description="Make so many samples and return the n whose tokens are likeliest on average; with "
                    "use_beam_search, the number of beams.")
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Message(BaseModel):
    """Fields beyond these reach the chat template: clients send an assistant's message back as they got it."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampling):
    messages: ListOf[Message] = Field(min_length=1)
    max_tokens: int | None = number(minimum=1)
    max_completion_tokens: int | None = number(minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = number(minimum=0, maximum=20)
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: ListOf[Literal["text"]] | None = None
    # Accepted because clients send them; models here have no such settings.
    reasoning_effort: str | None = None
    verbosity: str | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: ListOf[TokenId]
