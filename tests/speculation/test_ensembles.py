"""specinfer and merge: several drafters in one tree, each told of its own part in it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tiny import tiny_llm
from paceline.errors import RequestError
from paceline.speculation import spec
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.drafters.merge import MergeDrafter, TrackRecord
from paceline.speculation.drafters.specinfer import SpecInferDrafter
from paceline.speculation.ensemble import Ensemble
from paceline.speculation.packing import UNKNOWN
from paceline.speculation.parts import Part
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree
from speculation.fake_text import FakeText, propose, say, verify

KINDS = (SpecInferDrafter, MergeDrafter)


class Puppet:
    """Proposes what it is given and remembers what it is told."""

    needs = Needs()

    def __init__(self, name: str = "puppet", draft: DraftTree | None = None, fails_at: str = "") -> None:
        self.name = name
        self.draft = draft
        self.told: list[Observation] = []
        self.calls: list[str] = []
        self.budgets: list[Budget] = []
        self._fails_at = fails_at

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails_at:
            raise RuntimeError(f"{self.name} has had enough")

    def begin(self, sequence: DraftedSequence) -> None:
        self._note("begin")

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self._note("propose")
        self.budgets += budgets
        return [self.draft for _ in sequences]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._note("observe")
        self.told.append(observation)

    def release(self, sequence: DraftedSequence) -> None:
        self._note("release")


def tree_of(*paths: list[int], name: str = "") -> DraftTree:
    """A tree with equal beginnings shared."""
    tokens, parents, seen = [], [], {}
    for path in paths:
        parent = -1
        for end in range(1, len(path) + 1):
            key = tuple(path[:end])
            if key not in seen:
                seen[key] = len(tokens)
                tokens.append(path[end - 1])
                parents.append(parent)
            parent = seen[key]
    return DraftTree(tokens, parents, name)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path(node)) for node in range(len(tree))]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree | None:
    """Any tree over few tokens, siblings with equal tokens included."""
    size = draw(st.integers(0, 10))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return DraftTree(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)), parents) if size else None


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.lists(trees(), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 20),
       st.integers(0, 20), st.integers(0, 100))
def test_each_part_is_told_the_truth_about_its_own_tree(
        kind: type[Ensemble], drafts: list[DraftTree | None], depth: int, nodes: int, cut: int, salt: int) -> None:
    """Whatever was packed, cut off by the engine and accepted: the part's accepted nodes are the ones on the committed
    path, and what it hears of a node is what the target said there."""
    puppets = [Puppet(f"p{number}", draft) for number, draft in enumerate(drafts)]
    ensemble = kind("both", [Part(puppet) for puppet in puppets])
    text = FakeText([5])

    def model(tokens: list[int]) -> int:
        return hash((salt, *tokens)) % 3

    ensemble.begin(text)
    draft = propose(ensemble, text, depth, nodes)
    if draft is not None:
        packed = paths_of(draft)
        assert len(packed) == len(set(packed)), "equal paths are one node"
        drafts = [own and own.trimmed(nodes) for own in drafts]  # parts that disregard their budget are cut
        proposed = [paths_of(own) if own is not None else [] for own in drafts]
        for path, source in zip(packed, draft.sources):
            first = next(number for number, own in enumerate(proposed) if path in own)
            assert path in proposed[int(source[1:])] if kind is MergeDrafter else source == f"p{first}"
        whole = {path for own in proposed for path in own if len(path) <= depth}
        assert set(packed) <= whole
        assert set(packed) == whole or len(packed) == nodes, "nothing is left out while there is room"
        draft = draft.trimmed(max(len(draft) - cut, 1))
    before = list(text.tokens)
    verify(ensemble, text, draft, model)
    verified = set() if draft is None else set(paths_of(draft))
    for puppet, own in zip(puppets, drafts):
        told = puppet.told[0]
        assert told.tokens == text.tokens[1:]
        if own is None or draft is None:
            assert told.draft is None and told.accepted == []
            continue
        assert told.draft == own
        own_paths = paths_of(own)
        accepted = [own_paths[node] for node in told.accepted]
        right = [tuple(told.tokens[:size]) for size in range(1, len(told.tokens)) if tuple(told.tokens[:size]) in
                 verified]
        assert accepted == [path for path in right if path in own_paths]
        assert told.chosen[0] == model(before)
        for path, heard in zip(own_paths, told.chosen[1:], strict=True):
            assert heard == (model(before + list(path)) if path in verified else UNKNOWN)


def test_specinfer_takes_level_by_level() -> None:
    first, second = Puppet("a", tree_of([1, 2, 3])), Puppet("b", tree_of([1, 4], [5]))
    drafter = SpecInferDrafter("specinfer", [Part(first), Part(second)])
    text = FakeText([9])
    drafter.begin(text)
    draft = propose(drafter, text)
    assert paths_of(draft) == [(1,), (5,), (1, 2), (1, 4), (1, 2, 3)]
    assert draft.sources == ["a", "b", "a", "b", "a"]
    assert paths_of(propose(drafter, text, nodes=3)) == [(1,), (5,), (1, 2)]


def test_merge_gives_room_to_who_was_right() -> None:
    """Two drafters, room for two nodes: the one that keeps being right gets both, whoever is named first."""
    wrong, right = Puppet("wrong", DraftTree.chain([7, 7])), Puppet("right", DraftTree.chain([1, 2]))
    drafter = MergeDrafter("merge", [Part(wrong), Part(right)])
    text = FakeText([9])
    drafter.begin(text)
    assert sorted(propose(drafter, text, nodes=2).sources) == ["right", "wrong"], "at first nobody knows"
    for _ in range(10):
        propose(drafter, text, nodes=2)
        say(drafter, text, [1, 2, 3])
    draft = propose(drafter, text, nodes=2)
    assert draft.tokens == [1, 2] and draft.sources == ["right", "right"]
    assert draft.scores[0] > 0.8


def test_merge_learns_about_what_it_did_not_pack() -> None:
    """Otherwise a drafter that once fell behind could never come back."""
    first, second = Puppet("first", DraftTree.chain([1])), Puppet("second", DraftTree.chain([2]))
    drafter = MergeDrafter("merge", [Part(first), Part(second)])
    text = FakeText([9])
    drafter.begin(text)
    for told, expected in (([1, 0], 1), ([2, 0], 2)):
        for _ in range(40):
            propose(drafter, text, nodes=1)
            say(drafter, text, told)
        assert propose(drafter, text, nodes=1).tokens == [expected]


def test_what_several_propose_counts_for_more() -> None:
    parts = [Part(Puppet(name, DraftTree.chain(tokens))) for name, tokens in
             (("a", [1]), ("b", [2]), ("c", [2]))]
    drafter = MergeDrafter("merge", parts)
    text = FakeText([9])
    drafter.begin(text)
    assert propose(drafter, text, nodes=1).tokens == [2]


def test_merge_takes_nothing_that_is_not_worth_its_price() -> None:
    drafter = MergeDrafter("merge", [Part(Puppet("a", DraftTree.chain([1, 2, 3, 4, 5])))])
    text = FakeText([9])
    drafter.begin(text)
    assert len(drafter.propose([text], [Budget(8, 64, price=0.2)])[0]) == 2, ".5 and .25 are, .125 is not"
    assert len(drafter.propose([text], [Budget(8, 64)])[0]) == 5


def test_estimates_start_at_the_prior_and_follow_what_happens() -> None:
    record = TrackRecord()
    assert record.estimate(1, 0) == 0.5 and record.estimate(1, 1) == 0.25
    for _ in range(50):
        record.note(1, 0, True)
        record.note(2, 0, False)
    assert record.estimate(1, 0) > 0.9 and record.estimate(2, 0) < 0.1
    assert record.estimate(3, 0) == 0.5
    assert record.estimate(999, 999) == record.estimate(16, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["begin", "propose", "observe"])
def test_a_part_that_fails_is_dropped_alone_and_logged_once(kind: type[Ensemble], moment: str,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Puppet("good", DraftTree.chain([1, 2])), Puppet("bad", DraftTree.chain([3]), fails_at=moment)
    drafter = kind("both", [Part(bad), Part(good)])
    first, second = FakeText([9]), FakeText([8])
    with caplog.at_level(logging.WARNING):
        for text in (first, second):
            drafter.begin(text)
            propose(drafter, text)
            say(drafter, text, [1, 2, 0])
    assert [record.message for record in caplog.records if "bad" in record.message] == [
        "both goes on without bad, which failed: RuntimeError: bad has had enough"]
    assert propose(drafter, first).tokens == [1, 2]
    assert bad.calls.count("release") == 2, "what it held of both was given back when it was dropped"
    drafter.release(first)
    assert bad.calls.count("release") == 2 and good.calls.count("release") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["begin", "propose", "observe", "release"])
def test_whoever_listens_hears_of_parts_that_fail(kind: type[Ensemble], moment: str) -> None:
    """Also of those inside another ensemble."""
    bad = Puppet("bad", DraftTree.chain([3]), fails_at=moment)
    inner = kind("inner", [Part(bad), Part(Puppet("good", DraftTree.chain([1, 2])))])
    outer = SpecInferDrafter("outer", [Part(inner)])
    heard: list[tuple[Any, str, str]] = []
    outer.listen(lambda sequence, name, problem: heard.append((sequence, name, str(problem))))
    text = FakeText([9])
    outer.begin(text)
    propose(outer, text)
    say(outer, text, [1, 2, 0])
    outer.release(text)
    assert heard == [(text, "bad", "bad has had enough")]


def test_a_part_that_fails_on_one_sequence_keeps_the_others() -> None:
    class Choosy(Puppet):
        def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
            if culprit in sequences:
                raise RuntimeError("not that one")
            return super().propose(sequences, budgets)

    culprit, other = FakeText([9]), FakeText([8])
    drafter = SpecInferDrafter("both", [Part(Choosy("choosy", DraftTree.chain([3])))])
    for text in (culprit, other):
        drafter.begin(text)
    for _ in range(2):
        first, second = drafter.propose([culprit, other], [Budget(4, 8)] * 2)
        assert first is None and second is not None and second.tokens == [3]


def test_a_part_with_a_malformed_draft_is_dropped_alone() -> None:
    cyclic = DraftTree.chain([1, 2])
    cyclic.parents = [1, 0]
    for kind in KINDS:
        drafter = kind("both", [Part(Puppet("bad", cyclic)), Part(Puppet("good", DraftTree.chain([4])))])
        text = FakeText([1])
        drafter.begin(text)
        assert propose(drafter, text).tokens == [4]


def test_a_part_that_answers_too_little_is_dropped() -> None:
    class Short(Puppet):
        def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
            return []

    drafter = SpecInferDrafter("both", [Part(Short()), Part(Puppet("good", DraftTree.chain([4])))])
    text = FakeText([1])
    drafter.begin(text)
    assert propose(drafter, text).tokens == [4]


def test_parts_keep_their_own_limits() -> None:
    puppet = Puppet("a", DraftTree.chain([1, 2, 3]))
    drafter = SpecInferDrafter("specinfer", [Part(puppet, depth=2, nodes=2)])
    text = FakeText([1])
    drafter.begin(text)
    assert len(propose(drafter, text, 5)) == 2, "even one that disregards them"
    assert puppet.budgets[0] == Budget(2, 2)


def test_needs_are_those_of_the_parts() -> None:
    probing, remote, sampling = Puppet(), Puppet(), Puppet()
    probing.needs, remote.needs, sampling.needs = Needs(probes=True), Needs(host=False), Needs(samples=True)
    assert SpecInferDrafter("x", [Part(probing), Part(remote)]).needs == Needs(probes=True, host=True)
    assert not SpecInferDrafter("x", [Part(remote)]).needs.host
    assert not SpecInferDrafter("x", [Part(sampling)]).needs.samples, "merged by value: verified as deterministic"


def engine_context() -> DraftContext:
    context = DraftContext(50, build=lambda wish: spec.build(spec.parse(wish), context))
    return context


def built(method: str, drafters: Any, context: DraftContext | None = None, **options: Any) -> Drafter:
    wish = spec.parse({"method": method, "drafters": drafters, **options})
    return spec.build(wish, context or engine_context())


@pytest.mark.parametrize("method", ["specinfer", "merge"])
def test_parts_are_named_like_methods(method: str) -> None:
    drafter = built(method, ["ngram", {"method": "suffix", "tree": True, "k": 3}])
    assert [part.drafter.name for part in drafter.parts] == ["ngram", "suffix"]
    assert drafter.parts[1].depth == 3
    text = FakeText([1, 2, 3, 1, 2])
    drafter.begin(text)
    assert propose(drafter, text).tokens[0] == 3
    nested = built(method, [{"method": "merge", "drafters": ["ngram"]}, "lookahead"])
    nested.begin(text)
    assert "ngram" in propose(nested, text).sources


def test_requests_with_the_same_parts_share_an_ensemble_while_they_live() -> None:
    context = engine_context()
    first = built("merge", ["ngram", "suffix"], context)
    assert built("merge", ["ngram", "suffix"], context) is first
    assert built("merge", ["suffix"], context) is not first
    known = context.shared["merge ensembles"]
    del first
    assert len(known) == 0, "nobody uses them: nothing is kept"


@pytest.mark.parametrize("drafters", [None, [], "ngram", ["teleport"], [5], [{"k": 3}], ["ngram"] * 9,
                                      [{"method": "ngram", "x": 1}], [{"method": "ngram", "verify": "coupled"}]])
def test_bad_parts(drafters: Any) -> None:
    with pytest.raises(RequestError):
        built("specinfer", drafters)


@pytest.mark.parametrize("method", ["specinfer", "merge"])
@pytest.mark.parametrize("rule", ["rejection", "multi-round", "without-replacement"])
def test_rules_that_go_by_q_are_refused_where_it_is_lost(method: str, rule: str) -> None:
    """Deterministic parts have none to lose; then the coupled rule stands for this one, and the statistics say so."""
    llm = tiny_llm()
    ask = {"method": method, "verify": rule, "adaptive": False}
    with pytest.raises(RequestError, match=f"verify='{rule}'.*{method}"):
        llm.generate([[1, 2, 3]], speculation=ask | {"drafters": ["ngram", "exit"]})
    sampled = llm.generate([[1, 2, 3]], speculation=ask | {"drafters": ["ngram", "exit"], "verify": "coupled"})[0]
    plain = llm.generate([[1, 2, 3, 1, 2]], speculation=ask | {"drafters": ["ngram", "suffix"]})[0]
    assert (plain.speculation.as_dict()["verify"], plain.speculation.as_dict()["rule"]) == (rule, "coupled")
    assert sampled.error is None and plain.error is None


def test_ensembles_of_ensembles_end_somewhere() -> None:
    wish: Any = "ngram"
    for _ in range(500):
        wish = {"method": "merge", "drafters": [wish]}
    with pytest.raises(RequestError, match="3 levels"):
        built("merge", [wish])


@pytest.mark.parametrize("wish", ["tapping", {"method": "merge", "drafters": ["ngram", "tapping"]},
                                  {"method": "auto", "drafters": ["tapping"]}])
def test_what_is_made_of_drafters_needs_the_hidden_states_that_they_read(wish: Any,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    tapping = Puppet("tapping")
    tapping.needs = Needs(taps=(3, 7))
    monkeypatch.setattr(spec, "BUILDERS", {**spec.BUILDERS, "tapping": lambda *given: tapping})
    assert spec.build(spec.parse(wish), engine_context()).needs.taps == (3, 7)
