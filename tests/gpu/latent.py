"""Latent attention (MLA) on this card at DeepSeek's shapes, one layer: decoding, verification and a prompt, in
microseconds inside a graph, beside what the cache's bytes take.

Each case is checked first: close to what torch gives, and in deterministic mode every request with the bits that it has
alone. Exits with 1 where one is not. `python tests/gpu/latent.py` needs torch, triton and numpy alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.bench.report import Row, document, json_argument, say
from paceline.kernels.eager import EagerKernels
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.kernels.triton import load
from paceline.measure.kernel_time import copies, decode_step, microseconds
from verdict import card, conclude

HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
RANK, ROPE, DTYPE = 512, 64, torch.bfloat16
CASES = ((1, 512, 1), (1, 4096, 1), (8, 4096, 1), (32, 4096, 1), (1, 4096, 8), (1, 0, 512))
"""Requests, tokens before the step, rows of each."""
CLOSE = 0.02
BANDWIDTH = 4.27e6
"""Bytes a microsecond that an H200 reads."""


class Subject:
    """One layer's cache and queries, random and bfloat16."""

    def __init__(self, device: torch.device, heads: int, batch: int, context: int, count: int) -> None:
        self.device, self.batch, self.count, self.context = device, batch, count, context
        slots = (batch * -(-(context + count) // 16) + 1) * 16
        self.caches = [torch.randn(slots, 1, RANK + ROPE, device=device, dtype=DTYPE)
                       for _ in range(min(32, copies(slots * (RANK + ROPE) * 2)))]
        self.q = torch.randn(batch * count, heads, RANK + ROPE, device=device, dtype=DTYPE)

    def layout(self) -> Layout:
        return decode_step(self.device, self.batch, self.context, self.count)

    def attend(self, kernels: Kernels, layout: Layout, cache: int = 0) -> torch.Tensor:
        keys = self.caches[cache]
        return kernels.attend(self.q, keys, keys[..., :RANK], layout, layout.views[0], (RANK + ROPE) ** -0.5)

    def calls(self, kernels: Kernels) -> list[Callable[[], object]]:
        layout = self.layout()
        return [lambda cache=cache: self.attend(kernels, layout, cache)  # type: ignore[misc]
                for cache in range(len(self.caches))]

    def alone(self, kernels: Kernels, request: int) -> torch.Tensor:
        """The rows of one request, without the others."""
        whole, one = self.layout().views[0], decode_step(self.device, 1, self.context, self.count)
        mine = slice(request * self.count, (request + 1) * self.count)
        one.views[0] = replace(whole, tables=whole.tables[request:request + 1], slots=whole.slots[mine], scratch={})
        keys = self.caches[0]
        return kernels.attend(self.q[mine], keys, keys[..., :RANK], one, one.views[0], (RANK + ROPE) ** -0.5)


@torch.inference_mode()
def run(device: torch.device) -> dict[str, Any]:
    fast, exact, torch_kernels = load(False, device), load(True, device), EagerKernels()
    rows: list[Row] = []
    wrong: list[str] = []
    for name, heads in HEADS.items():
        for batch, context, count in CASES:
            case = f"{name}: {batch} x {count} after {context}"
            subject = Subject(device, heads, batch, context, count)
            expected = subject.attend(torch_kernels, subject.layout()).float()
            for kernels in (fast, exact):
                off = float((subject.attend(kernels, subject.layout()).float() - expected).abs().max())
                if not off < CLOSE:
                    wrong.append(f"{case}: {kernels.name} is off by {off:.3f}")
            together = subject.attend(exact, subject.layout())
            if not torch.equal(torch.cat([subject.alone(exact, one) for one in range(batch)]), together):
                wrong.append(f"{case}: bits depend on the company")
            times = {kernels.name: microseconds(subject.calls(kernels)) for kernels in (fast, exact)}
            floor = batch * (context + count) * (RANK + ROPE) * 2 / BANDWIDTH
            rows.append(Row(case, "us", times[fast.name], {"deterministic": times[exact.name]}, False,
                            f"the cache's bytes take {floor:.1f}"))
            say(f"latent: {case}: {times[fast.name]:.1f} us, {floor:.1f} by its bytes")
    return document(rows, rank=RANK, rope=ROPE) | {"failures": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/latent.py", description=__doc__)
    json_argument(parser)
    arguments = parser.parse_args()
    conclude(lambda: run(card()), arguments.json)


if __name__ == "__main__":
    main()
