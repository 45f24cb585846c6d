"""What LoRA adapters cost in decoding: tokens a second of an engine that knows no adapters, of one that has some loaded
and whose requests name none, one, or several in one batch. All in turns, in one run; random values, every linear layer
but the head."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.latency import prompt_of
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.load.adapters import Pair, PeftAdapter, Targets
from paceline.request import SamplingParams

RANK, SCALE = 16, 0.3
LOADED = 4
PROMPT = 32
"""Tokens: few enough that all prompts of a batch are computed in one step."""
Rate = Callable[[int], float]
"""Tokens a second with so many requests at once."""


def build(model: str | None, device: str, **options: Any) -> LLM:
    return LLM(model, device=device, enable_prefix_caching=False, **options)


def random_adapter(name: str, model: Any, rank: int) -> PeftAdapter:
    """For every linear layer but the head; its speed does not depend on the numbers."""
    assert isinstance(model, Decoder)
    pairs = {module.name: Pair(torch.randn(rank, linear.weight.shape[1]), torch.randn(module.size, rank), SCALE)
             for linear in model.linears() for module in linear.modules if module.name != "lm_head"}
    return PeftAdapter(Path(name), name, Targets("all-linear"), pairs)


def with_adapters(llm: LLM, count: int, rank: int) -> list[str]:
    """Loads random ones; their names."""
    names = [f"adapter-{number}" for number in range(count)]
    for name in names:
        llm.engine.adapters.add(name, random_adapter(name, llm.engine.model, rank))
    return names


def decode_rate(llm: LLM, names: Sequence[str | None], requests: int, new_tokens: int) -> float:
    """Tokens a second after the first ones, all requests together; they take `names` in turn."""
    vocab = llm.engine.model.config.vocab_size
    outs = llm.generate([prompt_of(PROMPT, vocab, salt) for salt in range(requests)],
                        SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True), speculation=None,
                        adapter=[names[number % len(names)] for number in range(requests)])
    for out in outs:
        if out.error is not None:
            raise out.error
    return sum(float(out.metrics.decode_rate) for out in outs)


def measure(ways: Mapping[str, Rate], requests: int, rounds: int) -> dict[str, list[float]]:
    """Every way once a round; the first round warms up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        say(f"adapters: {requests} at once, round {number} of {rounds}")
        for name, rate in ways.items():
            rates[name].append(rate(requests))
    return {name: found[1:] for name, found in rates.items()}


def run(model: str | None = None, device: str = "auto", concurrency: Sequence[int] = (1, 8), new_tokens: int = 64,
        rounds: int = 5, rank: int = RANK, loaded: int = LOADED) -> dict[str, Any]:
    plain, adapted = build(model, device), build(model, device, adapters={})
    names = with_adapters(adapted, loaded, rank)
    rows = []
    for requests in concurrency:
        ways: dict[str, Rate] = {
            "without": lambda count: decode_rate(plain, [None], count, new_tokens),
            "none named": lambda count: decode_rate(adapted, [None], count, new_tokens),
            "one adapter": lambda count: decode_rate(adapted, names[:1], count, new_tokens)}
        if requests > 1:
            ways[f"{min(loaded, requests)} adapters mixed"] = lambda count: decode_rate(adapted, names, count,
                                                                                        new_tokens)
        rates = measure(ways, requests, rounds)
        base = rates.pop("without")
        rows += [_row(f"{name}, {requests} at once", found, base) for name, found in rates.items()]
    return document(rows, model=model or "default", device=device, kernels=adapted.engine.kernels.name, rank=rank,
                    loaded=loaded, new_tokens=new_tokens, rounds=rounds)


def _row(case: str, rates: list[float], base: list[float]) -> Row:
    """Medians; the note has the ratios round by round, which a machine that is busy now and then changes less."""
    ratios = sorted(own / other for own, other in zip(rates, base))
    note = f"ratios round by round: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return Row(case, "tok/s", statistics.median(rates), {"no adapters": statistics.median(base)}, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/adapter_speed.py", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--concurrency", default="1,8", help="comma-separated numbers of requests")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--loaded", type=int, default=LOADED, help="adapters that a mixed batch takes in turn")
    json_argument(parser)
    given = parser.parse_args()
    counts = [int(part) for part in given.concurrency.split(",")]
    emit(run(given.model, given.device, counts, given.new_tokens, given.rounds, given.rank, given.loaded), given.json)


if __name__ == "__main__":
    main()
