"""One fault in one run: everything else goes on as if there had been none, and nothing is left behind.

A case is three words: the circumstances, the point that fails and the step boundary from which it does. A case that
fails prints them and the command that runs it again.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.whole import check_nobody_is_remembered
from faults.points import DEVICE, POINTS, Cost, injected
from fuzz.mixes import HOST, LONGEST, STEMS, Ask, Mix, Run, Said, alone
from paceline.errors import PacelineError
from paceline.request import RequestOutput, Tenant

STEPS = 24
"""Step boundaries of a run, about; what is armed behind its end fires never."""
CROWDED: dict[str, Any] = {"kv_blocks": 32, "block_size": 4, "max_model_len": LONGEST, "watermark": 0.0,
                           "preemption": "swap", "swap_space": HOST, "host_cache": HOST}
CIRCUMSTANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("native", {"kv_blocks": 150}),
    "ahead": ("native", {"kv_blocks": 150, "schedule_ahead": True, "max_prefill_chunk": 16}),
    "crowded": ("native", CROWDED),
    "crowded ahead": ("native", CROWDED | {"schedule_ahead": True, "max_prefill_chunk": 7}),
    "torch": ("llama", {"kv_blocks": 150, "max_prefill_chunk": 16}),
    "device": ("stepped", {"kv_blocks": 150, "capture": "lazy", "kernels": "stepped", "max_num_seqs": 12}),
    "device crowded": ("stepped", CROWDED | {"capture": "lazy", "kernels": "stepped", "max_num_seqs": 12}),
}


def workload(kind: str) -> list[Ask]:
    """Some of everything, small: drafts by look-ups, a model, a head and a mixture; structures, searches, samples,
    stops, scores, tenants."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    seeded: dict[str, Any] = {"temperature": 0.9, "max_tokens": 10, "seed": 7, "ignore_eos": True}
    return [
        Ask(STEMS[0][:30], greedy, {"method": "suffix", "adaptive": False, "k": 4}),
        Ask(STEMS[0][:24] + [5, 6, 5, 6, 5], seeded | {"n": 2, "logprobs": 1, "stop": ["zz"]},
            {"method": "ngram", "adaptive": False, "k": 3}),
        Ask(STEMS[1][:20], greedy | {"max_tokens": 8}, {"method": "draft", "model": "same", "adaptive": False, "k": 3},
            arrives=1),
        Ask(STEMS[1][:9], seeded | {"regex": "x[0-9]{3}(true|false)[ab]{2,6}", "seed": 9, "max_tokens": 14},
            {"method": "auto", "adaptive": False}, arrives=1),
        Ask(STEMS[1][:13], {"beam_width": 3, "n": 2, "temperature": 0.0, "max_tokens": 7}, arrives=2),
        Ask(STEMS[0][:17], greedy | {"max_tokens": 9, "repetition_penalty": 1.3},
            {"method": "eagle3", "adaptive": False, "k": 3}, tenant=Tenant("a"), arrives=3),
        Ask(STEMS[1][5:29], seeded | {"best_of": 3, "n": 1, "max_tokens": 6, "timeout_s": 9e8}, arrives=4),
        Ask(STEMS[0][7:40], seeded | {"prompt_logprobs": 0, "max_tokens": 5, "priority": 1},
            {"method": "lookahead", "adaptive": False}, arrives=6),
        Ask([9, 8, 7], greedy | {"max_tokens": 18}, {"method": "suffix", "k": 2}, arrives=7),
    ]


@functools.cache
def undisturbed(kind: str) -> list[Said]:
    return [alone(kind, ask, kind != "stepped") for ask in workload(kind)]


@dataclass(frozen=True)
class Case:
    circumstances: str
    point: str
    step: int

    def __str__(self) -> str:
        return f"{self.circumstances}/{self.point}/{self.step}"

    @classmethod
    def read(cls, text: str) -> Case:
        circumstances, point, step = text.split("/")
        return cls(circumstances, point, int(step))

    @property
    def again(self) -> str:
        return f"cd tests && PYTHONPATH=../src:. python -m faults.cases '{self}'"


@contextmanager
def unheard() -> Iterator[None]:
    """Without a log: it would keep what was raised, and with it the frames and everybody in them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def replayable(case: Any) -> Iterator[None]:
    """What fails says how to see it again."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(f"to run this case again: {case.again}")
        raise


def run_case(case: Case) -> bool:
    """Whether the fault came to pass: late ones find nobody left."""
    torch.set_num_threads(1)
    with replayable(case), unheard():
        kind, options = CIRCUMSTANCES[case.circumstances]
        point, asks = (POINTS | DEVICE)[case.point], workload(kind)
        run = Run(Mix(kind, options, asks))
        with injected(point, run.engine) as fault:
            def arm(step: int, _: Any) -> None:
                fault.armed = fault.armed or step == case.step

            outs = run.go(arm)
        judge(kind, outs, undisturbed(kind), point.cost if fault.fired else Cost.NOBODY)
        check_next(run, kind)
        del outs
        run.outs.clear()
        check_nobody_is_remembered(run.engine, set(run.names))
        return fault.fired


def judge(kind: str, outs: list[RequestOutput], expected: list[Said], cost: Cost) -> None:
    """Who ended with an error may have; everybody else's text is what it is without faults."""
    lost = 0
    for out, want in zip(outs, expected, strict=True):
        if out.error is not None and want.error is None:
            assert isinstance(out.error, PacelineError) and out.finished
            assert not out.outputs or "injected" not in getattr(out.error, "told", ""), "none of a client's business"
            lost += 1
            continue
        assert Said.of(out, kind != "stepped") == want
    assert lost <= {Cost.NOBODY: 0, Cost.ONE: 1, Cost.SOME: len(outs)}[cost], f"{lost} requests were lost"


def check_next(run: Run, kind: str) -> None:
    """An engine that has seen a fault serves others as before."""
    again = run.again(run.mix.asks[1:4])
    judge(kind, again.go(), undisturbed(kind)[1:4], Cost.NOBODY)
    run.names += again.names


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(f"{text}: {'as it should be' if run_case(Case.read(text)) else 'the fault found nobody'}")
