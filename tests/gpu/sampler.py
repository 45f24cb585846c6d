"""The sampler on a card: is it the host's, and what does it cost in a CUDA graph?

    python tests/gpu/sampler.py --json FILE

The peer is what one would write in torch: argmax, an exponential race over the softmax, a sort for top-k and top-p.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.bench.report import Row, document, json_argument, say
from paceline.request import SamplingParams
from sampler_checks import Batch, check
from verdict import card, conclude

WIDTHS = (128256, 49152)
ROWS = (1, 8, 32, 128)
_REPEATS = 10
"""Calls in one graph: what a replay itself costs is shared out."""

KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "top-p": SamplingParams(top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2),
}


def captured(call: Callable[[], object], repeats: int = _REPEATS) -> torch.cuda.CUDAGraph:
    """`repeats` calls in a graph. The first, outside, compiles and allocates."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def microseconds(call: Callable[[], object]) -> float:
    """Device time of one call inside a graph: the median of some replays."""
    graph = captured(call)
    times: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(12):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / _REPEATS)
    return sorted(times)[len(times) // 2]


def in_torch(kind: str, batch: Batch) -> Callable[[], Tensor] | None:
    """The peer of a kind; None: there is none worth the time."""
    x, p = batch.on_device, KINDS[kind]
    if kind == "greedy":
        return lambda: x.argmax(-1)

    def race(scores: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    def sorted_race() -> Tensor:
        scores, ids = (x / p.temperature).sort(dim=-1, descending=True)
        if p.top_k:
            scores[:, p.top_k:] = -torch.inf
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs.cumsum(-1) - probs >= p.top_p, -torch.inf)
        return ids.gather(-1, race(scores)[:, None])

    if kind == "penalties":
        return None
    return (lambda: race(x / p.temperature)) if kind == "temperature" else sorted_race


def kernels_of(call: Callable[[], object]) -> dict[str, float]:
    """Device microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    return {event.key: round(event.self_device_time_total / 5, 2) for event in seen.key_averages()
            if event.self_device_time_total > 0}


def measure(widths: Sequence[int], counts: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
    device = torch.device("cuda")
    rows: list[Row] = []
    parts: dict[str, Any] = {}
    for width in widths:
        for count in counts:
            for kind, params in KINDS.items():
                batch = Batch(count, width, device, only=params)
                ours = microseconds(batch.draw)
                peer = in_torch(kind, batch)
                theirs = {} if peer is None else {"torch": microseconds(peer)}
                case = f"{kind}, {count} rows of {width}"
                say(f"{case}: {ours:.1f} us {theirs}")
                rows.append(Row(case, "us", ours, theirs, higher_is_better=False))
                if count in (counts[0], counts[-1]):
                    parts[case] = kernels_of(batch.draw)
    return rows, parts


def graph_agrees(width: int, rows: int) -> bool:
    """Whether replays of a captured call give the tokens of a plain one."""
    batch = Batch(rows, width, torch.device("cuda"))
    plain = batch.draw().clone()
    graph = captured(batch.draw, repeats=3)
    drawn = batch.draw()  # a view of where every call leaves its tokens
    for _ in range(3):
        drawn.fill_(-7)
        graph.replay()
        if not torch.equal(drawn, plain):
            return False
    return True


def run(widths: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """`counts`: rows to time it on; none: it is only compared with the host."""
    device = card()
    began = time.perf_counter()
    checks: dict[str, Any] = {}
    failures: list[str] = []
    for width in widths:
        found = check(device, width, 56).as_dict()
        checks[str(width)] = found | {"graph": graph_agrees(width, 42)}
        seen = (f"vocabulary {width}: {found['compared']} compared, {found['wrong_in_all']} wrong, "
                f"{len(found['near_ties'])} near ties, graph {checks[str(width)]['graph']}")
        say(f"{seen} ({time.perf_counter() - began:.0f} s)")
        if found["wrong_in_all"] or not checks[str(width)]["graph"]:
            failures.append(seen)
    rows, parts = measure(widths, counts) if counts else ([], {})
    return document(rows, checks=checks, kernels_us=parts,
                    seconds=round(time.perf_counter() - began, 1)) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/sampler.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="vocabulary sizes")
    parser.add_argument("--no-times", action="store_true", help="compare with the host, nothing else")
    json_argument(parser)
    given = parser.parse_args()
    conclude(lambda: run(given.widths, [] if given.no_times else given.rows), given.json)


if __name__ == "__main__":
    main()
