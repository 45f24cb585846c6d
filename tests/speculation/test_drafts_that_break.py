"""What a drafter gets wrong costs its own request the drafter, and nobody anything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.tiny import VOCAB, tiny_engine, tiny_llm
from paceline import SamplingParams
from paceline.engine.core import Engine
from paceline.speculation.control import AdaptiveController
from paceline.speculation.drafter import Budget, Drafter
from paceline.speculation.drafters.auto import AutoDrafter
from paceline.speculation.drafters.merge import MergeDrafter
from paceline.speculation.drafters.specinfer import SpecInferDrafter
from paceline.speculation.parts import Part
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.tree import DraftTree
from speculation.puppets import MALFORMED, Fragile, Puppet, changed

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 4
OTHER = [(i * 31 + 7) % VOCAB for i in range(30)]


def attach(engine: Engine, request: str, drafter: Drafter) -> SpeculationStats:
    record = engine.record(request)
    record.speculation = SpeculationStats(drafter.name)
    for seq in engine.scheduler.sequences(record.request.id):
        engine._drafting.begin(seq, drafter, record.speculation)
    return record.speculation


def texts(engine: Engine, requests: Sequence[str]) -> list[list[int]]:
    while engine.has_work:
        engine.step()
    outs = [engine.take(name).snapshot() for name in requests]
    assert [out.error for out in outs] == [None] * len(outs)
    return [out.outputs[0].token_ids for out in outs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [out.outputs[0].token_ids for out in tiny_llm().generate([PROMPT, OTHER], GREEDY)]


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_draft_costs_its_request_the_drafter(kind: str, plain: list[list[int]],
                                                         caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    first, second = engine.add(PROMPT, GREEDY), engine.add(OTHER, GREEDY, speculation={
        "method": "oracle", "tokens": plain[1], "k": 3})
    sound = engine.record(second).speculation
    bad = Puppet(MALFORMED[kind])
    with caplog.at_level(logging.WARNING, "paceline"):
        stats = attach(engine, first, bad)
        assert texts(engine, [first, second]) == plain
    assert stats.failure is not None and stats.cycles == 0
    assert engine._drafting.failures == 1 and bad.released == 1
    assert len([record for record in caplog.records if "switched off" in record.message]) == 1
    assert sound.failure is None and sound.accepted > 0


@pytest.mark.parametrize("method", ["drafted", "judge", "learn"])
def test_a_controller_that_fails_on_a_draft_costs_its_request_the_drafter(
        method: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    first, second = engine.add(PROMPT, GREEDY), engine.add(OTHER, GREEDY)
    mine = engine.scheduler.sequences(first)[0]
    real = getattr(AdaptiveController, method)

    def fails(self: AdaptiveController, sequence: Any, *given: Any) -> Any:
        if sequence is mine or getattr(sequence, "sequence", None) is mine:
            raise ArithmeticError("of a score")
        return real(self, sequence, *given)

    monkeypatch.setattr(AdaptiveController, method, fails)
    stats = [attach(engine, name, Puppet(changed())) for name in (first, second)]
    assert texts(engine, [first, second]) == plain
    assert stats[0].failure == "ArithmeticError: of a score" and stats[1].failure is None
    assert engine._drafting.failures == 1


def test_a_sound_draft_passes_the_check() -> None:
    for tree in (DraftTree([], []), DraftTree.chain([0, VOCAB - 1], "x", [0, 1.0]),
                 DraftTree([5, 5, 6], [-1, -1, 1], "x", sources=["a", "b", "a"], scores=[0.1, 0.2, 0.3])):
        tree.check(VOCAB)


class FailsOn(Puppet):
    """Shared by several; fails whenever some sequence is among those it is asked about."""

    def __init__(self, fails: Callable[[Sequence[DraftedSequence]], bool]) -> None:
        super().__init__(changed(drafter="shared"), "shared")
        self._fails = fails

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        if self._fails(sequences):
            raise RuntimeError("of one of them")
        return super().propose(sequences, budgets)


def test_one_sequence_does_not_cost_the_others_a_shared_drafter(plain: list[list[int]]) -> None:
    engine = tiny_engine()
    names = [engine.add(prompt, GREEDY) for prompt in (PROMPT, OTHER, OTHER)]
    culprit = engine.scheduler.sequences(names[0])[0]
    drafter = FailsOn(lambda sequences: culprit in sequences)
    stats = [attach(engine, name, drafter) for name in names]
    assert texts(engine, names) == [plain[0], plain[1], plain[1]]
    assert [one.failure for one in stats] == ["RuntimeError: of one of them", None, None]
    assert engine._drafting.failures == 1 and stats[1].cycles > 0 and stats[2].cycles > 0


def test_a_drafter_that_fails_only_on_several_goes_on_one_by_one_and_says_so_once(
        plain: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    names = [engine.add(prompt, GREEDY) for prompt in (PROMPT, OTHER)]
    drafter = FailsOn(lambda sequences: len(sequences) > 1)
    with caplog.at_level(logging.WARNING, "paceline"):
        stats = [attach(engine, name, drafter) for name in names]
        assert texts(engine, names) == plain
    assert [one.failure for one in stats] == [None, None] and all(one.cycles > 1 for one in stats)
    assert len([record for record in caplog.records if "together" in record.message]) == 1


MADE_OF_OTHERS: dict[str, Callable[[Sequence[Drafter]], Drafter]] = {
    "auto": lambda parts: AutoDrafter("auto", [(Part(part), part.name) for part in parts]),
    "merge": lambda parts: MergeDrafter("merge", [Part(part) for part in parts]),
    "specinfer": lambda parts: SpecInferDrafter("specinfer", [Part(part) for part in parts]),
    "merge in auto": lambda parts: MADE_OF_OTHERS["auto"]([MADE_OF_OTHERS["merge"](parts)]),
}


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "release"])
@pytest.mark.parametrize("kind", MADE_OF_OTHERS)
def test_a_part_that_fails_is_counted_released_and_shown(kind: str, where: str, plain: list[list[int]],
                                                         caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine()
    name = engine.add(PROMPT, GREEDY)
    bad = Fragile("bad", where)
    with caplog.at_level(logging.WARNING, "paceline"):
        stats = attach(engine, name, MADE_OF_OTHERS[kind]([bad, Fragile("good")]))
        assert texts(engine, [name]) == [plain[0]]
    assert stats.failure is None and stats.dropped == {"bad": f"RuntimeError: in {where}"} and stats.cycles > 0
    assert stats.as_dict()["dropped"] == stats.dropped
    assert engine._drafting.failures == 1 and bad.released >= 1
    assert len([record for record in caplog.records if "without bad" in record.message]) == 1
