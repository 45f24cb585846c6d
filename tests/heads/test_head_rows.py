"""Where the token before a row lies, and heads on steps that lie in device rows, padding among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Hand, Rows
from head_models import CONFIGS, DraftHand, choices, longest, made, target, text

from paceline.kernels import select
from paceline.kernels.device.packing import pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.layout import Layout
from paceline.kernels.stepped import SteppedKernels
from paceline.models.heads.interface import Opened, StoredRows
from paceline.models.heads.rows import slots_before

EAGER = select(False, torch.device("cpu"))
TREE = [-1, 0, 0, 1, 2, 2, 4]


def on_device(layout: Layout, rows: int, depth: int = 8) -> Layout:
    """The same step as a captured one has it: in buffers that are larger than it."""
    shape = RowsShape.bucket(rows, 4, depth)
    view, missing = layout.views[0], rows - layout.rows
    layout.device = DeviceRows.over(shape, torch.from_numpy(pack(layout, shape)))
    view.slots = torch.cat((view.slots, torch.full((missing,), -1)))
    view.tables = torch.nn.functional.pad(view.tables, (0, 3, 0, 2), value=1).int()
    layout.positions = torch.cat((layout.positions, torch.zeros(missing, dtype=torch.int64)))
    return layout


def groups(hand: Hand) -> list[Rows]:
    """A prompt, a chain behind a text, a tree, a decode row."""
    seqs = [hand.new() for _ in range(4)]
    for seq, length in zip(seqs[1:], (5, 9, 4)):
        hand.step([Rows(seq, text(length, length))])
    return [Rows(seqs[0], text(1, 6)), Rows(seqs[1], text(2, 3)), Rows(seqs[2], text(3, 7), TREE), Rows(seqs[3], [4])]


@pytest.mark.parametrize("device", [False, True])
def test_the_token_before_each_row(device):
    hand = Hand(target(), EAGER)
    rows = groups(hand)
    layout = hand.layout(rows)
    slots = layout.views[0].slots.tolist()
    expected, row = [], 0
    for group in rows:
        table, start = group.seq.tables[0], len(group.seq.tokens)
        for index in range(len(group.tokens)):
            parent = index - 1 if group.parents is None else group.parents[index]
            at = start - 1
            expected.append(slots[row + parent] if parent >= 0 else
                            0 if at < 0 else table[at // 4] * 4 + at % 4)
        row += len(group.tokens)
    if device:
        layout = on_device(layout, 20)
        expected += [0] * 3
    assert slots_before(layout, layout.views[0]).tolist() == expected


def test_rows_without_trees_need_no_ancestors():
    hand = Hand(target(), EAGER)
    rows = [group for group in groups(hand) if group.parents is None]
    plain = slots_before(layout := hand.layout(rows), layout.views[0])
    layout = on_device(hand.layout(rows), 12, depth=0)
    assert slots_before(layout, layout.views[0])[:len(plain)].tolist() == plain.tolist()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_padding_changes_nothing(name):
    """Stored and drafted from device rows with padding: the bits of the step itself, and nothing written elsewhere."""
    kernels, results = SteppedKernels(), []
    for padded in (False, True):
        hand = PaddedHand(target(), made(name), kernels) if padded else DraftHand(target(), made(name), kernels)
        seqs = [hand.new() for _ in range(2)]
        hand.step([Rows(seq, text(30 + index, 11 - index)) for index, seq in enumerate(seqs)])
        logits, _ = hand.draft(seqs, [5, 6], choices(seqs, longest(CONFIGS[name])))
        results.append((logits, {key: plane.nan_to_num(77.0) for key, plane in hand.planes.items()}))
    (plain, kept), (found, also) = results
    assert torch.equal(found, plain)
    assert all(torch.equal(kept[key], also[key]) for key in kept)


class PaddedHand(DraftHand):
    """Everything in device rows, with a third more rows than there are."""

    @torch.inference_mode()
    def step(self, groups: list[Rows]) -> list[torch.Tensor]:
        context = self.forward(groups, frozenset(self.head.config.taps))
        tokens = torch.tensor([token for rows in groups for token in rows.tokens])
        self.model.forward(tokens, context)
        layout = on_device(context.layout, len(tokens) + 5)
        tokens = torch.cat((tokens, torch.zeros(5, dtype=torch.int64)))
        tapped = {tap: torch.cat((stream, torch.rand(5, stream.shape[1]))) for tap, stream in context.tapped.items()}
        view = layout.views[0]
        rows = StoredRows(tokens, layout, view, slots_before(layout, view))
        self.head.store(tapped, rows, self.planes, self.kernels)
        for group in groups:
            group.seq.tokens = group.seq.tokens + group.tokens
        return []

    @torch.inference_mode()
    def draft(self, seqs: list[Any], anchors: list[int], drafted: list[list[int]]) -> tuple[Any, Any]:
        depth, size = len(drafted[0]) + 1, self.block_size
        layouts = []
        for one in self.head.passes(depth):
            layout = self._pass_layout(seqs, one.first, one.rows, one.mutual)
            layouts.append(on_device(layout, layout.rows + one.rows, depth=0))  # one more sequence, which is padding
        before = [seq.tables[0][(len(seq.tokens) - 1) // size] * size + (len(seq.tokens) - 1) % size for seq in seqs]
        opened = Opened(torch.tensor([*anchors, 0]), torch.tensor([*before, 0]), layouts, depth)
        drafting = self.head.open(opened, self.planes, self.kernels)
        found = [drafting.logits(torch.tensor([*previous, 0]))[0] for previous in [anchors, *zip(*drafted)]]
        return torch.stack(found, dim=1)[:-1], None
