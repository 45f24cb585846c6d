"""What a step with drafts costs on a card: a scripted drafter that is always right, chain and tree, in steps that are
captured and verified on the device, and in steps that are launched kernel by kernel and decided by the host; and the
target's first layers as a draft model, which samples on the device and on the host."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from paceline.bench.gpu import engine, prompts_of
from paceline.bench.gpu_shapes import SHAPES, config_of
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.request import SamplingParams

DRAFTS: dict[str, dict[str, Any]] = {
    "chain of 4": {"k": 4}, "chain of 15": {"k": 15}, "tree of 4 x 3": {"k": 4, "branches": 3, "nodes": 12}}
MODELS: dict[str, dict[str, Any]] = {
    "first layers, chain of 4": {"k": 4}, "first layers, tree of 2 x 2 x 1 x 1": {"branches": [2, 2, 1, 1], "k": 4}}
"""Drafts of a quarter of the target's layers."""
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 3}}
PARTS = ("schedule_s", "forward_s", "sample_s", "commit_s", "draft_s")
SHORT = 8


def measure(llm: LLM, prompts: list[list[int]], texts: list[list[int]], wishes: list[dict[str, Any]],
            controls: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a step and its parts, without those of the prompts; and how many texts came out equal."""
    found: list[dict[str, float]] = []
    for count in (SHORT, len(texts[0]), SHORT, len(texts[0])):  # the first two capture
        params = SamplingParams(max_tokens=count, ignore_eos=True, **controls)
        before, begun = llm.engine.report(), time.perf_counter()
        outs = llm.generate(list(prompts), params, speculation=wishes)
        seconds, after = time.perf_counter() - begun, llm.engine.report()
        found.append({"all": seconds} | {name: after[name] - before[name] for name in ("steps", *PARTS)})
    steps = found[3]["steps"] - found[2]["steps"]
    times = {name: (found[3][name] - found[2][name]) / steps * 1000 for name in ("all", *PARTS)}
    return times | {"equal": sum(out.outputs[0].token_ids == text for out, text in zip(outs, texts))}


def scripted(llm: LLM, prompts: list[list[int]], texts: list[list[int]], draft: dict[str, Any],
             controls: dict[str, Any]) -> dict[str, dict[str, float]]:
    wishes = [{"method": "oracle", "tokens": text} | draft for text in texts]
    captured = measure(llm, prompts, texts, wishes, controls)
    executor: Any = llm.engine.executor
    executor.graphs.verify.takes = lambda *_: False
    launched = measure(llm, prompts, texts, wishes, controls)
    del executor.graphs.verify.takes
    return {"captured": captured, "launched": launched}


def by_model(llm: LLM, prompts: list[list[int]], texts: list[list[int]], draft: dict[str, Any],
             controls: dict[str, Any]) -> dict[str, dict[str, float]]:
    layers = max(1, llm.engine.model.config.num_layers // 4)
    wishes = [{"method": "exit", "layers": layers, "adaptive": False} | draft] * len(texts)
    model: Any = llm.engine.draft_models.exiting(layers)  # held, so that it is the one that drafts
    sampled = measure(llm, prompts, texts, wishes, controls)
    sampler, model.device_sampler = model.device_sampler, None
    on_host = measure(llm, prompts, texts, wishes, controls)
    model.device_sampler = sampler
    return {"captured": sampled, "sampled by the host": on_host}


def run(shape: str, dtype: str, deterministic: bool, batches: tuple[int, ...], count: int,
        parts: tuple[str, ...] = ("scripted", "models")) -> dict[str, Any]:
    wrong = [part for part in parts if part not in ("scripted", "models")]
    if wrong:
        raise ConfigError(f"No part {wrong[0]!r}: use scripted, models or both.")
    llm = engine(shape, getattr(torch, dtype), deterministic)
    vocab = config_of(shape).vocab_size
    rows: list[Row] = []
    cases = [*((name, draft, scripted) for name, draft in DRAFTS.items() if "scripted" in parts),
             *((name, draft, by_model) for name, draft in MODELS.items() if "models" in parts)]
    for batch in batches:
        prompts = prompts_of([512] * batch, vocab, 5)
        for style, controls in STYLES.items():
            params = SamplingParams(max_tokens=count, ignore_eos=True, **controls)
            texts = [out.outputs[0].token_ids for out in llm.generate(list(prompts), params, speculation=None)]
            for name, draft, way in cases:
                case = f"{name}, {style}, {batch} at once"
                (first, found), *others = way(llm, prompts, texts, draft, controls).items()
                for how, times in ((first, found), *others):
                    say(f"draft_steps {shape}: {case}, {how}: " + ", ".join(f"{k} {v:.3g}" for k, v in times.items()))
                equal = ", ".join(f"{times['equal']:.0f}" for times in (found, *(times for _, times in others)))
                rows.append(Row(case, "ms a step", found["all"], {how: times["all"] for how, times in others}, False,
                                f"texts equal: {equal} of {batch}"))
    return document(rows, shape=shape, dtype=dtype, deterministic=deterministic, tokens=count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/draft_steps.py", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--parts", default="scripted,models")
    json_argument(parser)
    given = parser.parse_args()
    emit(run(given.shape, given.dtype, given.deterministic, tuple(map(int, given.batches.split(","))), given.tokens,
             tuple(given.parts.split(","))), given.json)


if __name__ == "__main__":
    main()
