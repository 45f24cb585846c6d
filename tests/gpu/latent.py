"""Latent attention (MLA) on this card at DeepSeek's shapes, one layer: decoding, verification and a prompt, in
microseconds inside a graph, beside what the cache's bytes take; and whole engines over latents.

Each case is checked first: close to what torch gives, in deterministic mode every request with the bits that it has
alone, and laid out for a graph, with room for more rows and longer texts, with the bits of the step as it is. Then a
small model without experts: texts of captured steps and of steps launched kernel by kernel, with drafts and without,
token by token, and how many steps repeated themselves. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.bench.report import Row, document, json_argument, say
from paceline.kernels.device.packing import device_rows
from paceline.kernels.device.rows import RowsShape
from paceline.kernels.eager import EagerKernels
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.kernels.triton import load
from paceline.llm import LLM
from paceline.measure.kernel_time import copies, decode_step, microseconds
from paceline.request import SamplingParams
from subjects import RandomSubject
from verdict import card, conclude

HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
RANK, ROPE, DTYPE = 512, 64, torch.bfloat16
CASES = ((1, 512, 1), (1, 4096, 1), (8, 4096, 1), (32, 4096, 1), (1, 4096, 8), (1, 0, 512))
"""Requests, tokens before the step, rows of each."""
SPARE_ROWS, SPARE_PAGES = 90, 2048
"""What a step has room for beyond its own where it is laid out for a graph: so much that the largest shapes have fewer
cells than spans."""
MODEL: dict[str, Any] = {
    "model_type": "deepseek_v2", "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512,
    "num_hidden_layers": 4, "intermediate_size": 1024, "max_position_embeddings": 2048, "tie_word_embeddings": False}
"""Of the engines, beside subjects.SHAPE. With a head of its own: what comes next hangs on more than the last token."""
LENGTHS, TOKENS = (9, 40, 700, 255, 61, 300), 48
"""Of their prompts; of each text."""
DRAFTERS = ("plain", "ngram", "right trees", "some drafted")
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

    def captured(self, kernels: Kernels) -> torch.Tensor:
        """As a graph would run it: rows of padding, long tables, nothing of the step known on the host."""
        step = self.layout()
        view, count = step.views[0], self.q.shape[0]
        rows = device_rows(step, RowsShape.bucket(count + SPARE_ROWS, 1, 0), self.device)
        pad = torch.nn.functional.pad
        room = Layout(pad(step.positions, (0, SPARE_ROWS)), [0, count + SPARE_ROWS], [0], [None], 16, [replace(
            view, tables=pad(view.tables, (0, SPARE_PAGES)), slots=pad(view.slots, (0, SPARE_ROWS), value=-1),
            scratch={})], rows)
        q, keys = pad(self.q, (0, 0, 0, 0, 0, SPARE_ROWS)), self.caches[0]
        return kernels.attend(q, keys, keys[..., :RANK], room, room.views[0], (RANK + ROPE) ** -0.5)[:count]

    def alone(self, kernels: Kernels, request: int) -> torch.Tensor:
        """The rows of one request, without the others."""
        whole, one = self.layout().views[0], decode_step(self.device, 1, self.context, self.count)
        mine = slice(request * self.count, (request + 1) * self.count)
        one.views[0] = replace(whole, tables=whole.tables[request:request + 1], slots=whole.slots[mine], scratch={})
        keys = self.caches[0]
        return kernels.attend(self.q[mine], keys, keys[..., :RANK], one, one.views[0], (RANK + ROPE) ** -0.5)


class Engine:
    """One over latents, that counts the steps which repeat themselves."""

    def __init__(self, subject: RandomSubject, capture: str) -> None:
        blocks = sum(-(-(length + TOKENS + 64) // 16) for length in LENGTHS)
        self.llm: LLM = subject.llm(capture=capture, kv_blocks=blocks, block_size=16, enable_prefix_caching=False)
        self.steps = self.repeated = self.times = 0
        executor: Any = self.llm.engine.executor
        submit = executor.submit

        def counted(step: Any) -> None:
            self.steps += 1
            self.repeated += step.repeated
            self.times += step.repeat
            submit(step)

        executor.submit = counted

    def texts(self, prompts: list[list[int]], wishes: list[dict[str, Any] | None]) -> list[list[int]]:
        params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=index, temperature=0.8 * (index % 2))
                  for index in range(len(prompts))]
        found = self.llm.generate(prompts, params, speculation=wishes)
        return [list(out.outputs[0].token_ids) for out in found]


def engines(subject: RandomSubject) -> tuple[list[Row], list[str]]:
    """Captured and launched, with drafts and without: the texts of the launched one without."""
    prompts = [(subject.prompt(seed) * length)[:length] for seed, length in enumerate(LENGTHS)]
    expected = Engine(subject, "never").texts(prompts, [None] * len(prompts))
    fixed: dict[str, Any] = {"k": 4, "adaptive": False}
    wishes: dict[str, list[dict[str, Any] | None]] = {
        "plain": [None] * len(prompts), "ngram": [fixed | {"method": "ngram"}] * len(prompts),
        "right trees": [fixed | {"method": "oracle", "branches": 2, "tokens": text} for text in expected],
        "some drafted": [fixed | {"method": "wrong", "tokens": text} if index % 2 else None
                         for index, text in enumerate(expected)]}
    rows: list[Row] = []
    wrong: list[str] = []
    for capture in ("lazy", "never"):
        for name in DRAFTERS:
            engine = Engine(subject, capture)
            found = engine.texts(prompts, wishes[name])
            case = f"engine, {'captured' if capture == 'lazy' else 'launched'}: {name}"
            equal = sum(ours == theirs for ours, theirs in zip(found, expected))
            note = f"of {len(prompts)}; {engine.repeated} of {engine.steps} steps repeated, {engine.times} times in all"
            rows.append(Row(case, "equal", equal, note=note))
            say(f"latent: {case}: {equal} {note}")
            if equal < len(prompts):
                wrong.append(f"{case}: {len(prompts) - equal} texts differ")
            if capture == "lazy" and name in ("plain", "ngram") and not engine.repeated:
                wrong.append(f"{case}: no step repeated itself")
    if 2 * sum(len(set(text)) > 2 for text in expected) < len(expected):
        wrong.append("engine: texts are one token over and over, and equality means nothing")
    return rows, wrong


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
            if not torch.equal(subject.captured(exact), together):
                wrong.append(f"{case}: bits depend on the room of a captured step")
            times = {kernels.name: microseconds(subject.calls(kernels)) for kernels in (fast, exact)}
            floor = batch * (context + count) * (RANK + ROPE) * 2 / BANDWIDTH
            rows.append(Row(case, "us", times[fast.name], {"deterministic": times[exact.name]}, False,
                            f"the cache's bytes take {floor:.1f}"))
            say(f"latent: {case}: {times[fast.name]:.1f} us, {floor:.1f} by its bytes")
    compared, different = engines(RandomSubject.small(device.type, str(DTYPE).removeprefix("torch."), **MODEL))
    return document(rows + compared, rank=RANK, rope=ROPE) | {"failures": wrong + different}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/latent.py", description=__doc__)
    json_argument(parser)
    arguments = parser.parse_args()
    conclude(lambda: run(card()), arguments.json)


if __name__ == "__main__":
    main()
