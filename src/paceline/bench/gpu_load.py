"""Speculation under load on a card: requests that come by chance at some share of what the engine can take, drafts that
are right with a known chance; plain, always drafted for, and as the engine sees fit. How many requests a second were
served as fast as they were to be."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.bench.gpu_oracle import DEPTH, told_by_an_oracle
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.garbage import only_new_objects_are_collected
from paceline.llm import LLM
from paceline.request import SamplingParams

LOADS = (10, 30, 50, 70, 90, 120)
"""Percent of the requests a second that plain decoding served when many were always there."""
WAYS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "on": {"method": "ngram", "k": DEPTH, "adaptive": False},
    "control": {"method": "ngram", "k": DEPTH},
}
CHANCE = 40
"""Percent, of each token of a draft: what pays for few requests at once and loses for many."""
OUTPUT = 128
CROWD = 128
"""Requests that are always there where capacity is measured."""
TTFT, TPOT = 0.5, 0.010
"""Seconds within which a request's first token has to come, and its others on average."""
_TURNS = 3
"""Of a load in which something had to be captured."""
_WARM = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Served:
    """What the requests of one load got."""

    rate: float
    """Requests a second, from the first to come until the last was answered."""
    goodput: float
    """The same of those that kept to TTFT and TPOT."""
    ttft: float
    tpot: float
    """Seconds, of the median request."""


def sweep(llm: LLM, prompt: list[int], vocab: int, seconds: float = 8.0,
          chance: int = CHANCE) -> tuple[float, dict[tuple[int, str], Served]]:
    """Requests a second that plain decoding can take, and what became of each load in each way."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    (plain,) = llm.generate(prompt, params, speculation=None)
    text = plain.outputs[0].token_ids
    found: dict[tuple[int, str], Served] = {}
    with told_by_an_oracle(llm, [*prompt, *text], vocab, chance / 100):
        for wish in WAYS.values():  # what is captured is captured now, and what control learns of it too
            for count in _WARM:
                llm.generate([prompt] * min(count, llm.engine.config.max_num_seqs), params, speculation=wish)
        capacity = serve(llm, prompt, text, [0.0] * (3 * CROWD), None, CROWD).rate
        for load in LOADS:
            luck, rate = random.Random(load), capacity * load / 100
            arrivals = [luck.expovariate(rate)]
            while arrivals[-1] < seconds:
                arrivals.append(arrivals[-1] + luck.expovariate(rate))
            for way, wish in WAYS.items():
                for _ in range(_TURNS):
                    before = captures(llm)
                    found[load, way] = serve(llm, prompt, text, arrivals, wish)
                    if captures(llm) == before:
                        break  # else somebody waited for what will not be captured again
    return capacity, found


def captures(llm: LLM) -> int:
    executor = llm.engine.executor
    return executor.graphs.captures if isinstance(executor, GraphExecutor) else 0


def serve(llm: LLM, prompt: list[int], text: list[int], arrivals: list[float], wish: dict[str, Any] | None,
          most: int | None = None) -> Served:
    """Requests that come at these times, in seconds; `most`: as soon as fewer are there."""
    engine, params = llm.engine, SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    coming = deque(arrivals)
    came: dict[str, float] = {}
    firsts: list[float] = []
    betweens: list[float] = []
    with only_new_objects_are_collected():
        begin = end = engine.clock()
        while coming or came:
            now = engine.clock() - begin
            while coming and coming[0] <= now and (most is None or len(came) < most):
                at = coming.popleft()
                came[engine.add(prompt, params, speculation=wish)] = begin + at
            if not engine.has_work:
                time.sleep(max(0.0, min(coming[0] - now, 0.001)))
                continue
            for record in engine.step():
                if record.open == 0 and record.request.id in came:
                    out = engine.take(record.request.id).snapshot()
                    assert out.outputs[0].token_ids == text
                    times = out.metrics.token_times
                    firsts.append(times[0] - came.pop(record.request.id))
                    betweens.append((times[-1] - times[0]) / (len(times) - 1))
                    end = times[-1]
    good = sum(first <= TTFT and between <= TPOT for first, between in zip(firsts, betweens))
    whole = max(end - begin, 1e-9)
    return Served(len(firsts) / whole, good / whole, median(firsts), median(betweens))
