"""A load test of a real server (`paceline bench serve --json`): asked again of a simulated fleet, and set beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.serving.arrivals import Arrival, read_trace
from paceline.bench.serving.datasets import SHARED_PREFIX, SYNTHETIC, Asks, Lengths
from paceline.bench.serving.load_test import WARM_UP_CLIENTS
from paceline.errors import ConfigError
from paceline.models.fields import finite, shown
from paceline.plan.simulate.figures import Figures
from paceline.plan.simulate.traffic import Asked, Tokenize, words

WARM_UP_S = 60.0
"""Between two lots of requests that warm a fleet up."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure, measured and simulated."""

    what: str
    unit: str
    measured: float
    simulated: float

    @property
    def error(self) -> float | None:
        """Share by which the simulation is too high; None: nothing was measured, and something is simulated."""
        if not self.measured:
            return None if self.simulated else 0.0
        return self.simulated / self.measured - 1.0


def is_load_test(path: str | Path) -> bool:
    return str(path).endswith(".json") and Path(path).is_file()


def asked_again(path: str | Path, tokenize: Tokenize = words) -> list[Asked]:
    """The requests of its first level and run: when they came, how long prompts and answers were by the server's
    count, and what they had in common, since made-up prompts are the same again by their seed. What failed is left
    out."""
    document = _read(path)
    with _reading(path):
        found = _requests(document, tokenize)
    if not found or not all(one.prompt_tokens for one in found):
        raise ConfigError(f"{path} has no requests with their lengths: run it with --usage, and with requests that are "
                          "answered.")
    return found


def _requests(document: dict[str, Any], tokenize: Tokenize) -> list[Asked]:
    """Those that warmed it up come before, as many at once as then."""
    settings, level = document["settings"], document["levels"][0]
    trace = read_trace(settings["trace"], settings["time_scale"]) if settings["trace"] else []
    samples = [dict(zip(level["samples_are"], one)) for one in level["samples"]][:len(trace) or settings["requests"]]
    warm, texts = _texts(settings, trace, len(samples), tokenize)
    found = []
    for one, text in zip(samples, texts):
        if one["fault"] is None and one["tokens"]:
            length, at = one["prompt_tokens"] or len(text), finite(one["start_ms"])
            if at is None or at < 0.0 or type(length) is not int or type(one["tokens"]) is not int:
                raise ValueError(f"a request at {shown(one['start_ms'])} ms of {shown(length)} and "
                                 f"{shown(one['tokens'])} tokens")
            found.append(Asked(1e-3 * at, length, one["tokens"], given=tuple(text[:length])))
    found.sort(key=lambda one: one.at)
    lots = -(-len(warm) // WARM_UP_CLIENTS)
    before = [Asked(WARM_UP_S * (place // WARM_UP_CLIENTS - lots), len(text), most, given=tuple(text))
              for place, (text, most) in enumerate(warm) if found]
    return [*before, *found]


def _texts(settings: dict[str, Any], trace: Sequence[Arrival], count: int, tokenize: Tokenize,
           ) -> tuple[list[tuple[list[int], int]], list[list[int]]]:
    """Of made-up prompts, those to warm up first, with the tokens that those asked for; those of a file are taken to
    have nothing in common."""
    if settings["dataset"] not in (SYNTHETIC, SHARED_PREFIX):
        return [], [[] for _ in range(count)]
    asks = Asks(settings["dataset"], Lengths.parse(settings["input_len"], "input_len"),
                Lengths.parse(settings["output_len"], "output_len"), settings["prefixes"], settings["prefix_len"],
                settings["seed"])
    warm = [asks.next() for _ in range(settings["warmup"])]
    made = [asks.next(one.input_len, one.output_len) for one in trace] or [asks.next() for _ in range(count)]
    return ([(list(tokenize(one.content["prompt"])), one.max_tokens) for one in warm],
            [list(tokenize(one.content["prompt"])) for one in made])


def compare(path: str | Path, found: Figures) -> list[Beside]:
    """Throughput and latencies of its first level beside those of a fleet."""
    document = _read(path)
    with _reading(path):
        name = document["levels"][0]["name"]
        measured = {row["case"].removeprefix(f"{name}_"): finite(row["paceline"]) for row in document["rows"]}
    simulated = {"request_rate": ("req/s", found.request_rate), "output_rate": ("tok/s", found.output_rate),
                 **{f"{what}_p{share}": ("ms", 1e3 * value) for what in ("ttft", "tpot", "e2e")
                    for share, value in getattr(found, what).items()},
                 "cache_hits": ("", found.hit_rate)}
    return [Beside(what, unit, known, value) for what, (unit, value) in simulated.items()
            if (known := measured.get(what)) is not None]


def _read(path: str | Path) -> dict[str, Any]:
    with _reading(path):
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["measured"] != "server" or not found["levels"] or not found["levels"][0]["samples"]:
            raise ValueError("no load test")
        return found


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Whatever comes of reading something else as a load test is told as that."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what `paceline bench serve --json FILE` writes ({type(error).__name__}: "
                          f"{error}): name such a file.") from None
