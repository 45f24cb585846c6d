"""What came of steps that a drafter was not asked about, it hears of together: all of it, in order, before it is asked
again and before it has to forget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.tiny import tiny_engine, tiny_llm
from paceline import SamplingParams
from paceline.engine.drafting.drafting import MOST_UNTOLD
from paceline.engine.execute.waiting_rows import WaitingRows
from paceline.kernels.layout import GroupView, Layout
from paceline.models.heads.interface import StoredRows
from paceline.speculation.control import REST, AdaptiveController
from paceline.speculation.controller import Ahead, Ask
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.spec import Speculation
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree
from speculation.puppets import Fragile, Puppet

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Listener(Puppet):
    """Notes what it hears, and whether that was the whole text whenever it is called."""

    def __init__(self) -> None:
        super().__init__(lambda: DraftTree.chain([1], "listener", [0.5]), "listener")
        self.heard: list[list[int]] = []
        self.behind: list[int] = []

    def _missed(self, sequence: DraftedSequence) -> int:
        return len(sequence.tokens) - len(PROMPT) - sum(map(len, self.heard))

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self.behind += [self._missed(sequence) for sequence in sequences]
        return super().propose(sequences, budgets)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        assert sequence.tokens[-len(observation.tokens):] == observation.tokens or self._missed(sequence) > 0
        self.heard.append(observation.tokens)

    def release(self, sequence: DraftedSequence) -> None:
        self.behind.append(self._missed(sequence))
        super().release(sequence)


@pytest.mark.parametrize("every", [1, 3, 10 ** 6])
def test_nothing_is_missed_however_rarely_a_drafter_is_asked(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    plain = tiny_llm().generate([PROMPT], params)[0].outputs[0].token_ids
    steps = iter(range(1, 10 ** 6))
    monkeypatch.setattr(AdaptiveController, "budgets", lambda self, asks, ahead: [
        Budget(1, 1) if next(steps) % every == 0 else None for _ in asks])
    engine, listener = tiny_engine(), Listener()
    name = engine.add(PROMPT, params)
    stats = engine.record(name).speculation = SpeculationStats("listener")
    engine._drafting.begin(engine.scheduler.sequences(name)[0], listener, stats)
    while engine.has_work:
        engine.step()
    assert engine.take(name).snapshot().outputs[0].token_ids == plain
    assert [token for tokens in listener.heard for token in tokens] == plain
    assert set(listener.behind) == {0}
    longest = max(map(len, listener.heard))
    assert longest == MOST_UNTOLD if every > MOST_UNTOLD else longest <= 2 * every
    assert not engine._drafting._untold and not engine._drafting._asked


def test_a_crowd_that_is_not_to_be_drafted_for_is_left_alone_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    control = AdaptiveController()
    for rows in (1, 2, 4, 8, 16, 17):
        for _ in range(5):
            control.cost.observe(Load(rows, 0.0), 1e-3 * rows)
    drafter = Puppet(lambda: None)
    drafter.needs = Needs(runs_model=True)
    weighed: list[int] = []
    real = AdaptiveController._pace
    monkeypatch.setattr(AdaptiveController, "_pace",
                        lambda self, ahead: (weighed.append(ahead.running), real(self, ahead))[1])
    asks = [Ask(name) for name in range(16)]
    for ask in asks:
        control.begin(ask.sequence, drafter, Speculation("puppet"))
    known = control._methods.of("bad")
    known.cycles, known.traits.scored = 100, True
    for _ in range(50):
        known.worth(16).learn(0.0)
        known.worth(1).learn(0.0)
        known.traits.rounds.observe(1, 1.0)
    control.allowance.spend(1.0)  # no tries
    for _ in range(2 * (REST + 1)):
        assert not any(control.budgets(asks, Ahead(16, 16)))
    assert weighed == [16] * 2
    control.begin(16, drafter, Speculation("puppet"))  # who comes may be another kind of text
    control.budgets(asks, Ahead(16, 16))
    assert weighed == [16] * 3
    for _ in range(4):  # one alone is weighed at every step
        control.budgets(asks[:1], Ahead(1, 1))
    assert weighed == [16] * 3 + [1] * 4


def test_a_drafter_that_fails_on_what_it_hears_late_costs_its_request_the_drafter_alone() -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    plain = tiny_llm().generate([PROMPT], params)[0].outputs[0].token_ids
    engine, fragile = tiny_engine(), Fragile("fragile", "observe")
    name = engine.add(PROMPT, params)
    stats = engine.record(name).speculation = SpeculationStats("fragile")
    seq = engine.scheduler.sequences(name)[0]
    engine._drafting.begin(seq, fragile, stats)
    engine._drafting._untold[seq] = [1]
    while engine.has_work:
        engine.step()
    assert engine.take(name).snapshot().outputs[0].token_ids == plain
    assert stats.failure is not None and fragile.released == 1 and not engine._drafting._untold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_type_wait_together(dtype: torch.dtype) -> None:
    waiting = WaitingRows()
    steps = [torch.arange(12, dtype=torch.float32).view(3, 4).to(dtype) + 16 * step for step in range(2)]
    for streams, slots in zip(steps, ([1, 2, 3], [3, 4, 5])):
        view = GroupView(torch.zeros((3, 0), dtype=torch.int64), torch.tensor(slots), None)
        layout = Layout(torch.tensor(slots), [0, 1, 2, 3], slots, [None] * 3, 16, [view])
        waiting.add({0: streams}, StoredRows(torch.tensor(slots), layout, view, torch.empty(0, dtype=torch.int64)))
    taken = waiting.take()
    assert taken is not None and waiting.take() is None
    assert taken.rows.view.slots.tolist() == [1, 2, 3, 4, 5], "of slot 3 the later one"
    assert torch.equal(taken.tapped[0], torch.cat((steps[0][:2], steps[1])))
