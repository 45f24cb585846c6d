"""Streams while their replicas are killed: every text beside that of a server that nobody disturbs.

    python tools/chaos.py --prompts prompts.jsonl --replicas 4 --streams 200 --seconds 120 --every 5 --json chaos.json

Starts a plain server, asks it everything once, ends it; starts `paceline serve --replicas N`, has so many streams ask
the same things again and again, and kills (-9) one replica after the other. Tells how many streams were answered, how
many moved, which answers (texts, calls of tools, counted tokens) differ, what failed, and what blocks the survivors
still hold when all is over. Exits with 1 where an answer differs, a request that was accepted was not answered or a
block is left. Who is turned away at the door because no replica is there asks again. Linux alone: replicas are found in
/proc.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

PORT = 8765
READY_S = 180.0
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "n": 2},
    {"temperature": 0.7, "presence_penalty": 0.4, "stop": ["\n\n"]}, {"temperature": 0.8, "logprobs": True},
    {"temperature": 0.6, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"answer": {"type": "string", "maxLength": 60}}, "required": ["answer"],
        "additionalProperties": False}}}},
    {"temperature": 0.7, "tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "look_up", "parameters": {"type": "object", "properties": {
            "words": {"type": "string", "maxLength": 30}, "most": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["words", "most"], "additionalProperties": False}}}]},
    {"temperature": 0.8, "speculation": {"method": "ngram", "k": 4, "adaptive": False}},
    {"temperature": 0.0, "speculation": None})
"""How requests are sampled, in turn."""
AT_THE_DOOR = "No replica is healthy now"
"""What a request is refused with that was never accepted. Any other 503 is of one that was."""


@contextmanager
def serving(arguments: list[str], log: Path) -> Iterator[tuple[str, int]]:
    with log.open("w") as sink:
        server = subprocess.Popen([sys.executable, "-m", "paceline", "serve", "--port", str(PORT), *arguments],
                                  stdout=sink, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{PORT}"
        try:
            until = time.monotonic() + READY_S
            while True:
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        break
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url, server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()


def replicas(server: int) -> list[int]:
    """Processes of a server's own replicas, as Ray names them."""
    parents, named = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if re.match(rb"ray::(?=.*Replica)", (entry / "cmdline").read_bytes()):
                    named.append(int(entry.name))

    def own(process: int) -> bool:
        return process == server or (process in parents and own(parents[process]))

    return [process for process in named if own(process)]


class Refused(Exception):
    """Nobody is there to accept the request: ask again after so many seconds."""


class Answer(NamedTuple):
    texts: dict[int, str]
    """By sample; what it calls of tools stands behind what it says."""
    tokens: tuple[int, int]
    """Of the prompt and of the answer, as they are counted for who pays."""
    moved: int = 0
    """How often the request moved."""

    def same_as(self, other: Answer) -> bool:
        return (self.texts, self.tokens) == (other.texts, other.tokens)


async def answer(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    texts: dict[int, str] = {}
    tokens: tuple[int, int] | None = None
    moved = 0
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=sent) as response:
        if response.status_code != 200:
            told = (await response.aread()).decode()
            if response.status_code == 503 and AT_THE_DOOR in told:
                raise Refused(float(response.headers.get("retry-after", 1)))
            raise RuntimeError(f"{response.status_code}: {told[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                if tokens is None:
                    raise RuntimeError("the stream ended without usage")
                return Answer(texts, tokens, moved)
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"])[:200])
            moved = max(moved, (event.get("paceline") or {}).get("moved", {}).get("times", 0))
            if (usage := event.get("usage")) is not None:
                tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + _said(choice["delta"])
    raise RuntimeError("the stream broke off")


def _said(delta: dict[str, Any]) -> str:
    """Ids of calls are made up for each answer, all else is not."""
    calls = [call["function"] for call in delta.get("tool_calls") or ()]
    return (delta.get("content") or "") + "".join(
        (call.get("name") or "") + (call.get("arguments") or "") for call in calls)


def bodies(prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
             "seed": 1000 + place, **kind} for place, (prompt, kind) in enumerate(zip(prompts, itertools.cycle(KINDS)))]


async def undisturbed(url: str, asked: list[dict[str, Any]], at_once: int) -> list[Answer]:
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await answer(client, url, body)

        return list(await asyncio.gather(*map(one, asked)))


async def disturbed(url: str, server: int, asked: list[dict[str, Any]], calm: list[Answer], streams: int,
                    seconds: float, every: float, chance: random.Random) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    order = itertools.count()
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        async def stream() -> None:
            while time.monotonic() < until:
                place = next(order) % len(asked)
                counts["asked"] += 1
                try:
                    got = await answer(client, url, asked[place])
                except Refused as problem:
                    counts["refused"] += 1
                    await asyncio.sleep(problem.args[0])
                    continue
                except (RuntimeError, httpx.HTTPError) as problem:
                    failures.append(f"{type(problem).__name__}: {problem}")
                    continue
                counts["answered"] += 1
                counts["moved"] += got.moved > 0
                counts["moves"] += got.moved
                if not got.same_as(calm[place]):
                    counts["different"] += 1
                    failures.append(f"another answer: {asked[place]} {got} {calm[place]}")

        async def kill() -> None:
            while time.monotonic() < until - every:
                await asyncio.sleep(every)
                found = replicas(server)
                if found:
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(found), signal.SIGKILL)
                        counts["killed"] += 1

        await asyncio.gather(kill(), *(stream() for _ in range(streams)))
        await asyncio.sleep(5)
        metrics = (await client.get(f"{url}/metrics")).text
    held = [float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines()
            if line.startswith("paceline_cache_blocks{") and 'state="used"' in line]
    return {**counts, "blocks_held": sum(held), "survivors": len(held), "failures": failures[:20],
            "failed": len(failures)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/chaos.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSON lines with turns or prompt")
    parser.add_argument("--model", default=None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--requests", type=int, default=48, help="different ones")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--kv-blocks", type=int, default=4000)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    lines = [json.loads(line) for line in Path(given.prompts).read_text().splitlines() if line.strip()]
    prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    asked = bodies([prompt for prompt in prompts if len(prompt) <= 400][:given.requests], given.max_tokens)
    common = ["--kv-blocks", str(given.kv_blocks), *([] if given.model is None else [given.model])]
    with serving(common, Path("chaos-plain.log")) as (url, _):
        calm = asyncio.run(undisturbed(url, asked, 16))
    print(f"chaos: {len(calm)} answers of a server that nobody disturbs", file=sys.stderr, flush=True)
    several = ["--replicas", str(given.replicas), "--threads", "1", *common]
    with serving(several, Path("chaos-cluster.log")) as (url, server):
        result = asyncio.run(disturbed(url, server, asked, calm, given.streams, given.seconds, given.every,
                                       random.Random(1)))
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result))
    if result["failed"] or result["blocks_held"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
