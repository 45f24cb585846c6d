"""A soak: the real server under mixed traffic of all it offers, with clients that leave, and nothing may be amiss.

Every answer is compared with what the same request gets offline, or got before. The server's memory, threads and files
are counted meanwhile; when all have left nothing may be running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, percentile, say
from paceline.bench.serving.own_server import scrape, server
from paceline.bench.soak_client import Answer, Manner, send
from paceline.bench.soak_process import Look, growth, leaks, look_at, part_growth, trend
from paceline.bench.soak_traffic import CHAT, COMPLETIONS, MALFORMED, SPECULATION, TOKENIZE, TOOL, Ask, asks
from paceline.errors import PacelineError
from paceline.llm import LLM

KEYS = 3
DIFFERENT = 96
"""Requests that are asked again and again."""
MANNERS = {Manner.PATIENT: 0.72, Manner.LEAVES: 0.14, Manner.SLOW: 0.06, Manner.UNFINISHED: 0.04, Manner.DEAF: 0.04}
ALLOWED = ("--max-priority", "1", *(word for method in ("default", "exit", "skip") for word in
                                   ("--allow-speculation", method)))
"""What the traffic asks for beyond what a server allows by itself."""
EVERY = 1.0
"""Seconds between two looks at the server's process and its metrics."""
SETTLES = 60.0
"""Seconds within which a server that nobody asks any more comes to rest."""


@dataclass
class Seen:
    """All that came of the traffic."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    """By what was asked: every answer (its texts as JSON), how often."""
    asked: dict[str, Ask] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Errors that nobody asked for."""
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


