"""A load test of a real server (`paceline bench serve --json`): asked again of a simulated fleet, and set beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.bench.serving.arrivals import Arrival, read_trace
from paceline.bench.serving.datasets import SHARED_PREFIX, SYNTHETIC, Asks, Lengths
from paceline.errors import ConfigError
from paceline.plan.simulate.figures import Figures
from paceline.plan.simulate.traffic import Asked, Tokenize, words

WARM_UP_S = 60.0
"""Between two requests that warm a fleet up."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure, measured and simulated."""

    what: str
    unit: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Share by which the simulation is too high."""
        return self.simulated / self.measured - 1.0 if self.measured else 0.0


def is_load_test(path: str | Path) -> bool:
    return str(path).endswith(".json") and Path(path).is_file()


def asked_again(path: str | Path, tokenize: Tokenize = words) -> list[Asked]:
    """The requests of its first level and run: when they came, how long prompts and answers were by the server's
    count, and what they had in common, since made-up prompts are the same again by their seed. What failed is left
    out."""
    document = _read(path)
    settings, level = document["settings"], document["levels"][0]
    trace = read_trace(settings["trace"], settings["time_scale"]) if settings["trace"] else []
    samples = [dict(zip(level["samples_are"], one)) for one in level["samples"]][:len(trace) or settings["requests"]]
    warm, texts = _texts(settings, trace, len(samples), tokenize)
    found = []
    for one, text in zip(samples, texts):
        if one["fault"] is None and one["tokens"]:
            length = one["prompt_tokens"] or len(text)
            found.append(Asked(1e-3 * one["start_ms"], length, one["tokens"], given=tuple(text[:length])))
    if not found or not all(one.prompt_tokens for one in found):
        raise ConfigError(f"{path} has no requests with their lengths: run it with --usage, and with requests that are "
                          "answered.")
    found.sort(key=lambda one: one.at)
    first = found[0].at
    before = [Asked(WARM_UP_S * (place - len(warm)), len(text), 1, given=tuple(text))
              for place, text in enumerate(warm)]
    return [*before, *(replace(one, at=one.at - first) for one in found)]


def _texts(settings: dict[str, Any], trace: Sequence[Arrival], count: int, tokenize: Tokenize,
           ) -> tuple[list[list[int]], list[list[int]]]:
    """Of made-up prompts, those to warm up first; those of a file are taken to have nothing in common."""
    if settings["dataset"] not in (SYNTHETIC, SHARED_PREFIX):
        return [], [[] for _ in range(count)]
    asks = Asks(settings["dataset"], Lengths.parse(settings["input_len"], "input_len"),
                Lengths.parse(settings["output_len"], "output_len"), settings["prefixes"], settings["prefix_len"],
                settings["seed"])
    warm = [asks.next() for _ in range(settings["warmup"])]
    made = [asks.next(one.input_len, one.output_len) for one in trace] or [asks.next() for _ in range(count)]
    first, then = ([list(tokenize(one.content["prompt"])) for one in some] for some in (warm, made))
    return first, then


def compare(path: str | Path, found: Figures) -> list[Beside]:
    """Throughput and latencies of its first level beside those of a fleet."""
    document = _read(path)
    name = document["levels"][0]["name"]
    measured = {row["case"].removeprefix(f"{name}_"): row["paceline"] for row in document["rows"]}
    simulated = {"request_rate": ("req/s", found.request_rate), "output_rate": ("tok/s", found.output_rate),
                 **{f"{what}_p{share}": ("ms", 1e3 * value) for what in ("ttft", "tpot", "e2e")
                    for share, value in getattr(found, what).items()},
                 "cache_hits": ("", found.hit_rate)}
    return [Beside(what, unit, measured[what], value) for what, (unit, value) in simulated.items()
            if measured.get(what) is not None]


def _read(path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["measured"] != "server" or not found["levels"] or not found["levels"][0]["samples"]:
            raise ValueError("no load test")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what `paceline bench serve --json FILE` writes ({type(error).__name__}: "
                          f"{error}): name such a file.") from None
    result: dict[str, Any] = found
    return result
