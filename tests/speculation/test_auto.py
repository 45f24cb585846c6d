"""auto: the best of its candidates now, by evidence; never a text of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.tiny import VOCAB, tiny_llm
from paceline import SamplingParams
from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Needs, Observation
from paceline.speculation.drafters.auto import LONGEST_PAUSE, AutoDrafter, Reputation, build
from paceline.speculation.options import Options
from paceline.speculation.tree import DraftTree


class Text:
    def __init__(self, tokens: Sequence[int] = (1, 2, 3)) -> None:
        self.tokens, self.prompt_len, self.seed, self.cache_salt = list(tokens), len(tokens), 0, ""


class Says:
    """Proposes what it is told to, and remembers what it is told."""

    def __init__(self, name: str, tokens: list[int] | None, score: float | None = None, fail: str = "") -> None:
        self.name, self.needs, self.tokens, self.score, self.fail = name, Needs(), tokens, score, fail
        self.seen: list[Observation] = []
        self.asked: list[Budget] = []
        self.open: set[Any] = set()

    def begin(self, sequence: Any) -> None:
        self._maybe("begin")
        self.open.add(sequence)

    def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self._maybe("propose")
        self.asked += budgets
        if self.tokens is None:
            return [None for _ in sequences]
        return [DraftTree.chain(self.tokens[:budget.depth], self.name, None if self.score is None else
                                [self.score] * min(budget.depth, len(self.tokens))) for budget in budgets]

    def observe(self, sequence: Any, observation: Observation) -> None:
        self._maybe("observe")
        self.seen.append(observation)

    def release(self, sequence: Any) -> None:
        self._maybe("release")
        self.open.discard(sequence)

    def _maybe(self, where: str) -> None:
        if self.fail == where:
            raise RuntimeError(f"{self.name} broke in {where}")


def auto(*drafters: Says, clock: Any = None) -> tuple[AutoDrafter, Text]:
    drafter = AutoDrafter("auto", [(one, Reputation()) for one in drafters], *([] if clock is None else [clock]))
    text = Text()
    drafter.begin(text)
    return drafter, text


BUDGET = Budget(4, 64, price=0.3, pace=200.0)


def test_the_more_promising_proposal_is_taken() -> None:
    weak, strong = Says("weak", [5, 6, 7, 8], 0.4), Says("strong", [9, 10], 0.9)
    drafter, text = auto(weak, strong)
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None and draft.tokens == [9, 10] and draft.drafter == "strong"
    assert draft.scores is not None and len(draft.scores) == 2


def test_silence_and_nothing_else() -> None:
    drafter, text = auto(Says("a", None), Says("b", None))
    assert drafter.propose([text], [BUDGET]) == [None]


def test_scores_are_worth_what_came_of_them() -> None:
    boaster, modest = Says("boaster", [5, 6], 0.95), Says("modest", [7, 8], 0.5)
    drafter, text = auto(boaster, modest)
    (first,) = drafter.propose([text], [BUDGET])
    assert first is not None and first.drafter == "boaster"
    for _ in range(20):
        (draft,) = drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([7, 8, 1]))
    assert draft is not None and draft.drafter == "modest", "what was not sent teaches as well"
    assert draft.scores is not None and draft.scores[0] > 0.7
    other = Text()
    drafter.begin(other)
    (draft,) = drafter.propose([other], [BUDGET])
    assert draft is not None and draft.drafter == "modest", "and another request starts from it"


def test_only_the_drafter_of_a_draft_hears_what_became_of_it() -> None:
    sent_one, other = Says("a", [5, 6], 0.9), Says("b", [7], 0.2)
    drafter, text = auto(sent_one, other)
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None
    sent = draft.trimmed(1)
    drafter.observe(text, Observation([5, 1], [0], sent, [5, 1]))
    assert sent_one.seen[0].draft is sent and sent_one.seen[0].accepted == [0]
    assert other.seen[0].draft is None and other.seen[0].tokens == [5, 1]


def test_a_model_is_asked_only_where_it_should_beat_what_is_free() -> None:
    free, model = Says("free", [5, 6, 7, 8], 0.99), Says("model", [5, 6, 7, 8])
    drafter, text = auto(free, model)
    drafter.propose([text], [BUDGET])  # until then it is not known that it gives no scores
    model.asked.clear()
    for _ in range(10):
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([5, 6, 7, 8, 1]))
    assert model.asked == []
    free.tokens = None
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None and draft.drafter == "model"


def test_a_model_that_costs_more_than_it_brings_is_tried_ever_more_rarely() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.05  # 50 ms a call: ten tokens' time at this pace
        return now[0]

    model = Says("model", [5, 6, 7, 8])
    drafter, text = auto(model, clock=clock)
    for _ in range(2000):
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([5]))
    assert 4 <= len(model.asked) < 2 * 2000 / LONGEST_PAUSE + 6


def test_what_was_sampled_is_not_weighed_by_its_value() -> None:
    """A draft with q counts by its drafter's history, whatever its scores say."""

    class Samples(Says):
        def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
            drafts = super().propose(sequences, budgets)
            for draft in drafts:
                assert draft is not None
                draft.q = [None] * len(draft)  # type: ignore[list-item]
            return drafts

    wins = []
    for score in (0.01, 0.99):
        drafter, text = auto(Samples("s", [5, 6], score), Says("d", [7], 0.5))
        (draft,) = drafter.propose([text], [BUDGET])
        assert draft is not None
        wins.append((draft.drafter, draft.scores))
    assert wins[0] == wins[1]


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "release"])
def test_a_candidate_that_raises_is_left_out_and_the_others_go_on(where: str) -> None:
    broken, sound = Says("broken", [5], 0.9, fail=where), Says("sound", [6], 0.8)
    drafter, text = auto(broken, sound)
    for _ in range(3):
        (draft,) = drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([6]))
    assert draft is not None and (draft.drafter == "sound" or where == "release")
    assert len(sound.seen) == 3
    drafter.release(text)
    assert not sound.open


