"""Two servers beside each other: they take turns at the same requests, so that a machine's drift is both's.

Every turn has prompts of its own, which each server gets once, with the same parameters at the same times; who comes
first changes from turn to turn, so an even number of turns has both orders equally often.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any

from paceline.bench.report import Row, document, say
from paceline.bench.serving.arrivals import Level
from paceline.bench.serving.datasets import Ask, Asks
from paceline.bench.serving.figures import Run, of_tokens, rows
from paceline.bench.serving.load_test import LoadTest, once, plan_of, tell, warm_up
from paceline.bench.serving.paired import Pair, paired
from paceline.bench.serving.target import Target
from paceline.errors import ConfigError, PacelineError

SIDES = ("a", "b")
TURNS = 6
REST = 2.0
"""Seconds that nobody asks before either's part: a server may have work left when it has answered (ours shadows some
requests then), which would take from the other one."""
TRIES = 100
"""At a made-up prompt that has not come yet."""
SHOWN, SHOWN_AFTER = 80, 40
"""Characters of a prompt, and of two texts from where they part."""


@dataclass(frozen=True)
class Turn:
    """A slice, and what came of it. `runs` and `figures` are by side."""

    level: Level
    number: int
    order: tuple[str, ...]
    bodies: Sequence[dict[str, Any]]
    runs: dict[str, Run]
    figures: dict[str, list[Row]]

    @property
    def title(self) -> str:
        return f"{self.level.name}, turn {self.number}"

    @property
    def pair(self) -> Pair:
        return Pair(self.figures["a"], self.figures["b"], self.order[0] == "a", self.answered)

    @property
    def answered(self) -> bool:
        """Whether both have answered something."""
        return all(run.answered for run in self.runs.values())

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Both servers' texts of what both have answered."""
        return [(a, b) for a, b in zip(self.runs["a"].texts, self.runs["b"].texts) if a is not None and b is not None]

    @property
    def equal(self) -> int:
        return sum(a == b for a, b in self.texts)

    def difference(self) -> dict[str, Any] | None:
        """The first one, if there is any."""
        for body, a, b in zip(self.bodies, self.runs["a"].texts, self.runs["b"].texts):
            if a is not None and b is not None and a != b:
                at = next((place for place, (one, other) in enumerate(zip(a, b)) if one != other),
                          min(len(a), len(b)))
                return {"level": self.level.name, "turn": self.number, "prompt": _short(_prompt(body)), "at": at,
                        "a": a[at:at + SHOWN_AFTER], "b": b[at:at + SHOWN_AFTER]}
        return None


def pair_of(url: str, beside: str, api_key: str | None, model: str | None) -> dict[str, Target]:
    """Both servers, which are there, are two, and serve the same."""
    targets = {"a": Target.parse(url, api_key), "b": Target.parse(beside, api_key, "--beside")}
    if targets["a"].place == targets["b"].place:
        raise ConfigError(f"--url and --beside are the same server, {targets['a'].base}: give two addresses.")
    found = {side: target.served(model) for side, target in targets.items()}
    if found["a"].model != found["b"].model:
        raise ConfigError(f"{found['a'].base} serves {found['a'].model!r} and {found['b'].base} "
                          f"{found['b'].model!r}: start both with the same model under the same name, or say with "
                          "--model which one both have.")
    return found


def run(targets: dict[str, Target], test: LoadTest, turns: int, rest: float,
        settings: dict[str, Any]) -> dict[str, Any]:
    """The bench document of both (by SIDES): rows of paired figures, texts, turns."""
    luck = random.Random(f"{test.seed} arrivals")
    slices, warm = cut(test, turns)
    for target in targets.values():
        warm_up(target, test, warm)
    found: list[dict[str, Any]] = []
    done: list[Turn] = []
    for level in test.levels:
        own: list[Turn] = []
        for number in range(1, turns + 1):
            plan = plan_of(level, test, slices.pop(0), targets["a"].model, luck)
            own.append(take(targets, level, test, plan, number, rest, must_answer=not done and not own))
        found += paired([turn.pair for turn in own], test.seed)
        done += own
    return document([], **settings, turns=turns, rest=rest, server_model=targets["a"].model) | {
        "measured": "two servers", "servers": {side: target.base for side, target in targets.items()}, "rows": found,
        "texts": compared(done), "turns": [described(turn) for turn in done]}


