"""Verification on the device: the verdicts of the coupled rule, what they commit, and the cache after them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_rows import Both, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.device.operands import PackedDrafts
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton import load
from paceline.kernels.triton.sampling.compaction import TritonCompaction
from paceline.kernels.triton.sampling.verify import TritonVerifier
from paceline.request import SamplingParams
from paceline.sampling import SampleState
from paceline.sampling.device.state import DeviceState, Seated
from paceline.speculation.rules.coupled import coupled


@st.composite
def trees(draw):
    """parents (row 0 is the root), tokens and draws of one group, from few tokens, so that drafts are often right."""
    rows = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))]
    few = st.integers(0, 2)
    return parents, [draw(few) for _ in parents], [draw(st.one_of(few, st.just(-1))) for _ in parents]


class Packed:
    """Groups one after another, a group without rows and a padded one among them."""

    def __init__(self, groups, device):
        self.offsets, parents, tokens, drawn, seats = [0], [], [], [], []
        for i, (above, fed, own) in enumerate(groups):
            base = self.offsets[-1]
            parents += [-1 if parent < 0 else base + parent for parent in above]
            tokens, drawn, seats = tokens + fed, drawn + own, seats + [i] * len(above)
            self.offsets.append(len(parents))
        self.offsets.append(len(parents))
        parents, tokens, drawn, seats = parents + [-1], tokens + [1], drawn + [1], seats + [-1]
        self.offsets.append(len(parents))

        def ints(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        widest = max(len(above) for above, _, _ in groups)
        self.drafts = PackedDrafts(ints(self.offsets), ints(parents), ints(tokens).long(), ints(seats), widest)
        self.drawn = ints(drawn)


def expected(group):
    parents, fed, own = group
    verdict = coupled(parents, fed, own)
    # The host ends a text at a row without a draw; no draft is right there.
    return verdict


@settings(max_examples=40, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_verdicts_are_those_of_the_coupled_rule(device, groups):
    packed = Packed(groups, device)
    tables = SeatTables(len(groups), 8, device)
    found = TritonVerifier(len(groups) + 2, 8, device).verify(packed.drafts, packed.drawn, tables)
    for i, group in enumerate(groups):
        verdict, base = expected(group), packed.offsets[i]
        count = len(verdict.tokens)
        assert int(found.accepted[i]) == len(verdict.path)
        assert found.tokens[i].tolist() == verdict.tokens + [-1] * (9 - count)
        assert found.rows[i].tolist() == [base + row for row in verdict.rows] + [-1] * (9 - count)
        assert bool(found.bonus[i]) == verdict.bonus
    assert found.accepted[-2:].tolist() == [-1, -1]
    assert (found.tokens[-2:] == -1).all() and (found.rows[-2:] == -1).all()


def test_a_path_longer_than_there_is_room_for_ends_early(device):
    chain = ([-1, 0, 1, 2, 3], [0, 5, 6, 7, 8], [5, 6, 7, 8, 9])
    packed = Packed([chain], device)
    found = TritonVerifier(3, 2, device).verify(packed.drafts, packed.drawn, SeatTables(1, 16, device))
    assert found.tokens[0].tolist() == [5, 6, 7]
    assert int(found.accepted[0]) == 2


def test_emitted_tokens_count_in_the_next_draw(device):
    """Two steps on the device equal two steps on the host: drafts see their ancestors, later rows what was emitted."""
    width = 60
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.9)
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((4, width)) * 2).astype(np.float32)
    # Siblings share a request, and so a seat: rows 0 (root), 1 and 2 (its children), 3 (below 1).
    cases = [Case(params, logits[i], prompt=[5, 6], output=[7, 7], path=path, seed=11)
             for i, path in enumerate([[], [8], [9], [8, 8]])]
    both = Both(cases, width, device)
    both.device_rows.seats[both.at] = 1
    first = both.device()
    assert first == both.host()
    # Draft what was drawn, so that the path is accepted; then the seat must know it.
    own = Packed([([-1, 0, 0, 1], [0, first[0], 9 if first[0] != 9 else 10, first[1]], first)], device)
    own.drafts.seats[:4] = 1
    verdict = TritonVerifier(3, 4, device).verify(own.drafts, own.drawn, both.tables, count=True)
    tokens = [token for token in verdict.tokens[0].tolist() if token >= 0]
    assert len(tokens) == 3
    after = Both([Case(params, logits[0], prompt=[5, 6], output=[7, 7, *tokens], seed=11)], width, device)
    after.tables.counts = both.tables.counts
    assert after.device() == after.host()


@pytest.mark.parametrize(("params", "count"), [({"presence_penalty": 1.0}, True), ({"presence_penalty": 1.0}, False),
                                               ({"logit_bias": {3: 1.0}}, True)])
def test_tokens_count_where_it_is_asked_for_and_somebody_is_penalised(device, params, count):
    packed = Packed([([-1, 0], [0, 1], [1, 2])], device)
    tables = SeatTables(1, 8, device)
    seated = Seated(0, SampleState(SamplingParams(**params), [5], 0, 8), 1)
    DeviceState(tables, load(True, device).device).assign([seated])
    TritonVerifier(3, 2, device).verify(packed.drafts, packed.drawn, tables, count=count)
    counted = count and "presence_penalty" in params
    assert tables.counts.tolist() == [[0, 2, 2, 0, 0, 0, 0, 0] if counted else [0] * 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_the_accepted_path_moves_to_the_front(device, dtype):
    """Two layers' keys, values and scales; a tree whose path is rows 0, 2, 4, 5 and a chain that stays where it is."""
    slots, heads, dim = 40, 2, 6
    planes = [torch.randint(-100, 100, (slots, heads, dim), dtype=torch.int16).to(dtype).to(device) for _ in range(4)]
    planes += [torch.randn(slots, heads, device=device) for _ in range(2)]
    tree = ([-1, 0, 0, 1, 2, 4, 5], [9, 1, 2, 3, 4, 5, 6], [2, 0, 4, 0, 5, 7, 0])
    chain = ([-1, 0, 1], [9, 1, 2], [1, 2, 3])
    packed = Packed([tree, chain], device)
    verdicts = TritonVerifier(4, 4, device).verify(packed.drafts, packed.drawn, SeatTables(2, 16, device))
    assert verdicts.accepted.tolist() == [3, 2, -1, -1]
    # Blocks lie anywhere: the tree's rows cross from slots 13.. to 2..
    where = torch.tensor([13, 14, 15, 2, 3, 4, 5, 20, 21, 22, 39], device=device)
    before = [plane.cpu().clone() for plane in planes]
    TritonCompaction(planes).move(packed.drafts.offsets, verdicts.accepted, verdicts.rows, where)
    for plane, old in zip(planes, before):
        now = old.clone()
        now[[14, 15, 2]] = old[[15, 3, 4]]
        assert torch.equal(plane.cpu(), now)


def test_planes_that_cannot_be_moved_by_words_are_refused(device):
    with pytest.raises(ValueError, match="32-bit words"):
        TritonCompaction([torch.zeros(4, 3, dtype=torch.int8, device=device)])