def test_when_nobody_is_left_the_engine_hears_of_it() -> None:
    drafter, text = auto(Says("broken", [5], 0.9, fail="propose"))
    with pytest.raises(RuntimeError, match="broke in propose"):
        drafter.propose([text], [BUDGET])


def test_it_is_made_of_the_drafters_it_is_given() -> None:
    built: list[Any] = []

    def make(wish: Any) -> Any:
        built.append(wish)
        return Says(str(wish), None)

    context = DraftContext(VOCAB, build=make)
    build("auto", Options("auto", {}), context)
    build("auto", Options("auto", {"drafters": ["x", {"method": "y"}]}), context)
    assert built == ["ngram", "suffix", "x", {"method": "y"}]
    for wrong in ([], "ngram", 3):
        with pytest.raises(RequestError, match="drafters"):
            build("auto", Options("auto", {"drafters": wrong}), context)


@pytest.mark.parametrize("style", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.1}])
def test_the_text_is_that_of_plain_decoding_and_drafts_are_accepted(style: dict[str, Any]) -> None:
    llm = tiny_llm()
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 6, [(i * 31 + 7) % VOCAB for i in range(40)]]
    params = SamplingParams(max_tokens=60, ignore_eos=True, **({"seed": 1} | style))
    plain = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    outs = llm.generate(prompts, params, speculation="auto")
    again = llm.generate(prompts, params, speculation={"method": "auto", "adaptive": False, "k": 6})
    assert [out.outputs[0].token_ids for out in outs] == plain == [out.outputs[0].token_ids for out in again]
    assert sum(out.speculation.accepted for out in again) > 0, "the library has read these texts"
    drafters = {token.drafter for out in again for token in out.speculation.provenance if token.outcome == "accepted"}
    assert drafters and drafters <= {"ngram", "suffix"}


def test_a_part_that_cannot_be_built_refuses_the_request() -> None:
    with pytest.raises(RequestError):
        tiny_llm().generate([[1, 2]], speculation={"method": "auto", "drafters": ["no such"]})
