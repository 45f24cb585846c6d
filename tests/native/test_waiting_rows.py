"""What a head keeps of plain rows is written when somebody needs it, and then it is what it would have been at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.engine.execute.waiting_rows import MOST, WaitingRows
from paceline.kernels import cpu
from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.block import BlockHead
from paceline.models.heads.interface import StoredRows

FAMILY = Path(__file__).parents[1] / "family"
TEXTS = ["The king said to her that", "It was a dark", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "She looked at the door and"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")


def engine(**options: Any) -> LLM:
    return LLM(str(FAMILY / "target"), **{"device": "cpu", "kernels": "native", "kv_blocks": 200, "block_size": 8,
                                          "heads": [str(FAMILY / "dspark")]} | options)


def rows_at(slots: list[int], first: int) -> StoredRows:
    count = len(slots)
    view = GroupView(torch.zeros((1, 1), dtype=torch.int64), torch.tensor(slots), None)
    layout = Layout(torch.arange(first, first + count), [0, count], [first], [None], 8, [view])
    return StoredRows(torch.arange(count), layout, view, torch.empty(0, dtype=torch.int64))


def test_of_rows_with_the_same_slot_the_last_is_kept() -> None:
    waiting = WaitingRows()
    assert waiting.take() is None
    for step, slots in enumerate(([40, 41, 42], [41], [42, 43])):
        waiting.add({2: torch.full((len(slots), 4), float(step))}, rows_at(slots, 10 * step))
    taken = waiting.take()
    assert taken is not None and waiting.take() is None
    assert taken.rows.view.slots.tolist() == [40, 41, 42, 43]
    assert taken.rows.layout.positions.tolist() == [0, 10, 20, 21]
    assert taken.tapped[2][:, 0].tolist() == [0.0, 1.0, 2.0, 2.0]


def test_plain_steps_store_many_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    store = BlockHead.store

    def counted(self: BlockHead, tapped: Any, rows: StoredRows, *more: Any) -> None:
        stored.append(len(rows.tokens))
        store(self, tapped, rows, *more)

    llm = engine()
    monkeypatch.setattr(BlockHead, "store", counted)
    llm.generate(TEXTS[:1], SamplingParams(max_tokens=3 * MOST, temperature=0.0, ignore_eos=True), speculation=None)
    assert len(stored) <= 4 and max(stored) >= MOST


@pytest.mark.parametrize(("length", "blocks"), [(90, 14), (MOST + 14, 38)], ids=("waits too", "stored at once"))
def test_a_prompt_takes_over_the_slots_of_rows_that_wait(length: int, blocks: int) -> None:
    """Those of the text that had the slots before are not written over its own later."""
    kept = []
    for waits in (True, False):
        llm = engine(kv_blocks=blocks, enable_prefix_caching=False)
        if not waits:
            llm.engine.heads._waiting = None
        llm.generate(TEXTS[:1], GREEDY, speculation=None)
        assert length + GREEDY.max_tokens > (blocks - 4) * 8, "some blocks are the first text's"
        prompt = [7 + 3 * place % 50 for place in range(length)]
        llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), speculation=None)
        llm.engine.heads.settle()
        kept.append(llm.engine.heads.planes(next(iter(llm.engine.heads.heads))))
    for name, plane in kept[0].items():
        assert torch.equal(plane, kept[1][name]), name


AROUND: dict[str, dict[str, Any]] = {
    "crowd": {}, "chunks": {"max_prefill_chunk": 3, "schedule_ahead": True}, "preempted": {"kv_blocks": 14},
    "swapped": {"kv_blocks": 14, "preemption": "swap", "host_cache": 0.01}}
WISHES = [{"method": "dspark", "k": 4, "adaptive": False, **more} for more in ({}, {"branches": 2})]


@pytest.mark.parametrize("wish", WISHES, ids=("chains", "trees"))
@pytest.mark.parametrize("around", AROUND)
def test_drafts_are_those_of_rows_that_did_not_wait(around: str, wish: dict[str, Any]) -> None:
    """Texts that were decoded plainly first, so that what is kept of them waited, then go on with drafts."""
    told = []
    for waits in (True, False):
        llm = engine(**AROUND[around])
        if not waits:
            llm.engine.heads._waiting = None
        plain = [out.outputs[0].token_ids for out in llm.generate(TEXTS, GREEDY, speculation=None)]
        outs = llm.generate(TEXTS, GREEDY, speculation=wish)
        assert [out.outputs[0].token_ids for out in outs] == plain
        more = llm.generate([[*out.prompt_token_ids, *tokens] for out, tokens in zip(outs, plain)], GREEDY,
                            speculation=wish)
        assert all(out.speculation.failure is None for out in (*outs, *more))
        told.append([(out.speculation.drafted, out.speculation.accepted, out.outputs[0].token_ids)
                     for out in (*outs, *more)])
        assert around not in ("preempted", "swapped") or llm.engine.scheduler.preemptions > 0
    assert told[0] == told[1] and sum(accepted for _, accepted, _ in told[0]) > 20
