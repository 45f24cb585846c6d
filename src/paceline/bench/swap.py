"""What host memory saves: a preempted request brought back by copies or computed again, and a prompt whose beginning
the prefix cache had no room for. Both ways in turn, in one run."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.request import SamplingParams

DECODED = 4
"""Tokens a request has got (at least, where a device runs several steps by itself) before it is preempted."""
LONGEST = 200


def build(model: str | None, device: str, tokens: int, **options: Any) -> Engine:
    """With room for one request, and little more."""
    blocks = -(-(tokens + LONGEST) // 16)
    return build_engine(EngineOptions(model=model, device=device, kv_blocks=blocks, max_model_len=blocks * 16,
                                      watermark=0.0, **options))


def until_token(engine: Engine, name: str, count: int) -> None:
    while len(engine.record(name).emitters[0].token_ids) < count:
        engine.step()


def preempted(engine: Engine, prompt: list[int], mode: str) -> float:
    """Seconds from losing all blocks to the next token."""
    engine.scheduler.preemption.mode = mode
    params = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
    name = engine.add(prompt, params, speculation=None)
    until_token(engine, name, DECODED)
    seq = engine.scheduler.running[0]
    started = time.perf_counter()
    engine.scheduler.preempt(seq)
    while seq.in_flight:
        engine.step()
    known = len(seq.tokens)
    while len(seq.tokens) == known:
        engine.step()
    taken = time.perf_counter() - started
    engine.cancel(name)
    engine.take(name)
    return taken


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that was seen before."""
    name = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0.0), speculation=None)
    started = time.perf_counter()
    until_token(engine, name, 1)
    taken = time.perf_counter() - started
    engine.cancel(name)
    engine.take(name)
    return taken


def run(model: str | None = None, device: str = "auto", tokens: int = 1000, rounds: int = 5) -> dict[str, Any]:
    luck = random.Random(1)
    engine = build(model, device, tokens, enable_prefix_caching=False, preemption="swap")
    vocabulary = engine.model.config.vocab_size
    prompt, other = ([luck.randrange(vocabulary) for _ in range(tokens)] for _ in range(2))
    ways: dict[str, list[float]] = {"swap": [], "recompute": []}
    for number in range(rounds + 1):  # the first round gets memory and warms up
        say(f"swap: a request of {tokens} tokens is preempted, round {number}")
        for mode, taken in ways.items():
            taken.append(preempted(engine, prompt, mode))
    rates = engine.scheduler.preemption
    engine = build(model, device, tokens, host_cache=1.0)
    without = build(model, device, tokens)
    hits: dict[str, list[float]] = {"fetch": [], "recompute": []}
    for number in range(rounds + 1):
        say(f"swap: two prompts of {tokens} tokens in turn, and room for one, round {number}")
        for one, taken in zip((engine, without), hits.values()):
            first_token(one, other)
            taken.append(first_token(one, prompt))
    found = [
        Row(f"preempted_{tokens}", "ms", _ms(ways["swap"]), {"recompute": _ms(ways["recompute"])},
            higher_is_better=False, note=_model(rates)),
        Row(f"prefix_{tokens}", "ms", _ms(hits["fetch"]), {"recompute": _ms(hits["recompute"])},
            higher_is_better=False, note=f"{engine.cache.cold.blocks_in} blocks fetched from the host")]
    return document(found, tokens=tokens, rounds=rounds, model=model or "default", device=device)


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds[1:]) * 1e3


def _model(rates: Any) -> str:
    """What `auto` would have compared."""
    per_token = sum(rates.block_bytes) / 16
    return (f"measured: {rates.token_seconds * 1e6:.0f} us to compute a token, "
            f"{rates.byte_seconds * per_token * 1e6:.1f} us to copy its {per_token:.0f} bytes there and back")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.swap", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    json_argument(parser)
    given = parser.parse_args()
    emit(run(given.model, given.device, given.tokens, given.rounds), given.json)


if __name__ == "__main__":
    main()
