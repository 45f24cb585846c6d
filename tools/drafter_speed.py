"""Host cost of the drafters that look things up: microseconds a proposal, with a long text behind it."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.speculation import spec as speculations
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Observation
from paceline.speculation.suffix_library import SuffixLibrary, Volume

VOCABULARY = 49152
HISTORY = 4000
ROUNDS = 200
GOAL_US = 100.0
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "ngram"}, {"method": "suffix"}, {"method": "suffix", "tree": True}, {"method": "lookahead"})


class _Text:
    """A sequence whose tokens are known beforehand."""

    scope = ""
    rule = "coupled"
    seed = 1

    def __init__(self, tokens: list[int], prompt_len: int) -> None:
        self.tokens = tokens[:prompt_len]
        self.prompt_len = prompt_len
        self._rest = iter(tokens[prompt_len:])

    def grow(self) -> int:
        self.tokens.append(next(self._rest))
        return self.tokens[-1]


def texts() -> dict[str, Callable[[int], list[int]]]:
    """Three kinds of text by name: words as rare as in a language, passages that come back, one phrase for ever."""

    def words(count: int) -> list[int]:
        luck = random.Random(1)
        return [min(int(luck.paretovariate(0.6)), VOCABULARY - 1) for _ in range(count)]

    def passages(count: int) -> list[int]:
        luck, out = random.Random(2), words(count // 2)
        while len(out) < count:
            begin = luck.randrange(len(out) - 40)
            out += out[begin:begin + luck.randrange(5, 40)]
        return out[:count]

    return {"words": words, "passages": passages, "loop": lambda count: [10 + i % 7 for i in range(count)]}


def measure(wish: dict[str, Any], tokens: list[int], history: int) -> tuple[float, float, float]:
    """Median microseconds of (a proposal, an observation) with `history` tokens behind them, and of a prompt's token
    at the beginning."""
    drafter = _build(wish, tokens)
    budget = Budget(12, 64)
    text = _Text(tokens, history)
    begin = time.perf_counter()
    drafter.begin(text)
    started = (time.perf_counter() - begin) / history
    proposing, observing = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        drafter.propose([text], [budget])
        middle = time.perf_counter()
        token = text.grow()
        resumed = time.perf_counter()
        drafter.observe(text, Observation([token]))
        observing.append(time.perf_counter() - resumed)
        proposing.append(middle - begin)
    drafter.release(text)
    return statistics.median(proposing) * 1e6, statistics.median(observing) * 1e6, started * 1e6


def _build(wish: dict[str, Any], tokens: list[int]) -> Drafter:
    """The drafter, and where it learns from other requests, as many of them as it can hold."""
    parsed = speculations.parse(wish)
    if parsed is None:
        raise ValueError("a drafter to measure must be named")
    context = DraftContext(VOCABULARY)
    drafter = speculations.build(parsed, context)
    for library in context.shared.values():
        if isinstance(library, SuffixLibrary):
            luck = random.Random(3)
            while library.tokens < library.capacity * 0.9:
                begin = luck.randrange(len(tokens) // 2)
                library.add(Volume(_Text.scope), tokens[begin:])
                library.work(len(tokens))
    return drafter


def run(history: int = HISTORY) -> dict[str, Any]:
    found = []
    for kind, make in texts().items():
        tokens = make(history + ROUNDS)
        for wish in METHODS:
            name = wish["method"] + ("_tree" if wish.get("tree") else "")
            say(f"drafters: {name} on {kind}")
            proposal, observation, start = measure(wish, tokens, history)
            found.append(Row(f"{name}_{kind}", "us/proposal", proposal, higher_is_better=False,
                             note=f"goal {GOAL_US:.0f} us; {observation:.0f} us to observe a token, {start:.1f} us "
                                  "for each of the prompt"))
    return document(found, history=history, rounds=ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/drafter_speed.py", description=__doc__)
    parser.add_argument("--history", type=int, default=HISTORY, help="tokens of the text before the first proposal")
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(arguments.history), arguments.json)


if __name__ == "__main__":
    main()
