"""A model that several ranks hold together says, to the bit, what one rank says by itself."""

from __future__ import annotations

import gc

import pytest

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
