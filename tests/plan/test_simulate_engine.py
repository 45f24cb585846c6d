"""The simulator beside a real engine: the same requests in the same order, with the same hits and preemptions."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from engine.tiny import VOCAB, tiny_engine
from paceline.plan.planner import plan
from paceline.plan.simulate.costs import PlannedCosts
from paceline.plan.simulate.fleet import Engine, Layout, simulate
from paceline.plan.simulate.traffic import Asked
from paceline.request import SamplingParams


@pytest.mark.parametrize(("seed", "blocks"), [(0, 400), (1, 400), (2, 30)])
def test_texts_end_as_in_a_real_engine(seed: int, blocks: int) -> None:
    luck = random.Random(seed)
    common = [luck.randrange(VOCAB) for _ in range(24)]
    prompts = [luck.choice(([], common)) + [luck.randrange(VOCAB) for _ in range(luck.randint(5, 60))]
               for _ in range(14)]
    outputs = [luck.randint(1, 40) for _ in prompts]

    real = tiny_engine(kv_blocks=blocks, max_num_seqs=5, max_batch_tokens=48, preemption="recompute")
    names = [real.add(prompt, SamplingParams(max_tokens=most, temperature=0.0), speculation=None)
             for prompt, most in zip(prompts, outputs)]
    ended: list[set[int]] = []
    while real.has_work:
        over = {names.index(record.request.id) for record in real.step() if not record.open}
        ended += [over] if over else []
    metrics = [real.take(name).metrics for name in names]

    trace = [Asked(0.0, len(prompt), most, given=tuple(prompt)) for prompt, most in zip(prompts, outputs)]
    costs = PlannedCosts(plan("smollm2-135m", "h100", drafters=()).roofline)
    jobs = simulate(trace, Engine(real.config, costs), Layout(replicas=1)).jobs
    by_end = sorted(range(len(jobs)), key=lambda place: jobs[place].end or 0.0)
    assert [set(group) for _, group in groupby(by_end, key=lambda place: jobs[place].end)] == ended
    assert [job.cached for job in jobs] == [one.cached_tokens for one in metrics]
    assert (sum(job.preemptions for job in jobs) > 0) == (blocks == 30)
    assert sum(job.preemptions for job in jobs) == real.scheduler.preemptions
