"""What a soak asks for: requests of every kind a server takes, by seed, and what they should be answered with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.request import SamplingParams

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
PROMPTS = (
    "The history of the bicycle begins", "def quicksort(values):\n", "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a village by the sea,", "The three laws of thermodynamics are", "Q: What is the capital of "
    "France?\nA:", "Ingredients for four people:\n- 500 g", "import numpy as np\n\n", "In this paper we propose",
    "The quick brown fox jumps over the lazy dog. " * 12, "Breaking news: scientists have", "To be, or not to be,",
    "one two three one two three one two three one two", "Ünïcödé, 日本語 and emoji 🙂 go on:")
QUESTIONS = ("What is the capital of France?", "Say hello in three languages.", "Write a line about the sea.",
             "Count from one to ten.", "Why is the sky blue?")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
          "required": ["name", "ok"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}}
SPECULATION: tuple[Any, ...] = (
    None, "auto", "ngram", "suffix", "lookahead", "exit", "skip", {"method": "suffix", "tree": True, "k": 6},
    {"method": "ngram", "adaptive": False, "k": 5, "verify": "rejection"},
    {"method": "merge", "drafters": ["ngram", "suffix"]}, "dspark", "eagle3", "mtp")
"""Ways to decode. Those that a model has no heads for are left out when the server says so."""
PLAIN = ("text", "ids", "several", "samples", "best_of", "beams", "scores", "echo", "stops", "controls", "regex",
         "choice", "grammar", "chat", "chat_schema", "chat_samples", "tools")


@dataclass(frozen=True)
class Ask:
    """One request and, where the same can be asked offline, how: prompts or a conversation, and parameters."""

    kind: str
    path: str
    body: dict[str, Any]
    prompts: list[str] = field(default_factory=list)
    messages: Sequence[Mapping[str, Any]] = ()
    params: SamplingParams | None = None
    """None: there is no such thing offline; all answers to it are the same."""
    adapter: str | None = None
    streams: bool = True
    """Whether it may be streamed."""

    @property
    def key(self) -> str:
        """Whatever its answer depends on."""
        return json.dumps([self.path, self.body], sort_keys=True)


def asks(count: int, seed: int, adapters: tuple[str, ...] = (), tools: bool = True) -> list[Ask]:
    """As many different ones of every kind in turn; they are asked again and again, in other company each time."""
    luck = random.Random(seed)
    kinds = [kind for kind in PLAIN if tools or kind != "tools"]
    found = [_MAKERS[kinds[place % len(kinds)]](luck) for place in range(count)]
    if adapters:
        found += [replace(one, adapter=name, body=one.body | {"model": name}) for one in found[::4]
                  for name in (luck.choice(adapters),)]
    return found


def _sampled(luck: random.Random, longest: int = 48) -> dict[str, Any]:
    """Greedy or seeded: the same every time."""
    return {"temperature": luck.choice([0.0, 0.8, 1.0]), "seed": luck.getrandbits(40),
            "max_tokens": luck.randint(4, longest)}


def _completion(kind: str, luck: random.Random, body: dict[str, Any] | None = None, streams: bool = True,
                longest: int = 48, **params: Any) -> Ask:
    """`body`: what HTTP calls otherwise than SamplingParams does."""
    prompt, common = luck.choice(PROMPTS), _sampled(luck, longest)
    if params.get("beam_width"):
        common["temperature"] = 0.0
    same = {name: value for name, value in params.items() if body is None or name not in ("beam_width", *HTTP)}
    return Ask(kind, COMPLETIONS, {"prompt": prompt} | common | same | (body or {}), [prompt],
               params=SamplingParams(**common | params), streams=streams)


HTTP = ("regex", "choice", "grammar", "json_schema", "prompt_logprobs")
"""Parameters that have another place in a body."""


def _chat(kind: str, luck: random.Random, body: dict[str, Any] | None = None, **params: Any) -> Ask:
    messages = [{"role": "user", "content": luck.choice(QUESTIONS)}]
    if luck.random() < 0.3:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    common = _sampled(luck)
    same = {name: value for name, value in params.items() if name not in HTTP}
    return Ask(kind, CHAT, {"messages": messages} | common | same | (body or {}), messages=messages,
               params=SamplingParams(**common | params))


def _ids(luck: random.Random) -> Ask:
    one = _completion("ids", luck)
    ids = [luck.randrange(5, 250) for _ in range(luck.randint(2, 40))]
    return replace(one, body=one.body | {"prompt": ids}, prompts=[], params=None)


def _several(luck: random.Random) -> Ask:
    one = _completion("several", luck, longest=16)
    prompts = luck.sample(PROMPTS, 3)
    return replace(one, body=one.body | {"prompt": prompts}, prompts=prompts)


def _echo(luck: random.Random) -> Ask:
    return _completion("echo", luck, {"echo": True, "logprobs": 1}, streams=False, logprobs=1, prompt_logprobs=1,
                       longest=12)


def _tools(luck: random.Random) -> Ask:
    choice: Any = luck.choice(["required", {"type": "function", "function": {"name": "get_weather"}}])
    one = _chat("tools", luck, {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80})
    return replace(one, params=None, messages=())


def _structured(kind: str, luck: random.Random, **structure: Any) -> Ask:
    return _completion(kind, luck, {"structured_outputs": structure}, **structure)


_MAKERS: dict[str, Callable[[random.Random], Ask]] = {
    "text": lambda luck: _completion("text", luck),
    "ids": _ids,
    "several": _several,
    "samples": lambda luck: _completion("samples", luck, n=luck.randint(2, 4), longest=16),
    "best_of": lambda luck: _completion("best_of", luck, n=1, best_of=3, streams=False, longest=16),
    "beams": lambda luck: _completion("beams", luck, {"use_beam_search": True, "best_of": 3, "n": 2}, streams=False,
                                      beam_width=3, n=2, longest=12),
    "scores": lambda luck: _completion("scores", luck, logprobs=3, longest=16),
    "echo": _echo,
    "stops": lambda luck: _completion("stops", luck, stop=[" the", "\n", "e"], min_tokens=3),
    "controls": lambda luck: _completion("controls", luck, {"logit_bias": {"11": 1.5}}, top_k=30, top_p=0.9,
                                         repetition_penalty=1.2, frequency_penalty=0.3, no_repeat_ngram_size=4,
                                         logit_bias={11: 1.5}),
    "regex": lambda luck: _structured("regex", luck, regex=luck.choice(
        ["[a-z]{3,9}( [a-z]{3,9}){2}", "(yes|no), [0-9]{1,4}", "[A-Z][a-z]+ (is|was) [a-z]+"])),
    "choice": lambda luck: _structured("choice", luck, choice=["red", "green", "dark blue"]),
    "grammar": lambda luck: _structured("grammar", luck, grammar='start: ("ab" | "ba" | /[0-9]{1,3}/)+ "."'),
    "chat": lambda luck: _chat("chat", luck),
    "chat_schema": lambda luck: _chat("chat_schema", luck, {"response_format": {
        "type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}, json_schema=SCHEMA),
    "chat_samples": lambda luck: _chat("chat_samples", luck, n=2, presence_penalty=0.4),
    "tools": _tools,
}


MALFORMED: tuple[tuple[str, bytes], ...] = tuple((path, body if isinstance(body, bytes) else json.dumps(body).encode())
                                                 for path, body in (
    (COMPLETIONS, b"{not json"), (COMPLETIONS, b""), (COMPLETIONS, b"\xff\xfe"), (COMPLETIONS, []),
    (COMPLETIONS, {"prompt": ""}), (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": [10 ** 9]}), (COMPLETIONS, {"prompt": "a", "n": 100_000}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}), (COMPLETIONS, {"prompt": "a", "model": "no such model"}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(("}}),
    (COMPLETIONS, {"prompt": "a", "speculation": "no such method"}),
    (COMPLETIONS, {"prompt": "a", "speculation": {"method": "draft", "model": "/etc/passwd"}}),
    (CHAT, {"messages": []}), (CHAT, {"messages": [{"role": "nobody"}]}), (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}),
    (TOKENIZE, {"nothing": 1}), ("/v1/no-such-thing", {}), ("/metrics", {}))
)
"""What must be refused, with a status from 400 to 499."""
