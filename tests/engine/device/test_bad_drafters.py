"""Drafters that fail, and drafts that are none, while a device runs ahead: one request loses its drafts, nobody a
token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.device.on_device import PROMPTS, executor_of, made, on_host, run
from engine.tiny import VOCAB
from paceline import LLM, SamplingParams
from paceline.engine.schedule.sequence import Placement
from paceline.request import RequestOutput
from paceline.speculation import spec
from paceline.speculation.drafter import Budget, Drafter
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.tree import DraftTree
from speculation.puppets import MALFORMED, Fragile, Puppet

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=14, temperature=0.9, seed=5, ignore_eos=True)
PLAYED: dict[str, Any] = {"method": "suffix", "adaptive": False, "k": 4}
"""The wish that a puppet is given for."""
NGRAM: dict[str, Any] = {"method": "ngram", "adaptive": False, "k": 4}
COMPANY = [*PROMPTS, [7, 8, 9, 7, 8, 9, 7, 8]]
LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PARAMS = [GREEDY, SEEDED, GREEDY, LONG]
"""The last goes on when the others are gone: beside those who need the host the device looks nothing up."""


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [out.outputs[0].token_ids for out in on_host().generate(COMPANY, PARAMS)]


def played_by(monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    build = spec.build
    monkeypatch.setattr(spec, "build", lambda wish, *more: drafter if wish.method == "suffix" else build(wish, *more))


def beside(plain: Sequence[list[int]]) -> list[Any]:
    """Wishes of everybody: the first has the puppet, the others sound drafts of the host, none, and of the device."""
    return [PLAYED, {"method": "oracle", "tokens": plain[1], "k": 3}, None, NGRAM]


def told(out: RequestOutput) -> SpeculationStats:
    assert out.speculation is not None
    return out.speculation


def served(llm: LLM, plain: Sequence[list[int]], wishes: Sequence[Any]) -> list[RequestOutput]:
    outs = llm.generate(COMPANY, PARAMS, speculation=list(wishes))
    assert [out.outputs[0].token_ids for out in outs] == plain
    assert [out.error for out in outs] == [None] * len(outs)
    llm.engine.cache.check([])
    assert llm.engine.cache.usage().used == 0 and llm.engine.executor.oldest is None
    return outs


@pytest.mark.parametrize(("where", "lucky"), [
    ("begin", 0), ("propose", 0), ("propose", 2), ("observe", 0), ("observe", 2), ("release", 0)])
def test_whoever_a_drafter_fails_on_goes_on_without_it(where: str, lucky: int, plain: list[list[int]],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Fragile("bad", where, lucky)
    played_by(monkeypatch, bad)
    llm = made(3)
    outs = served(llm, plain, beside(plain))
    assert told(outs[0]).failure == f"RuntimeError: in {where}" and bad.released >= 1
    assert told(outs[0]).cycles == {"begin": 0, "propose": lucky, "observe": lucky}.get(where, told(outs[0]).cycles)
    assert all(told(outs[other]).failure is None and told(outs[other]).accepted > 0 for other in (1, 3))
    assert llm.engine.report()["drafter_failures"] == 1


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_draft_costs_its_request_the_drafter(kind: str, plain: list[list[int]],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Puppet(MALFORMED[kind])
    played_by(monkeypatch, bad)
    llm = made(3)
    outs = served(llm, plain, beside(plain))
    assert told(outs[0]).failure is not None and told(outs[0]).cycles == 0 and bad.released == 1
    assert all(told(outs[other]).failure is None and told(outs[other]).accepted > 0 for other in (1, 3))
    assert llm.engine.report()["drafter_failures"] == 1


def long_chain() -> DraftTree:
    return DraftTree.chain([token % VOCAB for token in range(700)], "bad")


def wide_tree() -> DraftTree:
    return DraftTree([token % VOCAB for token in range(700)], [-1] * 700, "bad")


def ragged_tree() -> DraftTree:
    """Wider and deeper than anything that is captured."""
    chance = random.Random(3)
    return DraftTree([chance.randrange(VOCAB) for _ in range(300)],
                     [-1 if not node else chance.randrange(max(-1, node - 3), node) for node in range(300)], "bad")


@pytest.mark.parametrize("make", [long_chain, wide_tree, ragged_tree])
@pytest.mark.parametrize("options", [{}, {"kv_blocks": 24, "block_size": 4, "max_model_len": 32},
                                     {"max_batch_tokens": 16}])
def test_a_draft_beyond_all_bounds_changes_no_token(make: Callable[[], DraftTree], options: dict[str, Any],
                                                    plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound, but longer than was asked for, than the text may become and than a step has room."""
    played_by(monkeypatch, Puppet(make))
    outs = served(made(3, **options), plain, beside(plain))
    assert told(outs[0]).failure is None
    assert all(told(outs[other]).failure is None for other in (1, 3))


class Late(Puppet):
    """Sound drafts until somebody else's steps are in flight, then none."""

    def __init__(self) -> None:
        super().__init__(lambda: DraftTree.chain([1, 2], "late"), "late")
        self.broken = False

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        if self.broken:
            raise RuntimeError("too late")
        return super().propose(sequences, budgets)


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_a_drafter_that_comes_and_fails_while_steps_are_in_flight(passes: int, plain: list[list[int]],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have repeated steps with drafts of the device under way when it is admitted, and when it fails."""
    bad = Late()
    played_by(monkeypatch, bad)
    llm = made(2)
    engine = llm.engine
    order = [3, 2, 1, 0]
    wishes = beside(plain)
    names = {}
    for number in order[:2]:
        names[number] = engine.add(COMPANY[number], PARAMS[number], speculation=wishes[number])
    for _ in range(passes):
        engine.step()
    assert executor_of(llm)._flight
    for number in order[2:]:
        names[number] = engine.add(COMPANY[number], PARAMS[number], speculation=wishes[number])
    while engine.has_work:
        engine.step()
        bad.broken = bad.broken or len(engine.record(names[0]).emitters[0].token_ids) >= 4
    for number, name in names.items():
        out = engine.take(name).snapshot()
        assert out.error is None and out.outputs[0].token_ids == plain[number]
        assert number != 0 or told(out).failure == "RuntimeError: too late"
    assert engine.cache.usage().used == 0


def test_who_lost_its_drafter_no_longer_holds_the_device_back(plain: list[list[int]],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on like one that never had one: steps are repeated, and submitted ahead of the host."""
    played_by(monkeypatch, Fragile("bad", "propose"))
    llm = made(3)
    executor, repeated = executor_of(llm), []
    submit = executor.submit

    def noted(step: Any) -> None:
        submit(step)
        repeated.append(step.repeated)

    executor.submit = noted
    (name,) = [llm.engine.add(COMPANY[0], GREEDY, speculation=PLAYED)]
    (seq,) = llm.engine.scheduler.sequences(name)
    assert seq.placement is Placement.DEVICE
    run(llm)
    assert llm.engine.take(name).emitters[0].token_ids == plain[0]
    assert any(repeated)
