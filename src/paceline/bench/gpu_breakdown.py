"""What a captured step on the device consists of: its kernels one by one, and its length by the rows of one request."""

from __future__ import annotations

from collections import defaultdict

import torch

from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowGroup
from paceline.llm import LLM
from paceline.models.forward import Forward
from paceline.request import Request, SamplingParams

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def _captured(llm: LLM, prefix: int, rows: int) -> torch.cuda.CUDAGraph:
    """Forward and logits of `rows` tokens of one request after `prefix` others, as a graph."""
    engine = llm.engine
    runner, storage = engine.runner, engine.runner.storage
    sequence = Sequence(Request("bench", [1] * prefix, SamplingParams(), 0, 1, 0.0, None, None, None), 0, 0)
    allocation = engine.cache.open([1] * prefix)
    assert allocation is not None  # nobody else has any of the cache
    sequence.allocation = allocation
    try:
        engine.cache.reserve(sequence.allocation, 0, prefix + rows)
        batch = runner.on_device(engine.batches.build([RowGroup(sequence, prefix, [1] * rows)]))
        tokens = torch.from_numpy(batch.tokens).to(storage.device)

        def step() -> torch.Tensor:
            for view in batch.layout.views:
                view.scratch.clear()
            context = Forward(engine.kernels, batch.layout, storage.keys, storage.values, engine.model.cache_groups,
                              key_scales=storage.key_scales, value_scales=storage.value_scales)
            return engine.model.logits(engine.model.forward(tokens, context), engine.kernels).argmax(-1)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            step()
        return graph
    finally:
        engine.cache.close(sequence.allocation)


def verification_curve(llm: LLM, prefix: int) -> dict[int, float]:
    """Milliseconds of one captured step over so many rows of one request, best token of every row included."""
    found: dict[int, float] = {}
    for rows in ROWS:
        graph = _captured(llm, prefix, rows)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times = []
        for _ in range(5):
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 10)
        found[rows] = min(times)
    return found


def breakdown(llm: LLM, prefix: int, rows: int) -> dict[str, float]:
    """Microseconds a step over `rows` tokens of one request spends in each kernel, most first, and in all."""
    graph = _captured(llm, prefix, rows)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in profile.events():
        totals[event.name] += float(event.device_time) / 5
    ranked = sorted(((name[:60], value) for name, value in totals.items() if value > 0), key=lambda item: -item[1])
    return dict(ranked[:12]) | {"all": sum(totals.values())}