class Traffic:
    """Clients of one server, until the time is up."""

    def __init__(self, host: str, port: int, process: int, keys: Sequence[str], operator: str, pool: list[Ask],
                 seed: int) -> None:
        self.seen = Seen()
        self._host, self._port = host, port
        self._process = process
        self._keys = keys
        self._operator = operator
        self._pool = pool
        self._seed = seed
        self._methods: list[Any] = list(SPECULATION)
        self._patience = 1.0
        """Seconds within which those who leave do: what answers take."""

    async def run(self, clients: int, seconds: float) -> None:
        await self._find_out()
        end = time.perf_counter() + seconds
        tasks = [asyncio.create_task(self._client(number, end)) for number in range(clients)]
        watching = asyncio.create_task(self._watch(end))
        try:
            await asyncio.gather(*tasks)
        finally:
            watching.cancel()
        await self._rest()

    async def _find_out(self) -> None:
        """Leave out what this model cannot do: drafting with heads it has not, tools its template does not know."""
        luck = random.Random(self._seed)
        body = {"prompt": "one two one two", "max_tokens": 2, "temperature": 0.0}
        for method in list(self._methods):
            answer = await self._post(COMPLETIONS, body | {"speculation": method}, luck)
            if answer.status == 400:
                self._methods.remove(method)
        messages = [{"role": "user", "content": "Hello."}]
        answer = await self._post(CHAT, {"messages": messages, "tools": [TOOL], "tool_choice": "required",
                                         "max_tokens": 60}, luck)
        if answer.status == 400:
            self._pool = [ask for ask in self._pool if ask.kind != "tools"]
        left_out = [json.dumps(method) for method in SPECULATION if method not in self._methods]
        say(f"soak: {len(self._pool)} different requests, {len(self._methods)} ways to decode"
            + (f"; not here: {', '.join(left_out)}" if left_out else ""))

    async def _post(self, path: str, body: Any, luck: random.Random, manner: Manner = Manner.PATIENT,
                    content: bytes | None = None) -> Answer:
        raw = json.dumps(body).encode() if content is None else content
        return await send(self._host, self._port, path, raw, luck.choice(self._keys) if self._keys else None, manner,
                          luck, self._patience)

    async def _client(self, number: int, end: float) -> None:
        luck = random.Random(f"{self._seed} {number}")
        while time.perf_counter() < end:
            try:
                await self._turn(luck)
            except (ConnectionError, ValueError, KeyError) as problem:
                self.seen.problems.append(f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(0.1)

    async def _turn(self, luck: random.Random) -> None:
        seen, chance = self.seen, luck.random()
        if chance < 0.05:
            path, content = luck.choice(MALFORMED)
            answer = await self._post(path, None, luck, content=content)
            seen.kinds["malformed"] += 1
            if not 400 <= answer.status < 500:
                seen.problems.append(f"{path} {content[:80]!r} got status {answer.status}: {answer.error}")
            return
        if chance < 0.08:
            answer = await self._post(TOKENIZE, {"prompt": luck.choice(["Hello, world", "日本語", "x" * 3000])}, luck)
            seen.kinds["tokenize"] += 1
            if answer.status != 200:
                seen.problems.append(f"/tokenize got status {answer.status}: {answer.error}")
            return
        ask = luck.choice(self._pool)
        manner = luck.choices(list(MANNERS), list(MANNERS.values()))[0]
        answer = await self._post(ask.path, ask.body | self._circumstances(ask, luck), luck, manner)
        self._judge(ask, manner, answer)

    def _circumstances(self, ask: Ask, luck: random.Random) -> dict[str, Any]:
        """What must not show in an answer."""
        found: dict[str, Any] = {"stream": ask.streams and luck.random() < 0.6, "priority": luck.choice([0, 0, 1, -1])}
        if ask.kind != "beams":
            found["speculation"] = luck.choice(self._methods)
        if luck.random() < 0.2:
            found["cache_salt"] = luck.choice(["salt", "other"])
        return found

    def _judge(self, ask: Ask, manner: Manner, answer: Answer) -> None:
        seen = self.seen
        seen.kinds[ask.kind] += 1
        if manner is not Manner.PATIENT:
            seen.faults[manner.value] += 1
        if manner in (Manner.UNFINISHED, Manner.DEAF) or (manner is Manner.LEAVES and not answer.whole):
            return
        if answer.status != 200 or answer.error is not None or not answer.whole:
            seen.problems.append(f"{ask.kind} got status {answer.status}"
                                 f"{'' if answer.whole else ' and no end'}: {answer.error}")
            return
        seen.asked[ask.key] = ask
        seen.answers.setdefault(ask.key, Counter())[json.dumps(answer.texts)] += 1
        if manner is Manner.PATIENT:
            seen.wholes.append(answer.seconds)
            if answer.first is not None:
                seen.firsts.append(answer.first)
            self._patience = 0.95 * self._patience + 0.05 * min(answer.seconds, 5.0)

    async def _watch(self, end: float) -> None:
        while time.perf_counter() < end:
            await self._look()
            await asyncio.sleep(EVERY)

    async def _look(self) -> dict[str, float]:
        found = await asyncio.to_thread(scrape, f"http://{self._host}:{self._port}", self._operator)
        self.seen.looks.append(look_at(self._process, time.perf_counter(), found))
        for name, value in found.items():
            if not math.isfinite(value):
                self.seen.problems.append(f"/metrics: {name} is {value}")
            if name.split("{")[0].endswith(("_total", "_count", "_bucket")):
                if value < self.seen.counters.get(name, 0.0):
                    self.seen.problems.append(f"/metrics: {name} went from {self.seen.counters[name]} to {value}")
                self.seen.counters[name] = value
        return found

    async def _rest(self) -> None:
        """Nobody asks any more: within a while nothing runs, waits or holds a block."""
        busy: dict[str, float] = {}
        end = time.perf_counter() + SETTLES
        while time.perf_counter() < end:
            found = await self._look()
            busy = {name: value for name, value in found.items() if value and name in (
                "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")}
            if not busy:
                return
            await asyncio.sleep(0.2)
        self.seen.problems.append(f"when all had left there was still: {busy}")


def differences(seen: Seen, llm: LLM) -> list[str]:
    """Requests that were answered otherwise than offline, or in more than one way."""
    found = []
    known = [ask for ask in seen.asked.values() if ask.params is not None]
    say(f"soak: asking {len(known)} of {len(seen.asked)} different requests offline")
    for ask in seen.asked.values():
        answers = seen.answers[ask.key]
        expected = offline(ask, llm)
        wrong = len(answers) > 1 if expected is None else set(answers) != {json.dumps(expected)}
        if wrong:
            found.append(f"{ask.kind} {json.dumps(ask.body)[:200]}: expected {json.dumps(expected)}, got "
                         f"{dict(answers)}")
    return found


def offline(ask: Ask, llm: LLM) -> list[str] | None:
    """The texts of the same request without a server, decoded plainly; None: there is no such request."""
    if ask.params is None:
        return None
    if ask.messages:
        outs = llm.chat(list(ask.messages), ask.params, speculation=None, adapter=ask.adapter)
    else:
        outs = llm.generate(ask.prompts, ask.params, speculation=None, adapter=ask.adapter)
    texts = [one.text for out in outs for one in out.outputs]
    return [ask.prompts[0] + text for text in texts] if ask.body.get("echo") else texts


def run(model: str | None = None, minutes: float = 20.0, clients: int = 12, seed: int = 0,
        speculation: str = "auto", adapters: dict[str, str] | None = None) -> dict[str, Any]:
    keys, operator = [secrets.token_hex(8) for _ in range(KEYS)], secrets.token_hex(8)
    pool = asks(DIFFERENT, seed, tuple(adapters or ()))
    lora = [word for name, folder in (adapters or {}).items() for word in ("--lora", f"{name}={folder}")]
    started = time.perf_counter()
    with server(model, speculation, ["--deterministic", "--stall-timeout", "5", *ALLOWED, *lora], {
            "PACELINE_API_KEY": ",".join(keys), "PACELINE_OPERATOR_KEY": operator}) as (host, port, process):
        traffic = Traffic(host, port, process.pid, keys, operator, pool, seed)
        say(f"soak: {clients} clients for {minutes:g} minutes, seed {seed}")
        asyncio.run(traffic.run(clients, 60.0 * minutes))
        if process.poll() is not None:
            raise PacelineError(f"The server ended by itself, with status {process.returncode}.")
    seen = traffic.seen
    wrong = differences(seen, LLM(model, deterministic=True, adapters=adapters))
    grown = leaks(seen.looks)
    for name, problems in (("differs", wrong), ("error", seen.problems), ("leak", grown)):
        for problem in problems[:20]:
            say(f"soak: {name}: {problem}")
    rows = _rows(seen, wrong, grown, time.perf_counter() - started)
    return document(rows, model=model or "default", minutes=minutes, clients=clients, seed=seed,
                    speculation=speculation) | {
        "differences": len(wrong), "errors": len(seen.problems), "leaks": len(grown)}


def _rows(seen: Seen, wrong: list[str], grown: list[str], seconds: float) -> list[Row]:
    def lower(case: str, unit: str, value: float, note: str = "") -> Row:
        return Row(case, unit, value, higher_is_better=False, note=note)

    def first(problems: list[str]) -> str:
        return problems[0][:300] if problems else ""

    last = seen.looks[-1] if seen.looks else Look(0.0)
    return [
        Row("requests", "requests", sum(seen.kinds.values()), note=f"in {seconds:.0f} s, comparing included"),
        *(Row(f"of kind {kind}", "requests", count) for kind, count in sorted(seen.kinds.items())),
        *(Row(f"clients that were {name}", "requests", count) for name, count in sorted(seen.faults.items())),
        Row("compared", "answers", sum(sum(one.values()) for one in seen.answers.values()),
            note=f"of {len(seen.answers)} different requests"),
        lower("differences", "requests", len(wrong), first(wrong)),
        lower("unexpected errors", "errors", len(seen.problems), first(seen.problems)),
        lower("leaks", "leaks", len(grown), first(grown)),
        *_memory_rows(seen.looks),
        lower("threads at rest", "threads", last.threads), lower("files at rest", "files", last.files),
        *(lower(f"first token p{share}", "ms", 1e3 * percentile(seen.firsts, share / 100)) for share in (50, 99)),
        *(lower(f"whole answer p{share}", "ms", 1e3 * percentile(seen.wholes, share / 100)) for share in (50, 99))]


def _memory_rows(looks: list[Look]) -> list[Row]:
    """What there is at rest, and how each grew over the last half of the run."""
    last, grown = looks[-1] if looks else Look(0.0), growth(looks)
    known = math.isfinite(grown.margin)
    rows = [Row("memory growth", "MiB a minute", grown.slope / 2**20, higher_is_better=False,
                note=f"the cache apart {grown.told()} over the last half",
                interval=(grown.least / 2**20, (grown.slope + grown.margin) / 2**20) if known else None),
            Row("memory at rest", "MiB", last.rss / 2**20, higher_is_better=False)]
    for part, own in part_growth(looks).items():
        rows.append(Row(f"memory at rest: {part}", "MiB", last.parts[part] / 2**20, higher_is_better=False,
                        note=own.told()))
    objects = trend(looks, lambda look: look.objects)
    return [*rows, Row("Python objects at rest", "objects", last.objects, higher_is_better=False,
                       note=objects.told(1, ""))]


def failed(result: dict[str, Any]) -> bool:
    """Whether anything was amiss."""
    return any(result[name] for name in ("differences", "errors", "leaks"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.soak", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculation", default="auto")
    json_argument(parser)
    given = parser.parse_args()
    result = run(given.model, given.minutes, given.clients, given.seed, given.speculation)
    emit(result, given.json)
    raise SystemExit(failed(result))


if __name__ == "__main__":
    main()
