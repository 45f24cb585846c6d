"""Structured output: how many texts parse and validate, how long a schema compiles, how long a token's mask takes."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.grammar_peer import XGrammar, has_xgrammar
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.bench.schemas import SCHEMAS, Schema
from paceline.engine.structures import Structures
from paceline.grammar.sequence import SequenceGrammar
from paceline.grammar.states import CompiledGrammar
from paceline.grammar.structure import Structure
from paceline.llm import LLM
from paceline.request import RequestOutput, SamplingParams

QUESTION = "Answer with JSON that fits this schema: "
GOAL_US = 100.0
"""Of a mask that is in the cache, at the 99th percentile."""


@dataclass(slots=True)
class Outcome:
    """What came of the schemas' texts."""

    finished: int = 0
    parsed: int = 0
    valid: int = 0
    tokens: int = 0


def generate(llm: LLM, schemas: dict[str, Schema], max_tokens: int, speculation: Any) -> list[RequestOutput]:
    prompts = [llm.render([{"role": "user", "content": QUESTION + json.dumps(schema)[:600]}])
               for schema in schemas.values()]
    params = [SamplingParams(json_schema=schema, temperature=1.0, seed=seed, max_tokens=max_tokens)
              for seed, schema in enumerate(schemas.values())]
    return llm.generate(prompts, params, speculation=speculation)


def judge(outs: list[RequestOutput], schemas: dict[str, Schema]) -> Outcome:
    """Counts; without the package jsonschema, `valid` is what parses."""
    found = Outcome()
    validate = _validator()
    for out, schema in zip(outs, schemas.values()):
        one = out.outputs[0]
        found.tokens += len(one.token_ids)
        found.finished += out.error is None and one.finish_reason == "stop"
        try:
            value = json.loads(one.text)
            found.parsed += 1
            validate(value, schema)
            found.valid += 1
        except Exception as problem:
            say(f"grammar: {one.finish_reason}, {type(problem).__name__}: {one.text[:80]!r}")
    return found


def _validator() -> Callable[[Any, Schema], None]:
    try:
        import jsonschema
    except ImportError:
        return lambda value, schema: None
    return lambda value, schema: jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


def compile_seconds(structures: Structures, schemas: dict[str, Schema]) -> tuple[list[float], list[CompiledGrammar]]:
    """Each schema by itself, the tokenizer made ready before."""
    compiler = structures.compiler
    compiler.compile(Structure("regex", "warm")).future.result()
    seconds, grammars = [], []
    for schema in schemas.values():
        started = time.perf_counter()
        grammars.append(compiler.compile(Structure("json_schema", json.dumps(schema))).future.result())
        seconds.append(time.perf_counter() - started)
    return seconds, grammars


def mask_seconds(grammar: CompiledGrammar, tokens: list[int], vocab_size: int, ends: frozenset[int]) -> list[float]:
    """The mask before each of a text's tokens, asked for as the engine does: one after the other."""
    sequence = SequenceGrammar(grammar, vocab_size, ends)
    seconds = []
    for token in tokens:
        started = time.perf_counter()
        sequence.mask(())
        seconds.append(time.perf_counter() - started)
        sequence.append([token])
    return seconds


def run(model: str | None = None, max_tokens: int = 1000, peers: bool = True) -> dict[str, Any]:
    llm = LLM(model)
    engine, tokenizer = llm.engine, llm.engine.tokenizer
    assert tokenizer is not None
    rows: list[Row] = []
    outs: dict[str, list[RequestOutput]] = {}
    for name, speculation in (("plain", None), ("auto", "auto")):
        say(f"grammar: {len(SCHEMAS)} schemas at temperature 1, {name}")
        outs[name] = generate(llm, SCHEMAS, max_tokens, speculation)
        found = judge(outs[name], SCHEMAS)
        unit = f"of {len(SCHEMAS)}"
        rows += [Row(f"{name}: ended by themselves", unit, found.finished), Row(f"{name}: parsed", unit, found.parsed),
                 Row(f"{name}: valid", unit, found.valid), Row(f"{name}: tokens", "tokens", found.tokens)]
    texts = [out.outputs[0].token_ids for out in outs["plain"]]
    same = sum(a == b.outputs[0].token_ids for a, b in zip(texts, outs["auto"]))
    origins = [origin for out in outs["auto"] for origin in out.speculation.provenance]
    rows += [Row("texts equal with and without speculation", f"of {len(texts)}", same),
             Row("tokens drafted by the grammar and accepted", "%",
                 100.0 * sum(origin.drafter == "grammar" for origin in origins) / len(origins))]

    say("grammar: compiling and masking")
    peer = XGrammar(tokenizer, engine.model.config.vocab_size) if peers and has_xgrammar() else None
    rows += _timings(Structures(tokenizer, engine.model.config.vocab_size, tokenizer.eos_ids, time.monotonic), texts,
                     engine.model.config.vocab_size, tokenizer.eos_ids, peer)
    return document(rows, max_tokens=max_tokens, goal_cached_p99_us=GOAL_US)


def _timings(structures: Structures, texts: list[list[int]], vocab_size: int, ends: frozenset[int],
             peer: XGrammar | None) -> list[Row]:
    seconds, grammars = compile_seconds(structures, SCHEMAS)
    passes: dict[str, list[float]] = {"new": [], "lexer warm": [], "cached": []}
    gc.collect()
    gc.disable()  # what the texts left behind is not the masks' affair
    for grammar, tokens in zip(grammars, texts):
        for name, times in passes.items():
            if name == "lexer warm":
                grammar.forget()
            times += mask_seconds(grammar, tokens, vocab_size, ends)
    gc.enable()
    compile_peer, mask_peer = ([], []) if peer is None else peer.measure(SCHEMAS, texts)
    rows = _percentiles("compile", "ms", 1e3, seconds, compile_peer)
    for name, times in passes.items():
        rows += _percentiles(f"mask, {name}", "us", 1e6, times, [] if name == "cached" else mask_peer)
    if peer is not None:
        rows.append(Row("schemas refused", "schemas", 0.0, {"xgrammar": float(peer.refused)}))
        rows.append(Row("texts it forbids", "texts", 0.0, {"xgrammar": float(peer.forbidden)}))
    return rows


def _percentiles(case: str, unit: str, scale: float, own: list[float], other: list[float]) -> list[Row]:
    rows = []
    for name, pick in (("mean", np.mean), ("p50", np.median), ("p99", lambda values: np.percentile(values, 99)),
                       ("max", np.max)):
        peers = {"xgrammar": scale * float(pick(other))} if other else {}
        rows.append(Row(f"{case}, {name}", unit, scale * float(pick(own)), peers, higher_is_better=False))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.grammar", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--no-peers", action="store_true")
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(arguments.model, arguments.max_tokens, not arguments.no_peers), arguments.json)


if __name__ == "__main__":
    main()
