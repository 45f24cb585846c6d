"""A model that several ranks hold together says, to the bit, what one rank says by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from serving import write_model

from engine.test_equality_matrix import (
    FAST_MODELS,
    OTHER_MODELS,
    Cell,
    drafts,
    fast_cells,
    host_cells,
    model,
    reference,
    run_cell,
)
from paceline import LLM
from parallel.ranks import shared_model

CELLS = [Cell("batch 8, chunks of 7", batch=8, options={"max_prefill_chunk": 7}),
         Cell("oracle tree in a preempted batch", batch=4, preempt=True, draft=drafts()["oracle-tree"]),
         Cell("swapped, wrong tree, ahead", batch=4, preempt=True, swapped=True, draft=drafts()["wrong-tree"],
              options={"schedule_ahead": True, "enable_prefix_caching": False}),
         Cell("offloaded, oracle chain", offloaded=True, draft=drafts()["oracle-chain"])]


def check(name: str, size: int, cell: Cell, style: str = "seeded") -> None:
    subject = shared_model(name, size)
    run_cell(subject, style, cell, reference(model(name), style))
    assert subject.lost is None
    del subject
    gc.collect()


@pytest.mark.parametrize("place", range(len(FAST_MODELS + OTHER_MODELS)), ids=(FAST_MODELS + OTHER_MODELS).__getitem__)
def test_every_architecture_is_equal(place: int) -> None:
    """With 2 ranks or 4, whose heads share a key head, each under other circumstances."""
    check((FAST_MODELS + OTHER_MODELS)[place], (2, 4)[place % 2], CELLS[place // 2 % len(CELLS)])


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FAST_MODELS + OTHER_MODELS)
@pytest.mark.parametrize("cell", [*fast_cells(), *host_cells(), *CELLS], ids=lambda cell: cell.name)
def test_the_whole_matrix(name: str, size: int, cell: Cell) -> None:
    check(name, size, cell)


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model of two ranks, each a process, with gloo between them; and the same model of one rank."""
    folder = str(write_model(tmp_path_factory.mktemp("ranks")))
    llm = LLM(folder, deterministic=True, tensor_parallel_size=2)
    assert llm.engine.model._followers.pids  # type: ignore[attr-defined]
    yield llm.engine.model, LLM(folder, deterministic=True).engine.model
    assert llm.engine.model.lost is None


@pytest.mark.parametrize("cell", [*CELLS[:3], *(Cell(name, draft=draft) for name, draft in drafts().items())],
                         ids=lambda cell: cell.name)
def test_processes_are_equal(by_processes: tuple[Any, Any], cell: Cell) -> None:
    subject, alone = by_processes
    run_cell(subject, "seeded", cell, reference(alone, "seeded"))
