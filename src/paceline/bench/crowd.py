"""Speculation as users of a server get it: so many requests at once, prompts that come once, every option as it is by
default; each method beside plain decoding, and how many of the texts are the same."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.bench.questions import read_questions
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.bench.spec import PLAIN, Contender, admit, contenders
from paceline.errors import ConfigError, PacelineError
from paceline.garbage import only_new_objects_are_collected
from paceline.llm import LLM
from paceline.request import RequestOutput, SamplingParams
from paceline.speculation.spec import heads_named

AT_ONCE = (1, 8, 32)
STRIDE = 0.618
"""Of the lengths there are, between neighbours: whatever their number, nearly all come about."""
LEAST, BATCHES = 48, 3
"""Prompts that are asked, at least, and batches of them."""


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's answers to the prompts, once."""

    rate: float
    """Tokens a second, prompts and all, while there were as many requests as there are to be."""
    texts: list[tuple[int, ...]]
    per_step: float
    """Tokens that a step gave a request that drafts; 1 where none did."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """All of one contender's."""

    all: tuple[Round, ...]

    @property
    def rate(self) -> float:
        """Of the median round: the fastest of some flatters whoever varies most."""
        return median(one.rate for one in self.all)

    @property
    def per_step(self) -> float:
        return fmean(one.per_step for one in self.all)

    def equal(self, texts: Sequence[tuple[int, ...]]) -> int:
        """How many of these it wrote every time."""
        return sum(all(one.texts[place] == text for one in self.all) for place, text in enumerate(texts))

    def beside(self, other: Rounds) -> str:
        """The slowest and the fastest beside the other's median."""
        rates = [one.rate / other.rate for one in self.all]
        return f"{min(rates):.2f}x to {max(rates):.2f}x"