def cut(test: LoadTest, turns: int) -> tuple[list[list[Ask]], list[Ask]]:
    """A slice for each turn of each level, and what warms the servers up: no prompt comes twice."""
    size, count = len(test.lengths), turns * len(test.levels)
    needed = size * count
    found = _fresh(test.asks, [*test.lengths * count, *[(None, None)] * test.warmup])
    if len(found) < needed + test.warmup:
        further, way_out = (f" and {test.warmup} to warm up with", ", or say --warmup 0") if test.warmup else ("", "")
        raise ConfigError(f"{turns} turns of {size} requests (levels: {len(test.levels)}) need {needed} prompts that "
                          f"come once{further}, and the dataset has {len(found)}: give a larger one, lower --turns or "
                          f"--requests{way_out}.")
    return [found[place:place + size] for place in range(0, needed, size)], found[needed:]


def _fresh(asks: Asks, lengths: Sequence[tuple[int | None, int | None]]) -> list[Ask]:
    """One for each of the lengths, no two the same; fewer where there are no more."""
    seen: set[str] = set()
    found = []
    for one in lengths:
        drawn = (asks.next(*one) for _ in range(asks.size or TRIES))
        ask = next((ask for ask in drawn if _content(ask) not in seen), None)
        if ask is None:
            break
        seen.add(_content(ask))
        found.append(ask)
    return found


def _content(ask: Ask) -> str:
    return json.dumps(ask.content, sort_keys=True)


def take(targets: dict[str, Target], level: Level, test: LoadTest, plan: dict[str, Any], number: int,
         rest: float, must_answer: bool) -> Turn:
    """The same plan to both, one after the other. Where they must answer, whoever answers nothing ends it all."""
    turn = Turn(level, number, SIDES if number % 2 else SIDES[::-1], plan["bodies"], {}, {})
    for side in turn.order:
        title, target = f"{turn.title}, {side.upper()}", targets[side]
        sleep(rest)
        seen = turn.runs[side] = once(target, test, plan, title)
        if must_answer and not seen.answered:
            raise PacelineError(f"{target.base} answered no request of turn {number} ({_faults(seen)}): see whether it "
                                "is well, or offer it less.")
        found = rows(level, [seen], test.slo, test.percentiles, test.seed)
        tell(title, level, found)
        turn.figures[side] = [row for row in found if not (
            seen.uncounted and of_tokens(row.case.removeprefix(f"{level.name}_"), test.slo))]
    ratio = next((f"{row['ratio']['value']:.3f}x" for row in paired([turn.pair], test.seed)
                  if row["case"] == f"{level.name}_output_rate" and row["ratio"]), "-")
    say(f"serve: {turn.title}: A / B {ratio} tok/s, {turn.equal} of {len(turn.texts)} texts equal")
    return turn


def _faults(seen: Run) -> str:
    return "; ".join(f"{kind}: {text}" for kind, text in seen.messages.items())


def compared(turns: Sequence[Turn]) -> dict[str, Any]:
    """How many texts are the same, of those that both have written."""
    of = sum(len(turn.texts) for turn in turns)
    return {"equal": sum(turn.equal for turn in turns), "of": of,
            "unanswered": sum(len(turn.bodies) for turn in turns) - of,
            "first_difference": next((found for turn in turns if (found := turn.difference())), None)}


def described(turn: Turn) -> dict[str, Any]:
    return {"level": turn.level.name, "turn": turn.number, "order": list(turn.order), "requests": len(turn.bodies),
            "texts_equal": turn.equal, "texts": len(turn.texts),
            "elapsed_s": {side: run.elapsed_s for side, run in turn.runs.items()},
            "uncounted": {side: run.uncounted for side, run in turn.runs.items()},
            "faults": {side: run.messages for side, run in turn.runs.items() if run.messages}}


def _prompt(body: dict[str, Any]) -> str:
    """What a user sees of it: the prompt, or what was said last."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1].get("content"))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
