"""Does anybody wait for somebody else? The gaps between the tokens of one stream while others ask for dear things."""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, percentile, say
from paceline.bench.serving.exchange import Exchange, encode, read
from paceline.bench.serving.own_server import server
from paceline.errors import ConfigError, PacelineError
from paceline.serve.limits import ClientLimits

NEIGHBOUR = {"prompt": "Once upon a time, in a village by the sea,", "stream": True, "temperature": 0.0,
             "max_tokens": 1500, "ignore_eos": True}
SETTLED = 12
"""Tokens of the neighbour before anybody else comes."""
ALONE_S = 3.0
AFTER_S = 0.5
"""Seconds of the neighbour alone, and after each trouble."""
WORDS = ("the", "of", "and", "sea", "ship", "captain", "water", "long", "night", "harbour", "wind", "story", "old",
         "which", "they", "had", "never", "seen", "before", "island", "morning", "with", "gold", "letters", "on")
ALLOWED = ClientLimits()
"""By a server that was told nothing about it."""
RAISED = ClientLimits(max_n=128, max_beams=64, max_draft_tokens=1024)
"""By one whose operator trusts its clients."""


@dataclass(frozen=True)
class Trouble:
    """What somebody else asks for."""

    name: str
    body: dict[str, Any]


def prose(words: int, seed: int) -> str:
    """Words in no order, the same for the same seed: a prompt that no cache knows."""
    luck = random.Random(seed)
    return " ".join(luck.choice(WORDS) for _ in range(words))


def troubles(most: ClientLimits = ALLOWED) -> list[Trouble]:
    """Prompts of three lengths, and what single clients have stalled servers with: as much of it as a server allows,
    and some that it refuses."""
    short = {"prompt": "The capital of France is", "max_tokens": 32}
    return [
        *(Trouble(f"a prompt of about {words} tokens", {"prompt": prose(words, words), "max_tokens": 8})
          for words in (500, 2000, 6000)),
        Trouble("a prompt of 7 MB", {"prompt": "word " * 1_468_000, "max_tokens": 8}),
        Trouble(f"4,000 equal tokens, n = {most.max_n}", {"prompt": " the" * 4000, "max_tokens": 4, "n": most.max_n}),
        Trouble("prose, n = 8", {"prompt": prose(7000, 1), "max_tokens": 8, "n": 8}),
        Trouble(f"n = {most.max_n} with {most.max_logprobs} log-probabilities", short | {
            "n": most.max_n, "logprobs": most.max_logprobs, "temperature": 1.0}),
        Trouble(f"{most.max_beams} beams", short | {"use_beam_search": True, "n": 1, "best_of": most.max_beams}),
        Trouble("a regular expression of many repetitions", short | {"structured_outputs": {
            "regex": "(a|b|c|d|e|f|g){1,500}[0-9]{1,500}"}}),
        Trouble(f"drafts of {most.max_draft_tokens} tokens", short | {"speculation": {
            "method": "ngram", "k": most.max_draft_tokens, "nodes": most.max_draft_tokens, "adaptive": False},
            "prompt": "one two " * 100}),
        Trouble("no_repeat_ngram_size of 100,000", short | {"no_repeat_ngram_size": 100_000}),
        Trouble("a million stop_token_ids", short | {"stop_token_ids": list(range(40_000)) * 25}),
    ]


def gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Between tokens of which the later one came after `begin` and the earlier one before `end`."""
    return [later - sooner for sooner, later in pairwise(times) if later > begin and sooner < end]


async def _sent(host: str, port: int, request: bytes) -> Exchange:
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(lambda: Exchange(request), host, port)
    return made


def _times(made: Exchange) -> list[float]:
    return [when for when, data in made.pieces if b'"choices":[{' in data]


async def beside(host: str, port: int, trouble: Trouble | None, patience: float) -> tuple[list[float], str]:
    """The neighbour's gaps while that is served (None: alone for a while), and what became of it."""
    loop = asyncio.get_running_loop()
    asked = b"" if trouble is None else encode(host, trouble.body)  # now: who writes it cannot listen meanwhile
    stream = await _sent(host, port, encode(host, NEIGHBOUR))
    while len(_times(stream)) < SETTLED:
        if stream.done.done():
            raise PacelineError(f"The neighbour was not served: {read(stream)['error']}")
        await asyncio.sleep(0.01)
    begin = _times(stream)[-1]
    outcome = ""
    if trouble is None:
        await asyncio.sleep(ALONE_S)
    else:
        made = await _sent(host, port, asked)
        begin, clock = made.started, loop.time()
        await asyncio.wait([made.done, stream.done], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        status = read(made)["status"]
        outcome = f"status {status} " if status else "no answer yet "
        outcome += f"after {loop.time() - clock:.1f} s"
        await asyncio.sleep(AFTER_S)
        made.end()
    stream.end()
    times = _times(stream)
    return gaps(times, begin, times[-1]), outcome


def run(model: str | None = None, speculation: str = "auto", only: str = "", patience: float = 60.0,
        raised: bool = False) -> dict[str, Any]:
    """`only`: troubles whose names have this in them. `raised`: with a server that allows more."""
    limits = RAISED if raised else ALLOWED
    known = troubles(limits)
    chosen: list[Trouble | None] = [None, *(one for one in known if only.lower() in one.name.lower())]
    if len(chosen) == 1:
        raise ConfigError(f"No trouble is called {only!r}; there are: {', '.join(one.name for one in known)}.")
    rows = []
    words = [str(word) for name in ("max_n", "max_beams", "max_draft_tokens")
             for word in (f"--{name.replace('_', '-')}", getattr(limits, name))]
    with server(model, speculation, words) as (host, port, _):
        asyncio.run(beside(host, port, None, patience))  # the first request of a server pays for much
        for trouble in chosen:
            name = "alone" if trouble is None else trouble.name
            found, outcome = asyncio.run(beside(host, port, trouble, patience))
            milliseconds = [1e3 * gap for gap in found]
            p50, p99, most = (percentile(milliseconds, share) for share in (0.5, 0.99, 1.0))
            say(f"gaps: {name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms; {outcome or 'nobody else'}")
            rows += [Row(f"{name}: {label}", "ms", value, higher_is_better=False, note=note)
                     for label, value, note in (("p50", p50, ""), ("p99", p99, ""), ("max", most, outcome))]
    return document(rows, model=model or "default", speculation=speculation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.gaps", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--only", default="", help="troubles whose names have this in them")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for each trouble")
    parser.add_argument("--raised", action="store_true", help="with a server that allows more")
    json_argument(parser)
    given = parser.parse_args()
    emit(run(given.model, given.speculation, given.only, given.patience, given.raised), given.json)


if __name__ == "__main__":
    main()
