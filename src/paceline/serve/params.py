"""A request's body as SamplingParams."""

from __future__ import annotations

import secrets
from typing import Any

from paceline.errors import RequestError
from paceline.request import STRUCTURES, SamplingParams
from paceline.serve.containers import read_json
from paceline.serve.conversation import must_call
from paceline.serve.limits import ClientLimits
from paceline.serve.llm import ServedModel
from paceline.serve.schema import ChatBody, CompletionBody, Prediction, Sampling

OPENAI_LENGTH = 16
"""What a text completion gets that does not say."""
PREDICTED = 32
"""How deep a draft of a predicted text may be: it is right for longer than others."""
SEED_BITS = 53
"""Seeds chosen here are whole in every client's numbers: many read JSON's as doubles."""

_SAME = ("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
         "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids", "bad_words", "no_repeat_ngram_size",
         "priority", "timeout_s", "cache_salt", "on_empty_support", "trace", "stop", "top_k", "length_penalty",
         "early_stopping", "parse_special", "target_ttft_ms", "target_tpot_ms", "skip_special_tokens",
         "include_stop_str_in_output")
"""Fields that are called alike and mean the same."""
Names = dict[str, str]
"""SamplingParams' name -> the client's, where they differ."""


def completion_names(body: CompletionBody) -> Names:
    return {"beam_width": "use_beam_search"} | _structure_names(body)


