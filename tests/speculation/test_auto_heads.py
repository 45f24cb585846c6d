"""auto with drafters that run a model: asked together and where it pays, merged with look-ups, and never a text of its
own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.drafting.heads import HeadModel
from paceline.models.heads.block import BlockHead
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.drafters.auto import AutoDrafter
from paceline.speculation.parts import Part
from paceline.speculation.tree import DraftTree
from speculation.test_auto import BUDGET, Says, Text

FAMILY = Path(__file__).parents[1] / "family"


class Model(Says):
    """Says what a model would, in rounds that take some seconds."""

    def __init__(self, tokens: list[int] | None, score: float | None = 0.9, seconds: float = 0.0) -> None:
        super().__init__("model", tokens, score)
        self.needs = Needs(samples=True, runs_model=True)
        self.now, self.seconds = 0.0, seconds
        self.rounds: list[int] = []

    def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self.rounds.append(len(sequences))
        self.now += self.seconds
        return super().propose(sequences, budgets)


def auto(model: Model, *others: Says, count: int = 1) -> tuple[AutoDrafter, list[Text]]:
    parts = [(Part(one), one.name) for one in (*others, model)]
    drafter = AutoDrafter("auto", parts, clock=lambda: model.now)
    texts = [Text() for _ in range(count)]
    for text in texts:
        drafter.begin(text)
    return drafter, texts


def test_a_model_is_asked_once_for_all() -> None:
    model = Model([5, 6])
    drafter, texts = auto(model, Says("free", None), count=5)
    drafts = drafter.propose(texts, [BUDGET] * 5)
    assert model.rounds == [5] and all(draft is not None and draft.tokens == [5, 6] for draft in drafts)


def test_a_look_up_that_is_sure_is_taken_without_the_model() -> None:
    model, free = Model([5, 6, 7, 8]), Says("free", [5, 6, 7, 8], 0.97)
    drafter, texts = auto(model, free, count=2)
    drafts = drafter.propose(texts, [BUDGET] * 2)
    assert model.rounds == [] and all(draft is not None and draft.drafter == "free" for draft in drafts)
    free.score = 0.35  # hardly worth its rows
    assert drafter.propose(texts, [BUDGET] * 2)[0] is not None and model.rounds == [2]


def test_the_time_of_a_round_is_shared() -> None:
    """Ten milliseconds are two tokens at this pace: more than a draft wins, less than eight do."""
    asked = {}
    for count in (1, 8):
        model = Model([5, 6], seconds=0.01)
        drafter, texts = auto(model, count=count)
        for _ in range(100):
            drafter.propose(texts, [BUDGET] * count)
            for text in texts:
                drafter.observe(text, Observation([5, 6, 1]))
        asked[count] = len(model.rounds)
    assert asked[1] < 20 and asked[8] > 80


def test_what_a_model_took_is_told_apart() -> None:
    """It is asked only where it should win more than that: nobody has to weigh it again."""
    model, free = Model([5, 6], seconds=1e-4), Says("free", None)
    drafter, texts = auto(model, free)
    drafter.propose(texts, [BUDGET])
    assert model.rounds == [1] and drafter.weighed == pytest.approx(1e-4)
    free.tokens, free.score = [5, 6, 7, 8], 0.97  # sure enough
    drafter.propose(texts, [BUDGET])
    assert model.rounds == [1] and drafter.weighed == 0.0


def test_a_model_that_is_never_right_is_left_alone() -> None:
    """However sure it is: a round takes a fifth of a token's time."""
    model = Model([5, 6], seconds=0.001)
    drafter, (text,) = auto(model)
    for _ in range(500):
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([9]))
    assert 4 < len(model.rounds) < 60


@pytest.mark.parametrize(("price", "asked"), [(0.97, False), (0.8, True)])
def test_a_model_is_not_asked_for_next_to_nothing(price: float, asked: bool) -> None:
    """However right it is: what rows take is not known to a hundredth."""
    model = Model([5], 0.995)
    drafter, (text,) = auto(model)
    for _ in range(200):
        drafter.propose([text], [replace(BUDGET, price=price)])
        drafter.observe(text, Observation([5, 1]))
    assert len(model.rounds) > 180 if asked else len(model.rounds) < 60


@pytest.mark.parametrize(("price", "asked"), [(0.6, 1), (0.2, 8)])
def test_where_rows_are_dear_what_is_not_known_is_tried_and_not_believed(price: float, asked: int) -> None:
    """Every new scope of a crowd would pay for a sanguine guess."""
    model = Model([5, 6], 0.5)
    drafter, texts = auto(model, count=4)
    for _ in range(8):
        drafter.propose(texts, [replace(BUDGET, price=price)] * len(texts))
        for text in texts:
            drafter.observe(text, Observation([9]))
    assert len(model.rounds) == asked


