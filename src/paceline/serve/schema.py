"""The bodies of requests. Types are checked here; what values mean is checked by SamplingParams and the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paceline.serve.body import Body, ListOf, Text, TokenId, number
from paceline.serve.tool_schema import AnyTool, Function, NamedFunction, NamedTool, Tool, ToolChoice


def _first_fault(biases: Any) -> Any:
    """The first entry that is no number, alone, where there is one. (Dicts know no fail_fast.)"""
    if isinstance(biases, dict):
        for key, bias in biases.items():
            if type(bias) not in (int, float):
                return {key: bias}
    return biases


class StreamOptions(Body):
    include_usage: bool = False
    # Says nothing about the text.
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
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema", description="Of a json_object.")


class Prediction(Body):
    """What the client expects the answer to be, or most of it."""

    type: Literal["content"]
    content: str | ListOf[dict[str, Any]]


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
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = number(minimum=0, maximum=20)
    on_empty_support: Literal["error", "stop", "unmasked"] | None = None
    speculation: str | dict[str, Any] | None = Field(
        default=None, description='A method\'s name, an object with a "method", or "none" to decode plainly. Left out: '
                                  "the server's default.")
    prediction: Prediction | None = Field(
        default=None, description="A text that the answer is expected to be like: it is drafted, and never changes the "
                                  "answer.")
    trace: bool | None = Field(default=None, description="Return what `paceline replay` needs.")
    provenance: bool | None = Field(default=None, description="Say of each token where it came from.")

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    strict_schema: bool | None = Field(
        default=None, description="Refuse schemas, of tools too, with keywords that cannot be enforced, instead of "
                                  "taking those for annotations.")

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


class ChatBody(Sampling):
    messages: ListOf[Message] = Field(min_length=1)
    max_tokens: int | None = number(minimum=1)
    max_completion_tokens: int | None = number(minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = number(minimum=0, maximum=20)
    tools: ListOf[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: ListOf[Function] | None = Field(default=None, description="What tools were called before.")
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        default=None, description="What tool_choice was called before.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Go on with the last message instead of answering it.")
    chat_template: str | None = Field(default=None, description="Only where the server trusts its clients with it.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        default=None, description='How much to think, where the chat template can be told; "none": not at all.')
    modalities: ListOf[Literal["text"]] | None = None
    web_search_options: dict[str, Any] | None = Field(default=None, description="Only an empty object.")
    # Accepted because clients send them; models here have no such setting, and answers are no sound.
    verbosity: str | None = None
    audio: dict[str, Any] | None = None
    # Accepted because llama.cpp's clients send them: the cache needs no word, and times are told anyway.
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    samplers: ListOf[str] | None = Field(default=None, description="Must have all that the request sets.")

    @model_validator(mode="after")
    def _functions_are_tools(self) -> Self:
        """The names of old, said anew; that the answer is to be told by them, `functions` says."""
        if self.functions is not None and self.tools is None:
            self.tools = [Tool(type="function", function=one) for one in self.functions]
            self.tool_choice = (NamedTool(type="function", function=self.function_call)
                                if isinstance(self.function_call, NamedFunction) else self.function_call)
            self.parallel_tool_calls = False
        return self


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    content: str | None = Field(default=None, description="The text, as llama.cpp's clients give it.")
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = Field(default=None, description="Of `content`; left out: false.")
    with_pieces: bool | None = Field(default=None, description="Tokens as objects with id and piece.")
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: ListOf[TokenId]
