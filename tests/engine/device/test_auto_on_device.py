"""auto on a device with a trained head: look-up and head draft in the same step, and what promises more is verified."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from engine.device.test_heads_on_device import Failing, Noting, on_device
from engine.test_head_storage import PARAMS, PROMPTS
from engine.tiny import tiny_llm, tiny_model
from engine.toy_heads import KnowingHead, shape_of
from paceline import SamplingParams
from paceline.engine.execute.graphs.draft_rows import LOOKUPS, PLAIN, DraftRows, Sources
from paceline.engine.execute.graphs.head_drafter import HeadDrafter
from paceline.kernels.device.lookup import EitherDraft, HeadDraft, Lookup, head_number, looks_up, without_head
from paceline.speculation.drafters.auto import AutoDrafter
from speculation.trained_heads import random_head

WISH = {"method": "auto", "k": 3, "adaptive": False}
REPEATS = [[3, 1, 4, 1, 5, 9, 2, 6] * 5, [7, 7, 8] * 12]


@pytest.mark.parametrize("confidence", [0.95, 0.05])
def test_what_promises_more_is_verified(confidence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by what they are likely to bring: also where drafts are wanted whatever they are worth."""
    model = tiny_model()
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(REPEATS, params, speculation=None)]
    matched: list[tuple[int, int]] = []
    propose = HeadDrafter.propose

    def watched(drafter: HeadDrafter, inputs: Any, tables: Any, drafts: Any, *more: Any) -> None:
        before = drafts.found.clone()
        propose(drafter, inputs, tables, drafts, *more)
        matched.extend((int(before[group]), int(drafts.matched[group])) for group, seat in
                       enumerate(inputs.seats.tolist()) if seat >= 0 and drafts.found[group])

    def nobody(*_: Any) -> Any:
        raise AssertionError("the host was asked for a draft")

    monkeypatch.setattr(HeadDrafter, "propose", watched)
    monkeypatch.setattr(AutoDrafter, "propose", nobody)
    texts = [prompt + text for prompt, text in zip(REPEATS, plain)]
    head = KnowingHead(shape_of("dspark", model), texts)
    llm = on_device({"it": Noting(head, confidence)})
    outs = llm.generate(REPEATS, params, speculation=WISH)
    assert [out.outputs[0].token_ids for out in outs] == plain
    looked_up = [how for found, how in matched if found]
    assert len(looked_up) > 5
    if confidence > 0.5:
        assert sum(how < 0 for how in looked_up) > 0.5 * len(looked_up)
        assert sum(out.speculation.accepted for out in outs) > 20
    else:
        assert all(how > 0 for how in looked_up)


@pytest.mark.parametrize("after", [1, 3])
def test_a_head_that_fails_leaves_what_can_be_looked_up(after: int) -> None:
    model = tiny_model()
    prompts, params = [*REPEATS, PROMPTS[0]], PARAMS[:3]
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(prompts, params, speculation=None)]
    llm = on_device({"bad": Failing(random_head("eagle3", model), "open", after)})
    outs = llm.generate(prompts, params, speculation=WISH)
    assert [out.outputs[0].token_ids for out in outs] == plain
    for out in outs:
        assert out.speculation is not None and out.speculation.failure is None
        assert "the head is broken" in out.speculation.dropped["eagle3"]
    again = llm.generate(prompts, params, speculation=WISH)
    assert [out.outputs[0].token_ids for out in again] == plain
    assert all(out.speculation is not None and not out.speculation.dropped for out in again)
    assert sum(out.speculation.drafted for out in again if out.speculation is not None) > 10
    assert llm.engine.cache.usage().used == 0 and llm.engine.report()["drafter_failures"] == 3


def test_a_word_of_the_table_names_both() -> None:
    word = EitherDraft(Lookup(1, 3), HeadDraft(2)).packed(5, always=True)
    assert head_number(word) == 2 and looks_up(word) and not looks_up(HeadDraft(2).packed(5))
    assert without_head(word) == Lookup(1, 3).packed(5, always=True)


ITS = Sources(("it",))


def test_rows_are_judged_apart_by_who_drafts() -> None:
    """A head that wins nothing must not cost those their rows who look up, nor the other way round."""
    draft_rows = DraftRows()
    for _ in range(100):
        for sources, tokens in ((LOOKUPS, 2.0), (ITS, 0.9)):
            plan = draft_rows.choose(2, sources)
            draft_rows.learn(2, plan, tokens if plan.rows else 1.0, 1.0, sources)
    assert [bool(draft_rows.choose(2).rows) for _ in range(12)].count(True) > 9
    assert [draft_rows.choose(2, ITS) for _ in range(12)].count(PLAIN) > 9
    assert draft_rows.plain(2) == 1.0 and draft_rows.plain(1) is None


def test_requests_share_a_drafter_though_the_device_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one takes a good part of what admitting a request takes."""
    made: list[str] = []
    begin = AutoDrafter.__init__

    def counted(self: AutoDrafter, *given: Any, **named: Any) -> None:
        made.append("one more")
        begin(self, *given, **named)

    monkeypatch.setattr(AutoDrafter, "__init__", counted)
    llm = on_device({"it": random_head("dspark", tiny_model())})
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    llm.generate(REPEATS * 3, params, speculation=WISH)
    assert len(made) == 1
    made.clear()
    gc.collect()
    llm.generate(REPEATS, params, speculation=WISH)
    assert len(made) == 1  # nobody was left whose it was