def test_bad_luck_does_not_silence_a_model_that_says_what_it_is_worth() -> None:
    """Seven of ten drafted tokens are right, as it says: that pays, though the first ones are not."""
    model = Model([5, 6], 0.7, seconds=0.001)
    drafter, (text,) = auto(model)
    for number in range(90):
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([5, 6, 9] if number % 10 > 2 else [9]))
    assert len(model.rounds) > 80


def test_a_model_is_forecast_by_what_it_yields_where_others_know_the_text_too() -> None:
    """It knows how repetitions go on, further than the look-up, and nothing else."""
    model, free = Model(None, seconds=0.002), Says("free", None, 0.6)
    drafter, (text,) = auto(model, free)
    asked = {True: 0, False: 0}
    for number in range(400):
        known = number % 2 == 0
        free.tokens = [5] if known else None
        model.tokens, model.score = ([5, 6, 7, 8], 0.95) if known else ([1, 2], 0.05)
        before = len(model.rounds)
        drafter.propose([text], [BUDGET])
        asked[known] += len(model.rounds) - before
        drafter.observe(text, Observation([5, 6, 7, 8, 9] if known else [9]))
    assert asked[True] > 180 and asked[False] < 100, asked


CHEAP = Budget(4, 64, price=0.05, pace=10.0)


def test_two_that_do_not_agree_are_verified_as_one_tree() -> None:
    model, free = Model([5, 6, 7], 0.8), Says("free", [8, 9], 0.6)
    drafter, (text,) = auto(model, free)
    (draft,) = drafter.propose([text], [CHEAP])
    assert draft is not None and draft.drafter == "auto" and not draft.is_chain and draft.q is None
    paths = {tuple(draft.path(node)): draft.source(node) for node in range(len(draft))}
    assert paths == {(5,): "model", (5, 6): "model", (5, 6, 7): "model", (8,): "free", (8, 9): "free"}
    roots = [score for score, parent in zip(draft.scores or (), draft.parents) if parent < 0]
    assert sum(roots) <= 1.0, "one at most is right"
    node = {path: place for place, path in enumerate(map(tuple, map(draft.path, range(len(draft)))))}
    drafter.observe(text, Observation([8, 9, 3], [node[8,], node[8, 9]], draft, [8] * (1 + len(draft))))
    assert free.seen[0].accepted == [0, 1] and free.seen[0].draft is not None and len(free.seen[0].chosen) == 3
    assert model.seen[0].accepted == [] and model.seen[0].draft is not None and model.seen[0].draft.tokens == [5, 6, 7]


def test_who_is_not_worth_its_rows_keeps_nobody_from_being_merged() -> None:
    model, free, poor = Model([5, 6, 7], 0.8), Says("free", [8, 9], 0.6), Model([30], 0.01)
    drafter = AutoDrafter("auto", [(Part(one), one.name) for one in (free, model, poor)])
    text = Text()
    drafter.begin(text)
    (draft,) = drafter.propose([text], [CHEAP])
    assert poor.rounds == [1] and draft is not None and sorted(draft.tokens) == [5, 6, 7, 8, 9]


def test_two_that_agree_are_one_chain() -> None:
    model, free = Model([5, 6], 0.8), Says("free", [5, 6, 7, 8], 0.6)
    drafter, (text,) = auto(model, free)
    (draft,) = drafter.propose([text], [CHEAP])
    assert draft is not None and draft.tokens == [5, 6, 7, 8] and draft.is_chain
    assert draft.sources is None or draft.sources[2:] == ["free", "free"]


def test_rows_that_are_dear_are_for_one_of_them() -> None:
    model, free = Model([5, 6, 7], 0.9), Says("free", [8, 9], 0.45)
    drafter, (text,) = auto(model, free)
    (draft,) = drafter.propose([text], [Budget(4, 64, price=0.4, pace=10.0)])
    assert draft is not None and draft.is_chain and draft.drafter == "model"


@pytest.mark.parametrize("rule", ["rejection", "multi-round"])
def test_what_was_sampled_is_neither_merged_nor_chosen_by_its_value(rule: str) -> None:
    class Samples(Model):
        def propose(self, *given: Any) -> list[DraftTree | None]:
            drafts = super().propose(*given)
            for draft in drafts:
                assert draft is not None
                draft.q = [None] * len(draft)  # type: ignore[list-item]
            return drafts

    told = []
    for tokens, score in itertools.product(([5, 6, 7], [8, 9, 9]), (0.01, 0.99)):
        drafter, (text,) = auto(Samples(tokens, score), Says("free", [8, 9], 0.6))
        text.rule = rule
        (draft,) = drafter.propose([text], [CHEAP])
        assert draft is not None and draft.is_chain and draft.drafter in ("model", "free")
        told.append((draft.drafter, draft.scores))
    assert all(one == told[0] for one in told)


