"""auto: the best of its candidates now, by evidence; never a text of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from engine.tiny import VOCAB, tiny_llm
from paceline import SamplingParams
from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Needs, Observation
from paceline.speculation.drafters.auto import AutoDrafter, build
from paceline.speculation.history import LONGEST_PAUSE, MOST_HISTORIES, Histories
from paceline.speculation.options import Options
from paceline.speculation.parts import MOST_PARTS, Part
from paceline.speculation.tree import DraftTree


class Text:
    def __init__(self, tokens: Sequence[int] = (1, 2, 3), scope: str = "") -> None:
        self.tokens, self.prompt_len, self.seed, self.scope = list(tokens), len(tokens), 0, scope
        self.rule = "coupled"


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
    parts = [(Part(one), one.name) for one in drafters]
    drafter = AutoDrafter("auto", parts, clock=clock or time.perf_counter)
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


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "release"])
def test_a_candidate_that_is_left_out_gives_back_what_it_holds_and_is_told_of(where: str) -> None:
    broken, sound = Says("broken", [5], 0.9, fail=where), Says("sound", [6], 0.8)
    drafter = AutoDrafter("auto", [(Part(broken), "broken"), (Part(sound), "sound")])
    heard: list[tuple[Any, str, str]] = []
    drafter.listen(lambda sequence, name, problem: heard.append((sequence, name, str(problem))))
    text = Text()
    drafter.begin(text)
    drafter.propose([text], [BUDGET])
    drafter.observe(text, Observation([6]))
    drafter.release(text)
    assert heard == [(text, "broken", f"broken broke in {where}")]
    assert not sound.open and (where == "release" or not broken.open)


def test_when_nobody_is_left_the_engine_hears_of_it() -> None:
    broken = Says("broken", [5], 0.9, fail="propose")
    drafter, text = auto(broken)
    with pytest.raises(RuntimeError, match="broke in propose"):
        drafter.propose([text], [BUDGET])
    assert not broken.open


@pytest.mark.parametrize("scores", [[float("nan")] * 2, ["x", 0.5], [0.5]])
def test_a_candidate_with_a_malformed_draft_is_left_out_alone(scores: Any) -> None:
    class Malformed(Says):
        def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
            draft = DraftTree.chain([5, 6], self.name)
            draft.scores = scores
            return [draft]

    drafter, text = auto(Malformed("bad", None), Says("sound", [6], 0.8))
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None and draft.drafter == "sound"


class Grows(Says):
    """A tree without scores: so many siblings at every depth, of which the last is right and goes on."""

    def __init__(self, name: str, tokens: list[int], siblings: int) -> None:
        super().__init__(name, tokens)
        self.siblings = siblings

    def propose(self, sequences: Sequence[Any], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self.asked += budgets
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in (self.tokens or [])[:budgets[0].depth]:
            tokens += [token + 50 + sibling for sibling in range(self.siblings - 1)] + [token]
            parents += [parent] * self.siblings
            parent = len(tokens) - 1
        return [DraftTree(tokens, parents, self.name)]


def test_a_tree_without_scores_is_learnt_about_by_depth() -> None:
    """One that is never right falls behind; one that always is comes to be preferred, siblings and all."""
    wrong, right = Grows("wrong", [40, 41], 2), Grows("right", [5, 6], 2)
    drafter, text = auto(wrong, right)
    cheap = Budget(2, 64, price=0.05, pace=0.0)
    for _ in range(12):
        (draft,) = drafter.propose([text], [cheap])
        drafter.observe(text, Observation([5, 6, 1]))
    assert draft is not None and draft.drafter == "right"
    assert draft.scores is not None and draft.scores[0] == draft.scores[1] > 0.4, "two siblings share nearly 1"
    (records,) = drafter._records.values()
    assert records[0].history.by_depth.rates(1)[0] < 0.3 and records[1].history.by_depth.rates(2)[1] > 0.85


def test_the_forecast_of_a_tree_without_scores_counts_all_its_nodes() -> None:
    """Right at every depth, and still dearer than it is worth: eight nodes per depth at a price of 0.3 each."""
    bush = Grows("bush", [5, 6], 8)
    drafter, text = auto(bush)
    for _ in range(200):
        assert drafter.propose([text], [BUDGET]) == [None]
        drafter.observe(text, Observation([5]))
    assert len(bush.asked) < 20


def test_probes_are_passed_on_and_left_whole() -> None:
    probing, other = Says("probing", [5, 6, 7], 0.9), Says("other", [8, 9, 10], 0.95)
    probing.needs = Needs(probes=True)
    drafter, text = auto(probing, other)
    assert drafter.needs.probes and not auto(other)[0].needs.probes
    other.tokens = None
    probing.score = 0.35
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None and draft.tokens == [5, 6, 7], "the last ones are hopeless, and are there to be observed"
    probing.tokens, other.tokens, other.score = None, [8, 9, 10], 0.6
    (draft,) = drafter.propose([text], [BUDGET])
    assert draft is not None and draft.tokens == [8, 9], ".6 and .36 are worth .3, .216 is not"


def test_parts_keep_their_own_limits() -> None:
    scored, unscored = Says("scored", [5, 6, 7, 8], 0.9), Says("unscored", [5, 6, 7, 8])
    drafter = AutoDrafter("auto", [(Part(scored, depth=2, nodes=2), "scored"),
                                   (Part(unscored, depth=3, nodes=3), "unscored")])
    text = Text()
    drafter.begin(text)
    for _ in range(3):
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([1]))
    assert {(one.depth, one.nodes) for one in scored.asked} == {(2, 2)}
    assert unscored.asked and all(one.depth <= 3 and one.nodes == 3 for one in unscored.asked)


def test_what_texts_of_one_scope_taught_is_not_used_for_another() -> None:
    drafter, fresh = (AutoDrafter("auto", [(Part(Says("x", [5, 6], 0.9)), "x")]) for _ in range(2))
    for _ in range(40):
        text = Text(scope="hers")
        drafter.begin(text)
        drafter.propose([text], [BUDGET])
        drafter.observe(text, Observation([1]))
        drafter.release(text)
    texts = [Text(scope="hers"), Text(scope="his"), Text(scope="")]
    other = Text()
    fresh.begin(other)
    for text in texts:
        drafter.begin(text)
    hers, *theirs = drafter.propose(texts, [BUDGET] * 3)
    (expected,) = fresh.propose([other], [BUDGET])
    assert hers is None and expected is not None
    assert [one is not None and one.scores == expected.scores for one in theirs] == [True, True]


def test_reputations_are_kept_for_the_latest_wishes_only() -> None:
    known = Histories()
    first, kept = known.of("first"), known.of({"method": "ngram"})
    for number in range(MOST_HISTORIES):
        known.of(f"wish {number}")
        assert known.of({"method": "ngram"}) is kept
    assert len(known) == MOST_HISTORIES and known.of("first") is not first


def test_it_is_made_of_the_drafters_it_is_given() -> None:
    built: list[Any] = []

    def make(wish: Any) -> Any:
        built.append(wish)
        return Says(str(wish), None)

    context = DraftContext(VOCAB, build=make)
    build("auto", Options("auto", {}), context)
    build("auto", Options("auto", {"drafters": ["x", {"method": "y"}]}), context)
    assert built == ["ngram", "suffix", "x", {"method": "y"}]
    for wrong in ([], "ngram", 3, ["ngram"] * (MOST_PARTS + 1), [{"method": "ngram", "verify": "coupled"}], [3]):
        with pytest.raises(RequestError, match="drafters"):
            build("auto", Options("auto", {"drafters": wrong}), context)


@pytest.mark.parametrize("style", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.1}])
def test_the_text_is_that_of_plain_decoding_and_drafts_are_accepted(style: dict[str, Any]) -> None:
    llm = tiny_llm()
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 6, [(i * 31 + 7) % VOCAB for i in range(40)]]
    params = SamplingParams(max_tokens=40, ignore_eos=True, **({"seed": 1} | style))
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


@pytest.mark.parametrize("part", ["lookahead", "oracle"])
def test_trees_without_scores_are_used_and_change_nothing(part: str) -> None:
    llm = tiny_llm()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = llm.generate([prompt], params)[0].outputs[0].token_ids
    wish = {"method": "oracle", "tokens": plain, "branches": 2} if part == "oracle" else part
    out = llm.generate([prompt], params, speculation={
        "method": "auto", "drafters": [wish], "adaptive": False, "k": 7})[0]
    assert out.outputs[0].token_ids == plain
    assert out.speculation.cycles > 0 and out.speculation.failure is None and out.speculation.dropped == {}
    assert out.speculation.accepted > (30 if part == "oracle" else 0)
