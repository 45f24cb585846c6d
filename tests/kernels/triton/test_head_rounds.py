"""Rounds of trained heads: Triton's operations leave what those in plain torch leave, and draw what is sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.kernels.device import columns
from paceline.kernels.device.head_rounds import Bigrams, DraftSlot, HeadRound, RoundScope, Sureness
from paceline.kernels.device.lookup import HIGHEST, LOOK_BACK, MOST_DRAFTED, EitherDraft, HeadDraft, Lookup
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.stepped import SteppedKernels
from paceline.kernels.triton import load
from paceline.sampling.device.sampler import PipelineSampler

SEATS, VOCAB, LONGEST, SIZE = 20, 300, 40, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def tables(device: torch.device) -> SeatTables:
    """Some want head 1, some head 2, some look up as well, some want nothing; some sample, some are greedy."""
    made = SeatTables(SEATS, VOCAB, device, longest=LONGEST)
    made.texts.random_(0, VOCAB)
    made.lengths.copy_(torch.randint(1, LONGEST, (SEATS,)))
    for seat in range(SEATS):
        draft = (HeadDraft(1), HeadDraft(2), EitherDraft(Lookup(2, 3), HeadDraft(1)), Lookup(1, 3))[seat % 4]
        made.table[seat, columns.LOOKUP] = draft.packed(3 + seat % 5, always=seat % 3 == 0)
        made.table[seat, columns.SEED] = 977 * seat - 5000
        made.table[seat, columns.FLAGS] = columns.GREEDY if seat % 2 else 0
        made.table[seat, columns.TEMPERATURE] = torch.tensor(0.5 + seat / 10, dtype=torch.float64).view(torch.int64)
    return made


def inputs(device: torch.device, state: SeatTables) -> RepeatInputs:
    groups = SEATS + 2
    made = RepeatInputs.over(torch.zeros(RepeatInputs.size(groups), dtype=torch.int64, device=device))
    made.seats.fill_(-1)
    made.seats[:SEATS] = torch.randperm(SEATS)
    made.ends[:SEATS] = state.lengths[made.seats[:SEATS]] - 1 + torch.randint(0, 7, (SEATS,), device=device)
    falling = torch.randint(0, HIGHEST + 1, (LOOK_BACK + 1, MOST_DRAFTED)).sort(1, descending=True).values
    made.levels.copy_(falling)
    return made


def scope(device: torch.device, number: int, longest: int | None = None) -> RoundScope:
    blocks = torch.randperm((SEATS + 2) * 12)[:(SEATS + 2) * 12].view(SEATS + 2, 12).int().to(device)
    return RoundScope(number, longest, blocks, SIZE)


def both(device: torch.device, groups: int = SEATS + 2) -> list[Any]:
    return [kernels.head_rounds(groups, device) for kernels in (load(True, device).device, SteppedKernels().device)]


@pytest.mark.parametrize("number,longest", [(1, None), (1, 15), (2, 30), (3, None)])
def test_who_takes_part_and_the_rows_of_a_pass(device: torch.device, number: int, longest: int | None) -> None:
    state = tables(device)
    given, want = inputs(device, state), scope(device, number, longest)
    opened = [rounds.open(given, state, want, 3) for rounds in both(device)]
    mine = opened[1].owners >= 0
    assert number == 3 or mine.any()
    assert opened[0].owners.tolist() == opened[1].owners.tolist()
    assert opened[0].places.tolist() == opened[1].places.tolist()
    for name in ("ends", "previous", "before"):  # of others they mean nothing
        found, right = (getattr(one, name)[mine].tolist() for one in opened)
        assert found == right, name
    for first, rows, mutual in ((0, 1, False), (2, 1, False), (0, 7, True), (1, 5, False)):
        laid = [rounds.lay_out(one, want, first, rows, mutual) for rounds, one in zip(both(device), opened)]
        assert laid[0].positions.tolist() == laid[1].positions.tolist()
        assert laid[0].slots.tolist() == laid[1].slots.tolist()
        assert laid[0].rows.shape == laid[1].rows.shape and laid[0].rows.data.tolist() == laid[1].rows.data.tolist()


@pytest.mark.parametrize("levels", [1, 3, 7])
def test_what_is_kept_of_a_draft(device: torch.device, levels: int) -> None:
    state = tables(device)
    given, want = inputs(device, state), scope(device, 1)
    most = max(levels, 5)
    kept = []
    tokens = torch.randint(-1, VOCAB, (SEATS + 2, levels), dtype=torch.int32, device=device)
    chances = torch.rand(SEATS + 2, levels, device=device) ** 0.4 * 1.02
    drafted = torch.randint(0, VOCAB, (SEATS + 2, most), dtype=torch.int32, device=device)
    found = torch.randint(0, most + 1, (SEATS + 2,), dtype=torch.int32, device=device)
    matched = torch.randint(0, LOOK_BACK + 1, (SEATS + 2,), dtype=torch.int32, device=device)
    for rounds in both(device):
        opened = rounds.open(given, state, want, levels)
        opened.tokens.copy_(tokens)
        opened.chances.copy_(chances)
        drafts = Drafts.of(SEATS + 2, most, device)
        drafts.tokens.copy_(drafted)
        drafts.found.copy_(found)
        drafts.matched.copy_(matched)
        rounds.close(opened, given, state, drafts)
        kept.append([part.tolist() for part in (drafts.tokens, drafts.levels, drafts.found, drafts.matched)])
    assert kept[0] == kept[1]
    owners = SteppedKernels().device.head_rounds(1, device).open(given, state, want, levels).owners.tolist()
    taken = [match == -1 for match in kept[0][3]]
    assert any(taken) and all(owner >= 0 for owner, own in zip(owners, taken) if own)
    assert not all(own for owner, own in zip(owners, taken) if owner >= 0), "no look-up promised more"


@pytest.mark.parametrize("rank", [0, 20, 80])
@pytest.mark.parametrize("chances", ["probability", "sureness", "with the token", "known"])
@pytest.mark.parametrize("width", [VOCAB, 130])
def test_what_is_drawn_is_what_is_sampled(device: torch.device, rank: int, chances: str, width: int) -> None:
    """From the logits with what the token before adds, laid out over the whole vocabulary, with the same noise."""
    if chances == "with the token" and not rank:
        pytest.skip("there is nothing that it could see of the token")
    state = tables(device)
    groups, hidden = SEATS + 2, 150
    given, want = inputs(device, state), scope(device, 1)
    rounds = load(True, device).device.head_rounds(groups, device)
    for number in (1, 2):  # the second finds the counters as the first did
        want = want._replace(number=number)
        opened = rounds.open(given, state, want, 2)
        ids = None if width == VOCAB else torch.randperm(VOCAB, device=device)[:width].sort().values
        wide = torch.randn(groups, 3, width, device=device) * 3
        wide[:, 1, 7] = -torch.inf
        factors = (torch.randn(size, rank, device=device) for size in (VOCAB, width))
        bigrams = Bigrams(*factors) if rank else None
        seen = torch.randn(groups, 3, hidden, device=device)
        sees = rank if chances == "with the token" else 0
        sure = Sureness(seen[:, 1], torch.randn(hidden + sees, device=device) / 5,
                        torch.randn(1, device=device))
        known = torch.rand(groups, device=device)
        slot = DraftSlot(wide[:, 1], bigrams, {"probability": None, "known": known}.get(chances, sure))
        previous = opened.previous.clone()
        logits = wide[:, 1].clone()
        if bigrams is not None:
            logits += bigrams.first[previous] @ bigrams.second.T
        full = torch.full((groups, VOCAB), -torch.inf, device=device)
        full[:, slice(None) if ids is None else ids] = logits
        sampled = PipelineSampler(state).sample(full, SampledRows(opened.owners, opened.places + 2), Controls())
        rounds.draw(opened, 1, slot, ids, state)
        mine = opened.owners >= 0
        assert mine.any()
        assert opened.tokens[:, 1][mine].tolist() == sampled[mine].tolist()
        assert opened.previous[mine].tolist() == sampled[mine].tolist()
        if chances == "probability":
            expected = full.softmax(1)[torch.arange(groups), sampled.long().clamp(min=0)]
        elif chances == "known":
            expected = known
        else:
            expected = seen[:, 1] @ sure.weight[:hidden] + sure.bias
            if bigrams is not None and chances == "with the token":
                expected = expected + bigrams.first[previous] @ sure.weight[hidden:]
            expected = expected.sigmoid()
        torch.testing.assert_close(opened.chances[:, 1][mine], expected[mine], atol=1e-4, rtol=1e-4)


def test_tokens_of_a_chain_follow_each_other_in_half_precision(device: torch.device) -> None:
    """What one level draws is what the next one goes on from. Of 700 tokens, which many programs share."""
    state, width = tables(device), 700
    state.vocab_size = width
    groups = SEATS + 2
    state.table[:, columns.FLAGS] = columns.GREEDY
    given, want = inputs(device, state), scope(device, 1)
    rounds = load(True, device).device.head_rounds(groups, device)
    opened = rounds.open(given, state, want, 4)
    base = torch.randn(groups, 4, width, device=device).half()
    bigrams = Bigrams(*(torch.randn(width, 32, device=device).half() for _ in range(2)))
    last, mine = opened.previous.clone(), opened.owners >= 0
    for level in range(4):
        logits = base[:, level].float() + bigrams.first[last].float() @ bigrams.second.float().T
        rounds.draw(opened, level, DraftSlot(base[:, level], bigrams), None, state)
        last = logits.argmax(1)
        assert opened.tokens[:, level][mine].tolist() == last[mine].tolist() == opened.previous[mine].tolist()
        chances = logits.softmax(1)[torch.arange(groups), last]
        torch.testing.assert_close(opened.chances[:, level][mine], chances[mine], atol=1e-4, rtol=1e-3)


def test_numbers_that_are_none_draft_nothing(device: torch.device) -> None:
    state = tables(device)
    given, want = inputs(device, state), scope(device, 1)
    rounds = load(True, device).device.head_rounds(SEATS + 2, device)
    opened: HeadRound = rounds.open(given, state, want, 1)
    logits = torch.randn(SEATS + 2, VOCAB, device=device)
    mine = (opened.owners >= 0).nonzero().flatten().tolist()
    logits[mine[0], 200] = torch.nan
    logits[mine[1]] = -torch.inf
    rounds.draw(opened, 0, DraftSlot(logits), None, state)
    assert opened.tokens[mine[0], 0] == opened.tokens[mine[1], 0] == -1
    assert all(opened.tokens[group, 0] >= 0 for group in mine[2:])