def test_one_that_fails_on_a_sequence_goes_on_with_the_others() -> None:
    class Picky(Model):
        def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
            if any(sequence is texts[1] for sequence in sequences):
                raise RuntimeError("not this one")
            return super().propose(sequences, budgets)

    drafter, texts = auto(Picky([5, 6]), Says("free", [8], 0.5), count=3)
    heard: list[Any] = []
    drafter.listen(lambda sequence, name, problem: heard.append((sequence, name)))
    drafts = [draft and set(draft.tokens) for draft in drafter.propose(texts, [CHEAP] * 3)]
    assert drafts == [{5, 6}, {8}, {5, 6}] and heard == [(texts[1], "model")]
    model_alone, texts = auto(Picky([5, 6]), count=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not this one"):
            model_alone.propose(texts[1:], [CHEAP])
    assert model_alone.propose(texts[:1], [CHEAP])[0] is not None


# ---------------------------------------------------------------- in an engine, with a head that was trained


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["The king said to her that", "It was a dark", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "She looked at the door and"]


def engine(**options: Any) -> LLM:
    return LLM(str(FAMILY / "target"), **{"device": "cpu", "deterministic": True, "kv_blocks": 200, "block_size": 8,
                                          "heads": [str(FAMILY / "dspark")]} | options)


def accepted_by(outs: Sequence[Any]) -> Counter[str]:
    return Counter(token.drafter for out in outs for token in out.speculation.provenance if token.outcome == "accepted")


AROUND: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1}, "crowd": {}, "chunks": {"max_prefill_chunk": 3, "schedule_ahead": True},
    "preempted": {"kv_blocks": 14}}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("style", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}])
def test_the_text_is_that_of_plain_decoding(style: dict[str, Any], around: str, texts: list[str]) -> None:
    llm = engine(**AROUND[around])
    texts = texts[2:] if around == "alone" else texts
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=seed, cache_salt=str(seed), **style)
              for seed in range(len(texts))]
    plain = [out.outputs[0].token_ids for out in llm.generate(texts, params, speculation=None)]
    outs = llm.generate(texts, params, speculation={"method": "auto", "k": 5, "adaptive": False})
    assert [out.outputs[0].token_ids for out in outs] == plain
    assert all(out.speculation.failure is None and not out.speculation.dropped for out in outs)
    assert accepted_by(outs)["dspark"] > 2 and set(accepted_by(outs)) <= {"dspark", "ngram", "suffix"}
    if around == "preempted":
        assert llm.engine.scheduler.preemptions > 0
    if around == "crowd":
        outs = llm.generate(texts, params, speculation="auto")
        assert [out.outputs[0].token_ids for out in outs] == plain


def test_a_round_of_the_head_is_opened_for_all_at_once(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    opened = HeadModel.open

    def noted(model: HeadModel, sequences: Any, depths: Any) -> list[int]:
        rounds.append(len(sequences))
        return opened(model, sequences, depths)

    monkeypatch.setattr(HeadModel, "open", noted)
    llm, steps = engine(), 0
    for text in texts:
        llm.engine.add(text, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
                       speculation={"method": "auto", "k": 3, "adaptive": False})
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert len(rounds) <= steps and max(rounds) == len(texts)


def test_a_head_that_fails_leaves_the_others(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    plain = [out.outputs[0].token_ids for out in llm.generate(texts, params, speculation=None)]

    def fails(*_: Any) -> Any:
        raise RuntimeError("the head is broken")

    monkeypatch.setattr(BlockHead, "open", fails)
    outs = llm.generate(texts, params, speculation={"method": "auto", "k": 4, "adaptive": False})
    assert [out.outputs[0].token_ids for out in outs] == plain
    assert all(out.speculation.failure is None and "the head is broken" in out.speculation.dropped["dspark"]
               for out in outs)
    assert set(accepted_by(outs)) <= {"ngram", "suffix"} and sum(accepted_by(outs).values()) > 0


def test_rules_that_read_q_are_served_too(texts: list[str]) -> None:
    llm = engine()
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=3, ignore_eos=True)
    for rule in ("rejection", "multi-round"):
        outs = llm.generate(texts, params, speculation={"method": "auto", "k": 4, "adaptive": False, "verify": rule})
        assert all(out.error is None and out.speculation.failure is None and not out.speculation.dropped
                   for out in outs)
        assert accepted_by(outs)["dspark"] > 0
