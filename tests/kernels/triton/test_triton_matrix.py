"""Cells of the equality matrix on the Triton kernels: in company, in chunks, preempted, drafted as chain and as tree, a
request's tokens are those it has alone, whether the device decodes by itself or the host looks at every token."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from engine.test_equality_matrix import PROMPT, Cell, drafts, model, params, preempt_at, strangers
from engine.tiny import tiny_llm

CELLS = [Cell("in company", batch=3), Cell("in chunks", options={"max_prefill_chunk": 7}),
         Cell("preempted", batch=2, preempt=True), *(Cell(name, draft=draft) for name, draft in drafts().items()),
         Cell("oracle tree in company", batch=3, draft=drafts()["oracle-tree"])]


def tokens_of(style: str, cell: Cell, expected: list[int] | None = None, captured: bool = True) -> list[int]:
    llm = tiny_llm(model("llama"), kernels="triton", capture="lazy" if captured else "never", **cell.options)
    assert (llm.engine.loop.device_steps is not None) == captured
    prompts, wanted = strangers(cell.batch - 1)
    place = min(2, cell.batch - 1)
    prompts.insert(place, list(PROMPT))
    wanted.insert(place, params(style))
    wishes = [None] * cell.batch
    if cell.draft is not None:
        wishes[place] = cell.draft | {"tokens": expected}
    if cell.preempt:
        preempt_at(llm, place, steps=(1, 4))
    out = llm.generate(prompts, wanted, speculation=wishes)[place]
    assert out.error is None and (cell.preempt is False or out.metrics.preemptions > 0)
    if cell.draft is not None:
        assert (out.speculation.accepted > 0) == (cell.draft["method"] == "oracle")
    llm.engine.cache.check([])
    return list(out.outputs[0].token_ids)


@functools.cache
def alone(style: str) -> list[int]:
    return tokens_of(style, Cell("alone"))


FAST = ("preempted", "oracle-tree")
"""In every run; the interpreter takes half a minute for a cell, so the others come with the long matrices."""


@pytest.mark.parametrize(("cell", "style"), [
    pytest.param(cell, style, marks=() if cell.name in FAST else pytest.mark.full, id=f"{cell.name}-{style}")
    for cell, style in zip(CELLS, itertools.cycle(["greedy", "untruncated"]))])
def test_tokens_are_those_of_the_request_alone(device: torch.device, cell: Cell, style: str) -> None:
    if device.type != "cpu":
        pytest.skip("the tiny models of the matrix lie on the CPU")
    assert tokens_of(style, cell, alone(style)) == alone(style)


@pytest.mark.full
def test_captured_or_launched_is_the_same(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the tiny models of the matrix lie on the CPU")
    assert tokens_of("greedy", Cell("launched"), captured=False) == alone("greedy")
