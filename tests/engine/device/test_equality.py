"""Cells of the equality matrix on the device: in company, in chunks, preempted, drafted as chain and as tree, a
request's tokens are those it has alone, whether the device decodes by itself or the host looks at every token."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.test_equality_matrix import PROMPT, Cell, drafts, model, params, preempt_at, strangers
from engine.tiny import tiny_llm
from paceline.engine.execute.graph_executor import GraphExecutor

CELLS = [Cell("in company", batch=3), Cell("in chunks", options={"max_prefill_chunk": 7}),
         Cell("preempted", batch=2, preempt=True), *(Cell(name, draft=draft) for name, draft in drafts().items()),
         Cell("oracle tree in company", batch=3, draft=drafts()["oracle-tree"])]


SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}), "latents": ("deepseek_dense", {}), "fp8": ("llama", {"kv_dtype": "fp8"})}
"""A model, and what its cache holds."""


def tokens_of(style: str, cell: Cell, expected: list[int] | None = None, captured: bool = True,
              subject: str = "plain") -> list[int]:
    name, options = SUBJECTS[subject]
    llm = tiny_llm(model(name), kernels="stepped", capture="lazy" if captured else "never", **options | cell.options)
    assert isinstance(llm.engine.executor, GraphExecutor) == captured
    prompts, wanted = strangers(cell.batch - 1)
    place = min(2, cell.batch - 1)
    prompts.insert(place, list(PROMPT))
    wanted.insert(place, params(style))
    wishes: list[Any] = [None] * cell.batch
    if cell.draft is not None:
        wishes[place] = cell.draft | {"tokens": expected}
    if cell.preempt:
        preempt_at(llm, place, steps=(1, 4))
    out = llm.generate(prompts, wanted, speculation=wishes)[place]
    assert out.error is None and (cell.preempt is False or out.metrics.preemptions > 0)
    if cell.draft is not None:
        assert out.speculation is not None
        assert (out.speculation.accepted > 0) == (cell.draft["method"] == "oracle")
    llm.engine.cache.check([])
    return list(out.outputs[0].token_ids)


@functools.cache
def alone(style: str, subject: str = "plain") -> list[int]:
    return tokens_of(style, Cell("alone"), subject=subject)


@pytest.mark.parametrize(("subject", "style"), [
    ("plain", "greedy"), ("plain", "untruncated"), ("latents", "untruncated"), ("fp8", "greedy")])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_tokens_are_those_of_the_request_alone(cell: Cell, subject: str, style: str) -> None:
    expected = alone(style, subject)
    assert tokens_of(style, cell, expected, subject=subject) == expected


@pytest.mark.parametrize("subject", SUBJECTS)
def test_captured_or_launched_is_the_same(subject: str) -> None:
    found = tokens_of("greedy", Cell("launched"), captured=False, subject=subject)
    assert found == alone("greedy", subject) and len(set(found)) > 2
