"""What a step with drafts costs on a card: a scripted drafter that is always right, chain and tree, in steps that are
captured and verified on the device, and in steps that are launched kernel by kernel and decided by the host."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from paceline.bench.gpu import engine, prompts_of
from paceline.bench.gpu_shapes import SHAPES, config_of
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.llm import LLM
from paceline.request import SamplingParams

DRAFTS: dict[str, dict[str, Any]] = {
    "chain of 4": {"k": 4}, "chain of 15": {"k": 15}, "tree of 4 x 3": {"k": 4, "branches": 3, "nodes": 12}}
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 3}}
PARTS = ("schedule_s", "forward_s", "sample_s", "commit_s", "draft_s")
SHORT = 8


def measure(llm: LLM, prompts: list[list[int]], texts: list[list[int]], draft: dict[str, Any],
            controls: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a step and its parts, without those of the prompts; and how many texts came out equal."""
    wishes = [{"method": "oracle", "tokens": text} | draft for text in texts]
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


def run(shape: str, dtype: str, deterministic: bool, batches: tuple[int, ...], count: int) -> dict[str, Any]:
    llm = engine(shape, getattr(torch, dtype), deterministic)
    vocab = config_of(shape).vocab_size
    rows: list[Row] = []
    for batch in batches:
        prompts = prompts_of([512] * batch, vocab, 5)
        for style, controls in STYLES.items():
            params = SamplingParams(max_tokens=count, ignore_eos=True, **controls)
            texts = [out.outputs[0].token_ids for out in llm.generate(list(prompts), params, speculation=None)]
            for name, draft in DRAFTS.items():
                captured = measure(llm, prompts, texts, draft, controls)
                drafts, llm.engine.runner.drafts = llm.engine.runner.drafts, None
                launched = measure(llm, prompts, texts, draft, controls)
                llm.engine.runner.drafts = drafts
                case = f"{name}, {style}, {batch} at once"
                for way, found in (("captured", captured), ("launched", launched)):
                    say(f"gpu_drafts {shape}: {case}, {way}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
                rows.append(Row(case, "ms a step", captured["all"], {"launched": launched["all"]}, False,
                                f"{captured['equal']:.0f} and {launched['equal']:.0f} of {batch} texts equal"))
    return document(rows, shape=shape, dtype=dtype, deterministic=deterministic, tokens=count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.gpu_drafts", description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=96)
    json_argument(parser)
    given = parser.parse_args()
    emit(run(given.shape, given.dtype, given.deterministic, tuple(map(int, given.batches.split(","))), given.tokens),
         given.json)


if __name__ == "__main__":
    main()
