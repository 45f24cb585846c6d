"""Faults on a card: no memory, or something that breaks, at every capture, replay and copy of a small mixed workload,
from every step boundary on. Everybody says what it says alone, or ends with an error where that is said to be the cost,
and an engine that has seen a fault serves the next as before.

Prints a line a fault with how often it came to pass, and exits with 1 where somebody lost more than it must. Without a
card (--device cpu --kernels stepped) the same code runs in plain torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.report import Row, document, json_argument, say
from paceline.engine.core import Engine
from paceline.llm import LLM
from paceline.request import SamplingParams
from subjects import LOADED, RandomSubject, Subject
from verdict import conclude

TESTS = str(Path(__file__).parents[1])
STEPS = 14
WORKLOAD: list[tuple[dict[str, Any], Any]] = [
    ({"temperature": 0.0}, None),
    ({"temperature": 0.9, "seed": 7, "top_k": 20}, {"method": "ngram", "k": 4, "adaptive": False}),
    ({"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2}, {"method": "suffix", "k": 3, "adaptive": False}),
    ({"temperature": 0.8, "seed": 9, "no_repeat_ngram_size": 2}, None),
    ({"temperature": 0.0}, {"method": "draft", "model": LOADED, "k": 3, "adaptive": False}),
    ({"temperature": 0.7, "seed": 3, "n": 2}, None),
]
Texts = list[list[int]]


def requests(subject: Subject) -> list[tuple[list[int], SamplingParams, Any]]:
    return [(subject.prompt(number)[:40], SamplingParams(max_tokens=12, ignore_eos=True, **params), wish)
            for number, (params, wish) in enumerate(WORKLOAD)]


def engine_of(subject: Subject) -> Engine:
    return subject.llm(kv_blocks=80, max_num_seqs=8, max_model_len=128).engine


def texts(engine: Engine, subject: Subject, at: int | None = None, fault: Any = None) -> list[Texts | None]:
    """Of all requests, of which one more comes each step; None: it ended with an error. A fault is armed at a step."""
    waiting, names, step = list(requests(subject)), list[str](), 0
    while waiting or engine.has_work:
        if fault is not None and step == at:
            fault.armed = True
        if waiting:
            prompt, params, wish = waiting.pop(0)
            names.append(engine.add(prompt, params, speculation=wish))
        engine.step()
        engine.cache.check([seq.allocation for seq in engine.scheduler.running], [
            seq.swapped for own in engine.scheduler._requests.values() for seq in own if seq.swapped is not None])
        step += 1
    engine.cache.check([])
    outs = [engine.take(name).snapshot() for name in names]
    return [None if out.error is not None else [one.token_ids for one in out.outputs] for out in outs]


def run(subject: Subject, names: Sequence[str] = (), steps: Sequence[int] = range(STEPS)) -> dict[str, Any]:
    if TESTS not in sys.path:
        sys.path.append(TESTS)
    from faults.points import DEVICE, Cost, injected

    llm: LLM = subject.llm(kv_blocks=80, max_num_seqs=8, max_model_len=128, enable_prefix_caching=False)
    expected = [[one.token_ids for one in llm.generate([prompt], params)[0].outputs]
                for prompt, params, _ in requests(subject)]
    failures: list[str] = []
    fired: Counter[str] = Counter()
    for point in (DEVICE[name] for name in (names or DEVICE)):
        for step in steps:
            engine = engine_of(subject)
            with injected(point, engine) as fault:
                found = texts(engine, subject, step, fault)
            fired[point.name] += fault.fired
            case, lost = f"{point.name}, from step {step} on", sum(one is None for one in found)
            if lost > {Cost.NOBODY: 0, Cost.ONE: 1, Cost.SOME: len(found)}[point.cost]:
                failures.append(f"{case}: {lost} requests ended with an error")
            if any(one is not None and one != want for one, want in zip(found, expected)):
                failures.append(f"{case}: a text differs: {found}, expected {expected}")
            if texts(engine, subject) != expected:
                failures.append(f"{case}: what came after it differs")
        say(f"{point.name}: {fired[point.name]} of {len(steps)} came to pass, {len(failures)} failures so far")
    rows = [Row(name, "faults", count) for name, count in fired.items()]
    return document(rows, subject=subject.name, device=str(subject.device)) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/shortages.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--faults", default="", help="separated by commas; default: all")
    json_argument(parser)
    given = parser.parse_args()
    names = [name for name in given.faults.split(",") if name]
    conclude(lambda: run(dataclasses.replace(RandomSubject.small(given.device, given.dtype), kernels=given.kernels),
                         names), given.json)


if __name__ == "__main__":
    main()