def run(dataset: str | Path, model: str | None = None, methods: str = "ngram,auto", at_once: Sequence[int] = AT_ONCE,
        temperatures: Sequence[float] = (0.0,), max_tokens: int = 128, rounds: int = 3, longest: int = 6000,
        device: str = "auto", deterministic: bool | None = None, llm: LLM | None = None) -> dict[str, Any]:
    """The bench document, with the texts that differ counted in "differences". `longest`: characters of a prompt."""
    prompts = [question.turns[0] for question in read_questions(dataset) if len(question.turns[0]) <= longest]
    if len(prompts) < 2:
        raise ConfigError(f"{dataset} has no two prompts of up to {longest} characters: one warms up, one is asked.")
    random.Random(0).shuffle(prompts)
    wanted = contenders(methods)
    llm = llm or LLM(model, device=device, deterministic=deterministic, max_num_seqs=max(at_once), capture="start",
                     heads=heads_named([one.wish for one in wanted]))
    everyone = [Contender(PLAIN, None), *admit(llm, wanted, everyone=False)[0]]
    rows: list[Row] = []
    differences = 0
    for count in at_once:
        asked = min(max(LEAST, BATCHES * count), len(prompts) // 2)
        for temperature in temperatures:
            found = compare(llm, everyone, prompts[:asked], prompts[-asked:], count, rounds,
                            lambda salt, t=temperature: SamplingParams(  # type: ignore[misc]
                                max_tokens=max_tokens, temperature=t, seed=1, cache_salt=f"{salt} {t}"))
            plain = found.pop(PLAIN)
            for name, drafted in found.items():
                equal = drafted.equal(plain.all[0].texts)
                differences += asked - equal
                case = f"{name} {count}" + (f" t{temperature:g}" if temperature else "")
                rows.append(Row(case, "tok/s", drafted.rate, {PLAIN: plain.rate},
                                note=f"{equal} of {asked} texts equal, {drafted.per_step:.2f} tokens a step, rounds "
                                     f"{drafted.beside(plain)}, plain {plain.beside(plain)}"))
                say(f"crowd: {case}: {drafted.rate:.0f} tok/s beside {plain.rate:.0f}, {rows[-1].note}")
    return document(rows, model=model or "default", kernels=llm.engine.kernels.name, max_tokens=max_tokens,
                    deterministic=llm.engine.kernels.deterministic) | {"differences": differences}


def compare(llm: LLM, everyone: Sequence[Contender], warm: Sequence[str], asked: Sequence[str], at_once: int,
            rounds: int, params: Callable[[str], SamplingParams]) -> dict[str, Rounds]:
    """They take turns. Nobody finds what another or an earlier round has written, in another company either: the cache
    and what drafters remember are kept apart by a salt."""
    found: dict[str, list[Round]] = {one.name: [] for one in everyone}
    for one in everyone:
        ask(llm, warm, at_once, one, params(f"warm-up {one.name} {at_once}"))
    for turn in range(rounds):
        for one in everyone if turn % 2 == 0 else reversed(everyone):
            found[one.name].append(ask(llm, asked, at_once, one, params(f"{one.name} {at_once} {turn}")))
    return {name: Rounds(tuple(own)) for name, own in found.items()}


def ask(llm: LLM, prompts: Sequence[str], at_once: int, one: Contender, params: SamplingParams) -> Round:
    """So many at once, the next one when one of them is answered. Raises the error of a prompt that has one."""
    # Templates and tokens beforehand: a server makes them beside the engine, and they take as long whoever drafts.
    read = [text if llm.engine.chat is None else llm.render([{"role": "user", "content": text}]) for text in prompts]
    with only_new_objects_are_collected():
        return _asked(_Crowd(llm, one, params), read, at_once)


def _asked(crowd: _Crowd, prompts: Sequence[list[int] | str], at_once: int) -> Round:
    started = time.perf_counter()
    for prompt in prompts:
        while len(crowd.places) >= at_once:
            crowd.advance()
        crowd.add(prompt)
    if len(prompts) <= at_once:
        crowd.finish()
    # How the last ones end, with ever fewer beside them, says nothing of a server.
    taken, written = time.perf_counter() - started, crowd.written()
    crowd.finish()
    for out in crowd.outs:
        if out.error is not None:
            raise out.error
    stats = [out.speculation.tokens_per_step for out in crowd.outs if out.speculation is not None]
    return Round(written / taken, [tuple(out.outputs[0].token_ids) for out in crowd.outs],
                 sum(stats) / len(stats) if stats else 1.0)


def length(place: int, most: int | None) -> int | None:
    """Tokens that the answer to one of many prompts may have, half to all of `most`: where all had as many, those who
    began together would end together, and their successors' prompts come in one step, as they do nowhere."""
    return most if most is None else most - int(place * STRIDE % 1.0 * (most // 2 + 1))


class _Crowd:
    """Requests under way, and what those were told that are not."""

    def __init__(self, llm: LLM, one: Contender, params: SamplingParams) -> None:
        self._llm, self._one, self._params = llm, one, params
        self.places: dict[str, int] = {}
        """Of those under way, among all."""
        self._answers: dict[int, RequestOutput] = {}
        self._ended = 0
        """Tokens of those who are not."""

    @property
    def outs(self) -> list[RequestOutput]:
        return [self._answers[place] for place in sorted(self._answers)]

    def add(self, prompt: list[int] | str) -> None:
        engine = self._llm.engine
        place = len(self.places) + len(self._answers)
        params = replace(self._params, max_tokens=length(place, self._params.max_tokens))
        self.places[engine.add(prompt, params, speculation=self._one.wish)] = place

    def advance(self) -> None:
        engine = self._llm.engine
        for record in engine.step():
            if record.open == 0 and record.request.id in self.places:
                self._answers[self.places.pop(record.request.id)] = engine.take(record.request.id).snapshot()
                self._ended += record.metrics.output_tokens

    def finish(self) -> None:
        while self.places:
            self.advance()

    def written(self) -> int:
        engine = self._llm.engine
        return self._ended + sum(engine.record(request).metrics.output_tokens for request in self.places)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.crowd", description=__doc__)
    parser.add_argument("--dataset", required=True, help="a JSON object a line: question_id, category, turns")
    parser.add_argument("--model", default=None)
    parser.add_argument("--methods", default="ngram,auto")
    parser.add_argument("--at-once", default=",".join(map(str, AT_ONCE)))
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=6000, help="characters of a prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=None)
    json_argument(parser)
    given = parser.parse_args()
    try:
        emit(run(given.dataset, given.model, given.methods, tuple(map(int, given.at_once.split(","))),
                 tuple(map(float, given.temperatures.split(","))), given.max_tokens, given.rounds, given.longest,
                 given.device, given.deterministic), given.json)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None


if __name__ == "__main__":
    main()