def chat_names(body: ChatBody) -> Names:
    names = {"beam_width": "use_beam_search", "prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names | ({"json_schema": "tools", "grammar": "tools"} if must_call(body) else _structure_names(body))


def check_streamed(body: Sampling) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed: they come with the end; leave stream out.", "stream")


def completion_params(body: CompletionBody, limits: ClientLimits) -> SamplingParams:
    if body.suffix:
        raise RequestError("suffix is not supported: models here continue a text, they do not fill gaps.", "suffix")
    asked = _common(body, limits)
    if body.use_beam_search:
        asked |= _beams(body.n if body.best_of is None else body.best_of)
    elif body.best_of is not None:
        asked["best_of"] = body.best_of
    asked["max_tokens"] = _length(body.max_tokens, "max_tokens", limits, OPENAI_LENGTH)
    asked["logprobs"] = limits.check_logprobs(body.logprobs, "logprobs")
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        asked["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
    return SamplingParams(**asked)


def chat_params(body: ChatBody, limits: ClientLimits, structure: dict[str, Any]) -> SamplingParams:
    """`structure`: what tool_choice asks of the text's form; it comes before response_format."""
    if body.web_search_options:
        raise RequestError("web_search_options is not supported: this server searches nothing; leave it out.",
                           "web_search_options")
    _check_samplers(body)
    asked = _common(body, limits)
    if structure:
        asked = {name: value for name, value in asked.items() if name not in (*STRUCTURES, "strict_schema")} | structure
    if body.use_beam_search:
        asked |= _beams(body.n)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked["max_tokens"] = _length(getattr(body, name), name, limits, None)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", "top_logprobs")
    asked["logprobs"] = limits.check_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    return SamplingParams(**asked)


def _check_samplers(body: ChatBody) -> None:
    """llama.cpp's list of what is applied: one that leaves out what the body sets would mean another text."""
    if body.samplers is None:
        return
    for name, own in {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
                      "repetition_penalty": "penalties", "presence_penalty": "penalties",
                      "frequency_penalty": "penalties"}.items():
        if getattr(body, name) is not None and own not in body.samplers:
            raise RequestError(f"samplers leaves out {own!r}, and {name} is set: leave out one of them.", "samplers")


def speculation(body: Sampling, limits: ClientLimits, model: ServedModel) -> Any:
    """What the engine's add() takes: `...` stands for the server's default."""
    wish = body.speculation
    if wish is None:
        return ... if body.prediction is None else _predicted(body, body.prediction, limits, model)
    if wish in ("none", "off"):
        return None
    if body.prediction is not None:
        raise RequestError("prediction and speculation both say what to draft: keep one of them.", "prediction")
    return limits.speculation(wish, model.speculation)


def _predicted(body: Sampling, prediction: Prediction, limits: ClientLimits, model: ServedModel) -> Any:
    """Drafts of what the client expects. Where they may not be, nothing is lost but time."""
    text = prediction.content if isinstance(prediction.content, str) else "".join(map(_part, prediction.content))
    if not text or body.use_beam_search or model.tokenizer is None:
        return ...
    model.tokenizer.check_length(text, model.config.max_model_len, "prediction")
    wish = {"method": "prediction", "tokens": model.tokenizer.encode_inside(text)[:model.config.max_model_len],
            "k": min(PREDICTED, limits.max_draft_tokens)}
    return limits.speculation(wish, model.speculation) if limits.allows(wish, model.speculation) else ...


def _part(part: dict[str, Any]) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError("prediction.content must be a text or a list of parts that are texts.", "prediction")
    return str(part["text"])


def _common(body: Sampling, limits: ClientLimits) -> dict[str, Any]:
    asked = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if asked.get("top_k") == -1:  # how other servers write "all"
        asked["top_k"] = 0
    if body.stop == "":
        del asked["stop"]
    limits.check_lists(asked)
    asked.setdefault("seed", secrets.randbits(SEED_BITS))
    if body.logit_bias is not None:
        asked["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if limits.timeout_s is not None:
        asked["timeout_s"] = min(asked.get("timeout_s", limits.timeout_s), limits.timeout_s)
    if body.prompt_logprobs is not None:
        asked["prompt_logprobs"] = limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    return asked | _structure(body)


def _beams(width: int | None) -> dict[str, Any]:
    """vLLM's way to ask for a beam search: n, or best_of where that is given, is the number of beams."""
    if width is None or width < 2:
        raise RequestError("use_beam_search needs two beams or more: set n, or best_of where fewer are to be returned.",
                           "use_beam_search")
    return {"beam_width": width}


def _structure(body: Sampling) -> dict[str, Any]:
    """What the text must look like. Asking twice is a mistake: only one can be meant."""
    asked = _ways(body)
    if len(asked) > 1:
        raise RequestError("The form of the text is asked for more than once: keep one of response_format, "
                           "structured_outputs and guided_*.", "response_format")
    structure = {name: _schema(value, field) if name == "json_schema" else value for field, name, value in asked}
    # Not response_format's own "strict": client libraries send it with schemas of sets too, which have to work.
    if body.strict_schema and "json_schema" in structure:
        structure["strict_schema"] = True
    return structure


def _structure_names(body: Sampling) -> Names:
    return {name: field for field, name, _ in _ways(body)}


def _ways(body: Sampling) -> list[tuple[str, str, Any]]:
    """(the client's field, SamplingParams' name, what it asks for) of all that say what the text must look like."""
    ways: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", body.guided_json), ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice), ("guided_grammar", "grammar", body.guided_grammar)]
    if (outer := body.structured_outputs) is not None:
        ways += [("structured_outputs.json", "json_schema", outer.json_), ("structured_outputs.regex", "regex",
                 outer.regex), ("structured_outputs.choice", "choice", outer.choice),
                 ("structured_outputs.grammar", "grammar", outer.grammar)]
    if (wanted := body.response_format) is not None and wanted.type != "text":
        schema = wanted.schema_ if wanted.type == "json_object" else wanted.json_schema and wanted.json_schema.schema_
        if schema is None and wanted.type == "json_schema":
            raise RequestError("response_format.json_schema.schema is missing: give the schema.", "response_format")
        ways.append(("response_format", "json_schema", {"type": "object"} if schema is None else schema))
    return [way for way in ways if way[2] is not None]


def _schema(value: Any, field: str) -> Any:
    """A JSON schema may come as text."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value, field)
    except (ValueError, RecursionError):
        raise RequestError(f"{field} is not valid JSON: give a schema as an object or as JSON text.", field) from None


def _length(asked: int | None, name: str, limits: ClientLimits, default: int | None) -> int | None:
    """How many tokens a sample may get; None: what the context leaves."""
    most = limits.max_output_tokens
    if asked is None:
        return min((limit for limit in (default, most) if limit is not None), default=None)
    if most is not None and asked > most:
        raise RequestError(f"{name} is {asked} and this server gives at most {most}: ask for less or have its operator "
                           "raise --max-output-tokens.", name)
    return asked


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 12:
        raise RequestError(f"logit_bias keys are token ids (whole numbers from 0), got {key!r}.", "logit_bias")
    return int(key)
