"""The benchmark's parts count right and time what they say they do."""

from __future__ import annotations

import time

import pytest

from grammar.structured import PADDED, structured_llm, tokenizer
from paceline.bench.grammar import compile_seconds, generate, judge, mask_seconds
from paceline.bench.schemas import SCHEMAS
from paceline.engine.structures import Structures
from paceline.grammar import states
from paceline.llm import LLM
from paceline.request import Completion, RequestOutput, SamplingParams

SOME = {name: SCHEMAS[name] for name in ("boolean", "integer", "const")}


def test_generated_texts_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "render", lambda llm, messages: tokenizer().encode(messages[0]["content"][:20]))
    found = judge(generate(structured_llm(), SOME, 50, "auto"), SOME)
    assert (found.finished, found.parsed, found.valid) == (3, 3, 3) and found.tokens > 2


def test_bad_texts_are_seen() -> None:
    texts = [("true", "stop"), ("1000", "stop"), ('"pace', "length")]
    outs = [RequestOutput("r", None, [], [Completion(0, text, [1, 2], finish)]) for text, finish in texts]
    found = judge(outs, SOME)
    assert (found.finished, found.parsed, found.valid, found.tokens) == (2, 2, 1, 6)


def test_a_cached_pass_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    structures = Structures(tokenizer(), PADDED, tokenizer().eos_ids, time.monotonic)
    seconds, grammars = compile_seconds(structures, SOME)
    assert len(seconds) == len(grammars) == 3
    out = structured_llm().generate(["x"], SamplingParams(json_schema=SCHEMAS["const"], max_tokens=40, seed=1))[0]
    tokens = out.outputs[0].token_ids
    assert len(mask_seconds(grammars[2], tokens, PADDED, tokenizer().eos_ids)) == len(tokens)
    monkeypatch.setattr(states.CompiledGrammar, "read", lambda *_: pytest.fail("a state was computed again"))
    mask_seconds(grammars[2], tokens, PADDED, tokenizer().eos_ids)
